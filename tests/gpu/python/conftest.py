"""What the GPU tests share. Invariant: they run over the kvqd at $KVQ_SOCKET, or over one of their own, with the tiny model of
the C++ tests: 2 layers, 1 K/V head of 64, 2 query heads."""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parents[2] / "python", HERE.parents[3] / "client/python"):  # of a bundle, of the checkout
    if (folder / "kvqd").exists() and not os.environ.get("KVQ_TEST_INSTALLED"):
        sys.path.insert(0, str(folder))

if (HERE.parents[2] / "bin/kvqd").exists():  # of a bundle
    os.environ.setdefault("KVQ_BIN_DIR", str(HERE.parents[2] / "bin"))

import pytest
import torch

import kvqd

LAYERS, DIM, HEADS = 2, 64, 2


@pytest.fixture(scope="session")
def socket():
    if path := os.environ.get("KVQ_SOCKET"):
        yield path
        return
    from kvqd.testing import local_daemon

    with local_daemon(device="cuda", arena_bytes="256MiB", slab_bytes="2MiB", max_pages=8192) as daemon:
        yield str(daemon.socket)


@pytest.fixture
def model(socket):
    with kvqd.Client(socket, label="gpu pytest") as client:
        layer = kvqd.Layer(kv_heads=1, head_dim=DIM, query_heads=HEADS)
        with client.register([layer] * LAYERS, os.urandom(32)) as model:
            yield model
            torch.cuda.synchronize()


class Written:
    """A sequence of random K and V: (layers, tokens, 1, 64) each."""

    def __init__(self, model, count, seed=0, tokens=None, stream=None):
        random = torch.Generator("cuda").manual_seed(seed)
        self.k, self.v = (
            torch.randn((LAYERS, count, 1, DIM), generator=random, device="cuda", dtype=torch.float32).half()
            for _ in range(2)
        )
        self.sequence = model.open()
        self.sequence.reserve(count, deadline_ms=10_000)
        slots = torch.from_numpy(self.sequence.slots(0, count)).cuda()
        torch.cuda.synchronize()
        with model.step(stream=stream) as step:
            for layer in range(LAYERS):
                model.append(layer, self.k[layer], self.v[layer], slots, stream=stream)
        self.sequence.commit(range(count) if tokens is None else tokens, step.serial)
        self._alive = slots

    def table(self, pages=None):
        table = torch.zeros((1, pages or len(self.sequence.block_table())), dtype=torch.int32, device="cuda")
        ids = torch.from_numpy(self.sequence.block_table()).cuda()
        table[0, : len(ids)] = ids
        return table


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def reference(q, k, v):
    """Causal attention in double: q (n, heads, 64) are the last tokens of k and v (t, 1, 64). Also the log-sum-exp."""
    q, k, v = (tensor.double() for tensor in (q, k[:, 0], v[:, 0]))
    score = torch.einsum("nhd,td->nht", q, k) / DIM**0.5
    ahead = torch.arange(len(k), device=k.device)[None, :] > torch.arange(len(k) - len(q), len(k), device=k.device)[:, None]
    score = score.masked_fill(ahead[:, None, :], float("-inf"))
    return torch.einsum("nht,td->nhd", score.softmax(-1), v), score.logsumexp(-1)


def close(got, want, tolerance=0.02):
    difference = (got.double() - want).abs().max().item()
    assert difference < tolerance, difference
