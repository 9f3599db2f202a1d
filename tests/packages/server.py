"""A model server in Python as the installed package serves it: writes 128 tokens, and finds them cached when it opens them again."""

import importlib.metadata

import kvqd
import numpy as np

TOKENS = list(range(128))

with kvqd.Client() as client, client.register([kvqd.Layer(kv_heads=1, head_dim=64, query_heads=2)], b"p" * 32) as model:
    sequence = model.open(TOKENS)
    sequence.reserve(len(TOKENS), deadline_ms=5000)
    slots = sequence.slots(0, len(TOKENS))
    k = np.full((len(TOKENS), 1, 64), 0.5, dtype=np.float16)
    with model.step() as step:
        model.append(0, k, k, slots)
        out = model.attend(0, np.ones((1, 2, 64), dtype=np.float16), [sequence.block_table()], [len(TOKENS)], [0, 1])
    assert np.allclose(out, 0.5), out
    sequence.commit(TOKENS, step.serial)
    while model.lookup(TOKENS).cached_tokens < len(TOKENS):  # sealed at kvqd's next tick
        model.request_credits(1)
    assert importlib.metadata.version("kvqd") == kvqd.version()
    print(f"{kvqd.version()} {len(TOKENS)} tokens, then {model.open(TOKENS).cached_tokens} cached")
