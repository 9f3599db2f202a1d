"""Tensors of other libraries, as they lie in memory: torch's, and whatever speaks DLPack or the CUDA array interface.

Invariant: nothing is copied and nothing imported. Host tensors become numpy views of the same memory; GPU tensors become
plain pointers, checked for device, dtype, shape and strides, because the library can only trust the pointers it gets. One
that cannot be taken as it is is refused by name.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

from ._arrays import ScoreOptions, layer_spec
from .errors import InvalidArgument

_TYPESTR = {"<f2": "float16", "<f4": "float32", "<i4": "int32", "<i8": "int64", "<u2": "bfloat16"}
_CODES = {"float16": 0, "bfloat16": 1, "float32": 2}


@dataclasses.dataclass(frozen=True)
class DeviceTensor:
    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    index: int | None  # the GPU's number in this process; None: not said


def is_foreign(value) -> bool:
    """Neither numpy's nor a plain Python value."""
    return not isinstance(value, np.ndarray) and (
        hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__") or hasattr(value, "data_ptr")
    )


def as_numpy(name: str, value):
    """A host tensor as a view; what is not foreign stays as it is."""
    if value is None or not is_foreign(value):
        return value
    if getattr(value, "requires_grad", False):
        value = value.detach()
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu" or not hasattr(value, "__dlpack__"):
        raise InvalidArgument(f"{name} is not in host memory, where this model's pages are")
    bf16 = str(getattr(value, "dtype", "")) == "torch.bfloat16"  # numpy has no bf16: its bits travel as uint16
    if bf16:
        value = value.view(sys.modules["torch"].int16)
    try:
        array = np.from_dlpack(value)
    except (BufferError, TypeError, RuntimeError) as error:
        raise InvalidArgument(f"{name} cannot be read as a numpy array: {error}") from None
    return array.view(np.uint16) if bf16 else array


def empty_like(q, dtype: str | None = None, dimensions: int | None = None):
    """An uninitialized array of q's library, device, shape (or its first dimensions) and dtype (or another)."""
    shape = tuple(q.shape[:dimensions])
    if hasattr(q, "new_empty"):
        return q.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype) if dtype else q.dtype)
    if isinstance(q, np.ndarray):
        return np.empty(shape, dtype or q.dtype)
    raise InvalidArgument(f"give out (and lse) for a q of type {type(q).__name__}")


