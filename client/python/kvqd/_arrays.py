"""numpy arrays into the argument structs of append and attend.

Invariant: what crosses into C is checked here for dtype, shape and channel stride, because the library can only trust
the pointers it gets; anything else is the library's to refuse. Each function returns its struct and the arrays that
must stay alive during the call.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .errors import InvalidArgument
from .values import Layer

# numpy has no bf16: its bits travel as uint16.
_DTYPE = {np.dtype(np.float16): 0, np.dtype(np.uint16): 1, np.dtype(np.float32): 2}


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    soft_cap: float = 0.0  # 0: none
    window: int = -1  # tokens a query sees, itself included; -1: all
    alibi_slopes: np.ndarray | None = None  # (query_heads,)
    sinks: np.ndarray | None = None  # (query_heads,): learned logits that join the denominator


class BatchArrays:
    """Which tokens each sequence of a batch has, and in which pages."""

    def __init__(self, block_table, seq_lengths, query_starts):
        self.table = np.ascontiguousarray(block_table, np.int32)
        self.lengths = np.ascontiguousarray(seq_lengths, np.int32)
        self.starts = np.ascontiguousarray(query_starts, np.int32)
        shapes = self.table.shape, self.lengths.shape, self.starts.shape
        if self.table.ndim != 2 or shapes[1:] != ((len(self.table),), (len(self.table) + 1,)):
            raise InvalidArgument("table %s, lengths %s, starts %s are not of one batch" % shapes)


def layer_spec(layers: tuple[Layer, ...], layer: int) -> Layer:
    if not 0 <= layer < len(layers):
        raise InvalidArgument(f"layer {layer} of {len(layers)}")
    return layers[layer]


def _check_heads(name: str, array: np.ndarray, tokens: int, heads: int, head_dim: int) -> None:
    if array.shape != (tokens, heads, head_dim):
        raise InvalidArgument(f"{name} has shape {array.shape}, not {(tokens, heads, head_dim)}")


def _point(abi, args, name: str, array: np.ndarray) -> None:
    """Sets args.NAME and its strides, which are counted in elements."""
    setattr(args, name, abi.ffi.cast("void*", array.ctypes.data))
    setattr(args, f"{name}_token_stride", array.strides[0] // array.itemsize)
    setattr(args, f"{name}_head_stride", array.strides[1] // array.itemsize)


def _with_unit_channel_stride(array: np.ndarray) -> np.ndarray:
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def append_args(abi, layers, layer: int, k, v, slots):
    spec, slots = layer_spec(layers, layer), np.ascontiguousarray(slots, np.int64).reshape(-1)
    args = abi.struct("kvq_append_args", layer=layer, tokens=len(slots), slots=abi.array("int64_t", slots))
    alive = [slots]
    for name, array in (("k", k), ("v", v)):
        if array is None:
            continue
        if _DTYPE.get(array.dtype) != int(spec.bf16):
            stored = "bf16 (uint16)" if spec.bf16 else "float16"
            raise InvalidArgument(f"{name} is {array.dtype}; layer {layer} stores {stored}")
        _check_heads(name, array, len(slots), spec.kv_heads, spec.head_dim)
        alive.append(_with_unit_channel_stride(array))
        _point(abi, args, name, alive[-1])
    return args, alive


def _vector(abi, args, name: str, vector, heads: int):
    array = np.ascontiguousarray(vector, np.float32)
    if array.shape != (heads,):
        raise InvalidArgument(f"{name} has shape {array.shape}, not {(heads,)}")
    setattr(args, name, abi.array("float", array))
    return array


def attend_args(abi, layers, layer: int, q, out, sums, batch: BatchArrays, options: ScoreOptions):
    spec = layer_spec(layers, layer)
    if (batch.lengths > batch.table.shape[1] * abi.macros["KVQ_PAGE_TOKENS"]).any():
        raise InvalidArgument(f"a sequence is longer than its {batch.table.shape[1]} pages")
    q = _with_unit_channel_stride(q)
    for name, array in (("q", q), ("out", out)):
        _check_heads(name, array, int(batch.starts[-1]), spec.query_heads, spec.head_dim)
        if array.dtype not in _DTYPE:
            raise InvalidArgument(f"{name} is {array.dtype}, not float16, uint16 (bf16) or float32")
    if out.strides[-1] != out.itemsize:
        raise InvalidArgument("out's channels are not adjacent")
    args = abi.struct(
        "kvq_attend_args",
        layer=layer,
        batch=len(batch.table),
        q_dtype=_DTYPE[q.dtype],
        out_dtype=_DTYPE[out.dtype],
        query_starts=abi.array("int32_t", batch.starts),
        seq_lengths=abi.array("int32_t", batch.lengths),
        block_table=abi.array("int32_t", batch.table),
        block_table_stride=batch.table.shape[1],
        query_heads=spec.query_heads,
        scale=options.scale,
        soft_cap=options.soft_cap,
        window=options.window,
        lse=abi.array("float", sums),
    )
    _point(abi, args, "q", q)
    _point(abi, args, "out", out)
    alive = [q, batch]
    for name in ("alibi_slopes", "sinks"):
        if (vector := getattr(options, name)) is not None:
            alive.append(_vector(abi, args, name, vector, spec.query_heads))
    return args, alive
