"""How GPU tensors are judged, without a GPU: their addresses are never followed here."""

import numpy as np
import pytest

import kvqd
from kvqd import _abi
from kvqd._arrays import ScoreOptions
from kvqd._tensors import Gpu, gpu_append_args, gpu_attend_args, look

LAYERS = (kvqd.Layer(kv_heads=2, head_dim=64, query_heads=4), kvqd.Layer(kv_heads=2, head_dim=64, query_heads=4, bf16=True))


class Device:
    def __init__(self, type, index):
        self.type, self.index = type, index

    def __str__(self):
        return f"{self.type}:{self.index}"


class Tensor:
    """The part of torch's interface that the package uses."""

    def __init__(self, shape, dtype="float16", stride=None, device=("cuda", 0), pointer=4096):
        self.shape, self.dtype, self.device, self._pointer = shape, f"torch.{dtype}", Device(*device), pointer
        self._stride = stride or tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))

    def data_ptr(self):
        return self._pointer

    def stride(self):
        return self._stride

    def element_size(self):
        return 1


class ArrayInterface:
    def __init__(self, shape, typestr, strides=None):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (8192, False), "strides": strides}


class KnownGpu(Gpu):
    index = 0


@pytest.fixture
def gpu():
    return KnownGpu("GPU-1234")


@pytest.fixture
def abi():
    return _abi.library()


def slots(count):
    return Tensor((count,), "int64")


def test_append_takes_any_strides_of_tokens_and_heads(abi, gpu):
    fused = Tensor((5, 2, 64), stride=(512, 64, 1), pointer=1 << 20)
    args = gpu_append_args(abi, gpu, LAYERS, 0, fused, None, slots(5))
    assert (args.tokens, args.layer, args.k_token_stride, args.k_head_stride) == (5, 0, 512, 64)
    assert int(abi.ffi.cast("uintptr_t", args.k)) == 1 << 20 and args.v == abi.ffi.NULL


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (Tensor((5, 2, 64), device=("cpu", None)), "k is on cpu"),
        (Tensor((5, 2, 64), device=("cuda", 1)), "k is on cuda:1.*cuda:0"),
        (Tensor((5, 2, 64), "bfloat16"), "k is bfloat16, not float16"),
        (Tensor((5, 64, 2), stride=(128, 1, 64)), "not adjacent"),
        (Tensor((4, 2, 64)), "k has shape"),
        (Tensor((5, 128)), "k has 2 dimensions, not 3"),
        (np.zeros((5, 2, 64), np.float16), "k is a ndarray in host memory.*GPU-1234"),
    ],
)
def test_append_refuses_what_the_kernel_would_misread(abi, gpu, k, words):
    with pytest.raises(kvqd.InvalidArgument, match=words):
        gpu_append_args(abi, gpu, LAYERS, 0, k, None, slots(5))


def test_slots_tables_and_lengths_have_one_type_each(abi, gpu):
    with pytest.raises(kvqd.InvalidArgument, match="slots is int32, not int64"):
        gpu_append_args(abi, gpu, LAYERS, 0, None, None, Tensor((5,), "int32"))
    with pytest.raises(kvqd.InvalidArgument, match="block_table is int64, not int32"):
        attend(abi, gpu, batch=(Tensor((1, 3), "int64"), lengths(1), lengths(2)))
    with pytest.raises(kvqd.InvalidArgument, match="not of one batch"):
        attend(abi, gpu, batch=(Tensor((2, 3), "int32"), lengths(2), lengths(2)))


def lengths(count):
    return Tensor((count,), "int32")


def attend(abi, gpu, q=None, out=None, sums=None, batch=None, workspace=None, layer=0):
    q = q or Tensor((6, 4, 64))
    batch = batch or (Tensor((1, 3), "int32"), lengths(1), lengths(2))
    return gpu_attend_args(abi, gpu, LAYERS, layer, q, out or q, sums, batch, ScoreOptions(), workspace)


def test_attend_takes_bf16_in_and_fp32_out_and_a_wider_table(abi, gpu):
    table = Tensor((2, 3), "int32", stride=(100, 1))
    args = attend(
        abi, gpu, Tensor((6, 4, 64), "bfloat16"), Tensor((6, 4, 64), "float32"), batch=(table, lengths(2), lengths(3))
    )
    assert (args.q_dtype, args.out_dtype, args.batch, args.block_table_stride) == (1, 2, 2, 100)
    assert (args.query_heads, args.window, args.lse) == (4, -1, abi.ffi.NULL)
    workspace = Tensor((1 << 20,), "uint8", pointer=1 << 30)
    args = attend(abi, gpu, sums=Tensor((6, 4), "float32"), workspace=workspace, layer=1)
    assert args.workspace_bytes == 1 << 20 and args.lse != abi.ffi.NULL


def test_attend_refuses_wrong_outputs(abi, gpu):
    with pytest.raises(kvqd.InvalidArgument, match="out has shape"):
        attend(abi, gpu, out=Tensor((5, 4, 64)))
    with pytest.raises(kvqd.InvalidArgument, match="out is int8"):
        attend(abi, gpu, out=Tensor((6, 4, 64), "int8"))
    with pytest.raises(kvqd.InvalidArgument, match="lse is float16, not float32"):
        attend(abi, gpu, sums=Tensor((6, 4)))
    with pytest.raises(kvqd.InvalidArgument, match="layer 2 of 2"):
        attend(abi, gpu, layer=2)


def test_the_cuda_array_interface_is_understood():
    tensor = look("k", ArrayInterface((5, 2, 64), "<f2"), "GPU-1234")
    assert (tensor.pointer, tensor.dtype, tensor.strides) == (8192, "float16", (128, 64, 1))
    assert look("k", ArrayInterface((5, 2), "<f4", (80, 4)), "GPU-1234").strides == (20, 1)


def test_without_torch_the_default_stream_is_used_unless_one_is_given():
    gpu = Gpu("GPU-1234")
    assert gpu.stream(77) == 77
    assert gpu.index is None and gpu.stream() == 0
