"""The wrapper over a real daemon with a tiny model: sequences, append and attend, refusals, fork."""

import os
import time

import numpy as np
import pytest

import kvqd
from conftest import write


def reference(q, k, v):
    """Causal attention in double: q (n, hq, d) are the last tokens of k and v (t, 1, d)."""
    q, k, v = (a.astype(np.float64) for a in (q, k[:, 0], v[:, 0]))
    first = len(k) - len(q)
    out = np.empty(q.shape)
    for i, row in enumerate(q):
        score = row @ k[: first + i + 1].T / np.sqrt(q.shape[-1])
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        out[i] = weight / weight.sum(axis=1, keepdims=True) @ v[: first + i + 1]
    return out


def test_attention_over_pages_equals_the_reference(small):
    tokens = list(range(150))
    sequence = small.open()
    k, v = write(small, sequence, tokens, seed=3)
    q = np.random.default_rng(4).standard_normal((5, 2, 64)).astype(np.float32)
    with small.step():
        for layer in range(2):
            out, lse = small.attend(layer, q, [sequence.block_table()], [150], [0, 5], lse=True)
            np.testing.assert_allclose(out, reference(q, k[layer], v[layer]), atol=2e-3)
            assert lse.shape == (5, 2) and np.isfinite(lse).all()


def test_strided_arrays_are_read_in_place(small):
    """K and V as views into one fused projection, queries with the heads outermost: no layout is assumed."""
    random, sequence = np.random.default_rng(7), small.open()
    fused = random.standard_normal((70, 4, 64)).astype(np.float16)
    sequence.reserve(70, deadline_ms=5000)
    with small.step() as step:
        for layer in range(2):
            small.append(layer, fused[:, 2:3], fused[:, 3:4], sequence.slots(0, 70))
    sequence.commit(range(70), step.serial)
    q = random.standard_normal((2, 6, 64)).astype(np.float16).swapaxes(0, 1)
    with small.step():
        out = small.attend(1, q, [sequence.block_table()], [70], [0, 6], out=np.empty((6, 2, 64), np.float32))
    np.testing.assert_allclose(out, reference(q, fused[:, 2:3], fused[:, 3:4]), atol=2e-3)


def test_a_second_sequence_attaches_what_the_first_sealed(small):
    tokens = list(range(1000, 1200))
    first = small.open(tokens)
    assert first.cached_tokens == 0
    write(small, first, tokens)
    until = time.monotonic() + 10  # sealing follows a commit within milliseconds
    while small.lookup(tokens).cached_tokens != 192:
        assert time.monotonic() < until
        time.sleep(0.002)
    second = small.open(tokens)
    assert second.cached_tokens == 192
    assert (second.block_table()[:3] == first.block_table()[:3]).all()
    assert small.open(tokens[:100] + [5] * 100).cached_tokens == 64
    assert small.open(tokens, extra_keys=[kvqd.ExtraKey(0, 200, b"adapter")]).cached_tokens == 0
    assert small.open(tokens, private=True).cached_tokens == 0


def test_a_fork_shares_sealed_pages_and_copies_the_open_one(small):
    sequence = small.open()
    write(small, sequence, list(range(100)))
    child = sequence.fork(deadline_ms=5000)
    ours, theirs = sequence.block_table(), child.block_table()
    assert child.info().committed_tokens == 100
    assert ours[0] == theirs[0] and ours[1] != theirs[1]
    child.truncate(10, deadline_ms=5000)
    assert child.info().committed_tokens == 10 and sequence.info().committed_tokens == 100


def test_an_exported_sequence_is_only_bytes(small):
    sequence = small.open()
    write(small, sequence, list(range(80)))
    data = sequence.export()
    view = small.import_sequence(data)
    assert (view.block_table() == sequence.block_table()).all()
    view.release()
    assert sequence.info().committed_tokens == 80


def test_what_would_be_misread_is_refused(small):
    sequence, wrong = small.open(), np.zeros((4, 1, 64), np.float32)
    sequence.reserve(4, deadline_ms=5000)
    slots, right = sequence.slots(0, 4), wrong.astype(np.float16)
    with pytest.raises(kvqd.InvalidArgument, match="float32"):
        small.append(0, wrong, wrong, slots)
    with pytest.raises(kvqd.InvalidArgument, match="shape"):
        small.append(0, right[:3], right, slots)
    with pytest.raises(kvqd.InvalidArgument, match="layer 2"):
        small.append(2, right, right, slots)
    with pytest.raises(kvqd.InvalidArgument, match="longer"):
        small.attend(0, np.zeros((1, 2, 64), np.float32), [sequence.block_table()], [65], [0, 1])
    with pytest.raises(kvqd.InvalidArgument, match="token ids"):
        small.open([-1])
    with pytest.raises(kvqd.InvalidArgument, match="32"):
        small._client.register(small.layers, b"short")


