"""What the tests share. Invariant: each test file that needs memory pressure has its own daemon; the rest share a roomy
one."""

import os
import pathlib
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several servers share the machine's cores
if not os.environ.get("KVQ_TEST_INSTALLED"):  # else the installed package is what is tested
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import pytest

DOCUMENT = pathlib.Path("/usr/share/common-licenses/GPL-3")


@pytest.fixture(scope="session")
def daemon():
    from kvqd.testing import local_daemon

    with local_daemon(arena_bytes="512MiB") as daemon:
        yield daemon


@pytest.fixture(scope="session")
def llama():
    from kvqd.models import gguf_file, llama

    return llama.Llama(gguf_file.load_weights())


@pytest.fixture(scope="session")
def tokenizer():
    from kvqd.models.tokenizer import Tokenizer

    return Tokenizer()


@pytest.fixture(scope="session")
def document(tokenizer):
    return tokenizer.encode(DOCUMENT.read_text())


@pytest.fixture
def small(daemon):
    """A tiny model on the shared daemon: 2 layers, 1 K/V head of 64, 2 query heads."""
    import kvqd

    with kvqd.Client(daemon.socket, label="pytest") as client:
        layer = kvqd.Layer(kv_heads=1, head_dim=64, query_heads=2)
        with client.register([layer] * 2, os.urandom(32)) as model:
            yield model


def write(model, sequence, tokens, seed=0):
    """Appends random K and V for `tokens` and commits them; returns both, (layers, tokens, heads, dim)."""
    import numpy as np

    random, layer = np.random.default_rng(seed), model.layers[0]
    shape = (len(model.layers), len(tokens), layer.kv_heads, layer.head_dim)
    k, v = (random.standard_normal(shape).astype(np.float16) for _ in range(2))
    first = sequence.info().committed_tokens
    sequence.reserve(len(tokens), deadline_ms=5000)
    slots = sequence.slots(first, len(tokens))
    with model.step() as step:
        for index in range(len(model.layers)):
            model.append(index, k[index], v[index], slots)
    sequence.commit(tokens, step.serial)
    return k, v
