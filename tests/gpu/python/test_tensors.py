"""torch tensors in and out: the same numbers as torch's own attention, on whatever stream is current."""

import pytest
import torch

import kvqd
from conftest import DIM, HEADS, LAYERS, Written, close, int32, reference


def test_attention_equals_the_reference(model):
    assert model.info().device == "cuda" and model.info().device_uuid.startswith(("GPU-", "MIG-"))
    written = Written(model, 200, seed=1)
    for count in (1, 5, 70):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            q = torch.randn((count, HEADS, DIM), device="cuda").half().to(dtype)
            with model.step():
                for layer in range(LAYERS):
                    out, lse = model.attend(layer, q, written.table(), int32(200), int32(0, count), lse=True)
                    assert out.dtype == dtype and out.shape == q.shape
                    want, sums = reference(q, written.k[layer], written.v[layer])
                    close(out, want, 0.03)
                    close(lse, sums, 0.03)
    assert model.fault() is None


def test_a_batch_of_sequences_in_one_call(model):
    one, other = Written(model, 130, seed=2), Written(model, 40, seed=3)
    table = torch.cat([one.table(3), other.table(3)])
    q = torch.randn((5, HEADS, DIM), device="cuda", dtype=torch.float16)
    with model.step():
        out = model.attend(0, q, table, int32(130, 40), int32(0, 2, 5))
    close(out[:2], reference(q[:2], one.k[0], one.v[0])[0])
    close(out[2:], reference(q[2:], other.k[0], other.v[0])[0])


def test_views_are_read_and_written_in_place(model):
    written = Written(model, 100, seed=4)
    fused = torch.randn((3, 6 * DIM), device="cuda", dtype=torch.float16)
    q = fused.view(3, 6, DIM)[:, 2:4]
    whole = torch.zeros((3, 5, DIM), device="cuda", dtype=torch.float32)
    with model.step():
        out = model.attend(1, q, written.table(), int32(100), int32(0, 3), out=whole[:, 1:3])
    assert out.data_ptr() == whole[:, 1:3].data_ptr()
    close(out, reference(q, written.k[1], written.v[1])[0])
    assert (whole[:, 0] == 0).all() and (whole[:, 3:] == 0).all()


def test_the_current_stream_is_respected(model):
    """Everything is queued behind a long kernel on a side stream; nothing is synchronized in between."""
    side = torch.cuda.Stream()
    late = torch.zeros((1, HEADS, DIM), device="cuda", dtype=torch.float16)
    written, q = Written(model, 90, seed=5), torch.randn((1, HEADS, DIM), device="cuda", dtype=torch.float16)
    table, lengths, starts = written.table(), int32(90), int32(0, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)  # only what is ordered behind this sees the query
        with model.step() as step:
            out = model.attend(0, late, table, lengths, starts)
        assert not side.query(), "a call waited for the stream"
    side.synchronize()
    close(out, reference(q, written.k[0], written.v[0])[0])
    assert step.serial > 0


def test_an_explicit_stream_takes_precedence(model):
    side = torch.cuda.Stream()
    written = Written(model, 64, seed=6, stream=side)
    side.synchronize()
    q = torch.randn((1, HEADS, DIM), device="cuda", dtype=torch.float16)
    with model.step(stream=side.cuda_stream):
        out = model.attend(0, q, written.table(), int32(64), int32(0, 1), stream=side)
    side.synchronize()
    close(out, reference(q, written.k[0], written.v[0])[0])


def test_wrong_arguments_are_named(model):
    written, q = Written(model, 10), torch.randn((1, HEADS, DIM), device="cuda", dtype=torch.float16)
    batch = written.table(), int32(10), int32(0, 1)
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    with model.step():
        with pytest.raises(kvqd.InvalidArgument, match="k is on cpu"):
            model.append(0, torch.zeros((1, 1, DIM), dtype=torch.float16), None, slots)
        with pytest.raises(kvqd.InvalidArgument, match="k is bfloat16, not float16"):
            model.append(0, torch.zeros((1, 1, DIM), dtype=torch.bfloat16, device="cuda"), None, slots)
        with pytest.raises(kvqd.InvalidArgument, match="host memory"):
            model.attend(0, q, batch[0].cpu().numpy(), *batch[1:])
        with pytest.raises(kvqd.InvalidArgument, match="not adjacent"):
            model.attend(0, q.new_empty((1, DIM, HEADS)).transpose(1, 2), *batch)
        with pytest.raises(kvqd.InvalidArgument, match="seq_lengths is int64, not int32"):
            model.attend(0, q, batch[0], batch[1].long(), batch[2])
        with pytest.raises(kvqd.InvalidArgument, match="layer 99 of 2"):
            model.append(99, None, None, slots)
    with pytest.raises(kvqd.InvalidArgument, match="outside a step"):
        model.attend(0, q, *batch)


def test_what_only_the_gpu_sees_is_a_fault(model):
    q = torch.randn((1, HEADS, DIM), device="cuda", dtype=torch.float16)
    table = torch.full((1, 1), 1_000_000, dtype=torch.int32, device="cuda")
    with model.step():
        out = model.attend(1, q, table, int32(5), int32(0, 1))
    torch.cuda.synchronize()
    fault = model.fault()
    assert (fault.status, fault.layer, fault.index, fault.page) == (kvqd.StaleId.status, 1, 0, 1_000_000)
    assert out.isnan().all() and model.fault() is None


def test_a_workspace_of_the_callers(model):
    written, q = Written(model, 100, seed=8), torch.randn((1, HEADS, DIM), device="cuda", dtype=torch.float16)
    workspace = torch.empty(model.workspace_bytes(), dtype=torch.uint8, device="cuda")
    with model.step():
        out = model.attend(0, q, written.table(), int32(100), int32(0, 1), workspace=workspace, max_query_tokens=1)
    close(out, reference(q, written.k[0], written.v[0])[0])