def look(name: str, value, where: str) -> DeviceTensor:
    """A tensor in the memory of the GPU `where`."""
    if hasattr(value, "data_ptr"):
        device = value.device
        if device.type != "cuda":
            raise InvalidArgument(f"{name} is on {device}; this model's pages are on {where}")
        dtype = str(value.dtype).removeprefix("torch.")
        return DeviceTensor(value.data_ptr(), dtype, tuple(value.shape), tuple(value.stride()), device.index)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise InvalidArgument(f"{name} is a {type(value).__name__} in host memory; this model's pages are on {where}")
    dtype, size = _TYPESTR.get(interface["typestr"], interface["typestr"]), int(interface["typestr"][2:])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    else:
        strides = tuple(stride // size for stride in strides)
    return DeviceTensor(interface["data"][0], dtype, shape, strides, None)


class Gpu:
    """The GPU that holds a model's pages: its UUID, and its number in torch, once torch is there."""

    def __init__(self, uuid: str):
        self.uuid, self._index = uuid, None

    @property
    def index(self) -> int | None:
        torch = sys.modules.get("torch")
        if self._index is None and torch is not None and torch.cuda.is_available():
            name = self.uuid.split("-", 1)[1]
            for number in range(torch.cuda.device_count()):
                uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
                if uuid is not None and str(uuid).removeprefix("GPU-").removeprefix("MIG-") == name:
                    self._index = number
        return self._index

    def stream(self, stream=None) -> int:
        """The handle of `stream`: torch's or an integer; None: torch's current one, or the default stream without torch."""
        if stream is None:
            torch = sys.modules.get("torch")
            return 0 if self.index is None else torch.cuda.current_stream(self.index).cuda_stream
        return stream if isinstance(stream, int) else stream.cuda_stream

    def look(self, name: str, value, dtype: str, dimensions: int) -> DeviceTensor:
        """The same as look(), for a tensor whose innermost elements must be adjacent."""
        tensor = look(name, value, self.uuid)
        if tensor.index is not None and self.index is not None and tensor.index != self.index:
            raise InvalidArgument(f"{name} is on cuda:{tensor.index}; this model's pages are on cuda:{self.index}")
        if dtype and tensor.dtype != dtype:
            raise InvalidArgument(f"{name} is {tensor.dtype}, not {dtype}")
        if len(tensor.shape) != dimensions:
            raise InvalidArgument(f"{name} has {len(tensor.shape)} dimensions, not {dimensions}")
        if tensor.shape[-1] > 1 and tensor.strides[-1] != 1:
            raise InvalidArgument(f"{name}'s innermost elements are not adjacent (stride {tensor.strides[-1]})")
        return tensor


def _check_shape(name: str, tensor: DeviceTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidArgument(f"{name} has shape {tensor.shape}, not {shape}")


def _point(abi, args, name: str, tensor: DeviceTensor) -> None:
    setattr(args, name, abi.ffi.cast("void*", tensor.pointer))
    setattr(args, f"{name}_token_stride", tensor.strides[0])
    setattr(args, f"{name}_head_stride", tensor.strides[1])


def gpu_append_args(abi, gpu: Gpu, layers, layer: int, k, v, slots):
    spec = layer_spec(layers, layer)
    where = gpu.look("slots", slots, "int64", 1)
    args = abi.struct(
        "kvq_append_args", layer=layer, tokens=where.shape[0], slots=abi.ffi.cast("int64_t*", where.pointer)
    )
    for name, value in (("k", k), ("v", v)):
        if value is not None:
            tensor = gpu.look(name, value, "bfloat16" if spec.bf16 else "float16", 3)
            _check_shape(name, tensor, (where.shape[0], spec.kv_heads, spec.head_dim))
            _point(abi, args, name, tensor)
    return args


def _batch(abi, gpu: Gpu, args, table, lengths, starts) -> None:
    pages, tokens, rows = (
        gpu.look("block_table", table, "int32", 2),
        gpu.look("seq_lengths", lengths, "int32", 1),
        gpu.look("query_starts", starts, "int32", 1),
    )
    batch = pages.shape[0]
    if tokens.shape != (batch,) or rows.shape != (batch + 1,):
        raise InvalidArgument(
            f"table {pages.shape}, lengths {tokens.shape}, starts {rows.shape} are not of one batch"
        )
    args.batch, args.block_table_stride = batch, pages.strides[0] if batch > 1 else pages.shape[1]
    args.block_table = abi.ffi.cast("int32_t*", pages.pointer)
    args.seq_lengths = abi.ffi.cast("int32_t*", tokens.pointer)
    args.query_starts = abi.ffi.cast("int32_t*", rows.pointer)


def gpu_attend_args(abi, gpu: Gpu, layers, layer: int, q, out, sums, batch, options: ScoreOptions, workspace):
    """`batch`: table, lengths, starts. Their values are read when the kernel runs, so they cannot be checked here."""
    spec = layer_spec(layers, layer)
    args = abi.struct("kvq_attend_args", layer=layer, query_heads=spec.query_heads)
    _batch(abi, gpu, args, *batch)
    tokens = None
    for name, value in (("q", q), ("out", out)):
        tensor = gpu.look(name, value, "", 3)
        if tensor.dtype not in _CODES:
            raise InvalidArgument(f"{name} is {tensor.dtype}, not float16, bfloat16 or float32")
        tokens = tensor.shape[0] if tokens is None else tokens
        _check_shape(name, tensor, (tokens, spec.query_heads, spec.head_dim))
        setattr(args, f"{name}_dtype", _CODES[tensor.dtype])
        _point(abi, args, name, tensor)
    if sums is not None:
        tensor = gpu.look("lse", sums, "float32", 2)
        _check_shape("lse", tensor, (tokens, spec.query_heads))
        if tokens > 1 and tensor.strides[0] != spec.query_heads:
            raise InvalidArgument("lse's rows are not adjacent")
        args.lse = abi.ffi.cast("float*", tensor.pointer)
    for name in ("alibi_slopes", "sinks"):
        if (vector := getattr(options, name)) is not None:
            tensor = gpu.look(name, vector, "float32", 1)
            _check_shape(name, tensor, (spec.query_heads,))
            setattr(args, name, abi.ffi.cast("float*", tensor.pointer))
    args.scale, args.soft_cap, args.window = options.scale, options.soft_cap, options.window
    if workspace is not None:
        tensor = gpu.look("workspace", workspace, "", 1)
        itemsize = workspace.element_size() if hasattr(workspace, "element_size") else 1
        args.workspace, args.workspace_bytes = abi.ffi.cast("void*", tensor.pointer), tensor.shape[0] * itemsize
    return args