def test_bf16_travels_as_its_bits(daemon):
    layer = kvqd.Layer(kv_heads=1, head_dim=64, query_heads=2, bf16=True)
    random = np.random.default_rng(5)
    bits = (random.standard_normal((2, 40, 1, 64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    k, v = (bits.astype(np.uint32) << 16).view(np.float32)
    with kvqd.Client(daemon.socket) as client, client.register([layer], os.urandom(32)) as model:
        sequence = model.open()
        sequence.reserve(40, deadline_ms=5000)
        q = random.standard_normal((1, 2, 64)).astype(np.float32)
        with model.step() as step:
            model.append(0, bits[0], bits[1], sequence.slots(0, 40))
            out = model.attend(0, q, [sequence.block_table()], [40], [0, 1])
        sequence.commit(range(40), step.serial)
    np.testing.assert_allclose(out, reference(q, k, v), atol=2e-2)


def test_released_and_closed_things_say_so(small, daemon):
    sequence = small.open()
    sequence.release()
    sequence.release()
    with pytest.raises(kvqd.InvalidArgument, match="released"):
        sequence.info()
    client = kvqd.Client(daemon.socket)
    model = client.register(small.layers, os.urandom(32))
    left_open = model.open()
    client.close()
    client.close()
    for use in (model.info, left_open.info, lambda: client.register(small.layers, os.urandom(32))):
        with pytest.raises(kvqd.InvalidArgument):
            use()


def test_a_forked_child_is_refused_and_may_connect_anew(small, daemon):
    sequence = small.open()
    read, report = os.pipe()
    if (pid := os.fork()) == 0:
        said = []
        for use in (sequence.info, small.info, lambda: small.lookup([1]), lambda: small.step().__enter__()):
            try:
                use()
                said.append("worked")
            except kvqd.KvqError as error:
                said.append(type(error).__name__)
        try:
            with kvqd.Client(daemon.socket) as client, client.register(small.layers, os.urandom(32)) as model:
                said.append(str(model.open([1, 2, 3]).cached_tokens))
        except Exception as error:
            said.append(repr(error))
        os.write(report, " ".join(said).encode())
        os._exit(0)
    os.close(report)
    with os.fdopen(read, "rb") as out:
        said = out.read().decode()
    os.waitpid(pid, 0)
    assert said == "Forked Forked Forked Forked 0"
    assert sequence.info().committed_tokens == 0  # the parent is unhurt


def test_no_memory_is_typed_and_comes_at_the_deadline():
    from kvqd.testing import local_daemon

    layer = kvqd.Layer(kv_heads=8, head_dim=128, query_heads=8)
    with local_daemon(arena_bytes="16MiB", slab_bytes="4MiB") as daemon, kvqd.Client(daemon.socket) as client:
        with client.register([layer] * 4, os.urandom(32), credits=1) as model:
            sequence, other = model.open(), model.open()
            other.reserve(8 * 64, deadline_ms=5000)  # of 12 pages in all
            with pytest.raises(kvqd.NoMemory):
                sequence.reserve(10 * 64, deadline_ms=300)
            with pytest.raises(kvqd.LimitReached):  # no waiting would help
                sequence.reserve(64 * 64, deadline_ms=300)
            sequence.reserve(64, deadline_ms=5000)  # nothing was taken by the failed calls


def test_a_vanished_daemon_is_an_error_not_a_crash():
    from kvqd.testing import local_daemon

    layer = kvqd.Layer(kv_heads=1, head_dim=64, query_heads=1)
    with local_daemon() as daemon:
        client = kvqd.Client(daemon.socket)
        model = client.register([layer], os.urandom(32))
        sequence = model.open()
        daemon.process.kill()
        daemon.process.wait()
        with pytest.raises(kvqd.DaemonGone):
            sequence.reserve(64 * 100, deadline_ms=5000)
        with pytest.raises(kvqd.KvqError):
            client.register([layer], os.urandom(32))


class ForeignTensor:
    """What torch's CPU tensors look like to the package: DLPack, and no numpy type."""

    requires_grad = False

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_tensors_of_another_library_are_read_and_written_in_place(small):
    random, sequence = np.random.default_rng(11), small.open()
    k, v = (random.standard_normal((70, 1, 64)).astype(np.float16) for _ in range(2))
    q, out = random.standard_normal((3, 2, 64)).astype(np.float32), np.zeros((3, 2, 64), np.float32)
    sums = np.zeros((3, 2), np.float32)
    sequence.reserve(70, deadline_ms=5000)
    table = np.array([sequence.block_table()], np.int32)
    with small.step() as step:
        small.append(0, *map(ForeignTensor, (k, v, sequence.slots(0, 70))))
        lengths, starts = np.array([70], np.int32), np.array([0, 3], np.int32)
        tensors = map(ForeignTensor, (q, table, lengths, starts))
        result, filled = small.attend(0, *tensors, out=(given := ForeignTensor(out)), lse=ForeignTensor(sums))
    sequence.commit(range(70), step.serial)
    assert result is given and filled.array is sums
    np.testing.assert_allclose(out, reference(q, k, v), atol=2e-3)
    assert np.isfinite(sums).all()


class GpuTensor(ForeignTensor):
    __cuda_array_interface__ = {}

    class device:  # noqa: N801: as torch's
        type = "cuda"


def test_a_gpu_tensor_on_the_host_device_is_refused_by_name(small):
    with small.step(), pytest.raises(kvqd.InvalidArgument, match="k is not in host memory"):
        small.append(0, GpuTensor(np.zeros((1, 1, 64), np.float16)), None, [0])


def test_the_host_has_no_stream_no_workspace_and_no_faults(small):
    assert small.info().device == "host" and small.info().device_uuid == ""
    assert small.workspace_bytes() == 0 and small.fault() is None
    with small.step(stream=12345):  # of no meaning on the host
        pass


def test_a_device_that_kvqd_does_not_serve_is_refused(daemon):
    with kvqd.Client(daemon.socket) as client, pytest.raises(kvqd.InvalidArgument, match="GPU-nowhere"):
        client.register([kvqd.Layer(1, 64, 2)], bytes(32), device="GPU-nowhere")
