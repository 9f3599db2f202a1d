"""Two processes and one prefix: the second one attends to the first one's pages."""

import os
import pathlib
import subprocess
import sys
import time

import torch

import kvqd
from conftest import DIM, HEADS, LAYERS, Written, close, int32, reference

READER = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from conftest import *
saved = torch.load(sys.argv[3])
with kvqd.Client(sys.argv[2]) as client:
    layer = kvqd.Layer(kv_heads=1, head_dim=DIM, query_heads=HEADS)
    with client.register([layer] * LAYERS, saved["fingerprint"]) as model:
        sequence = model.open(list(range(200)))
        assert sequence.cached_tokens == 192, sequence.cached_tokens
        table = torch.from_numpy(sequence.block_table()[None]).cuda()
        q = saved["q"].cuda()
        with model.step():
            out = [model.attend(layer, q, table, int32(192), int32(0, 1)) for layer in range(LAYERS)]
        torch.cuda.synchronize()
        assert model.fault() is None
        torch.save({"out": torch.stack(out).cpu(), "pages": sequence.block_table().tolist()}, sys.argv[4])
"""


def test_the_second_process_reads_the_first_ones_pages(socket, tmp_path):
    fingerprint = os.urandom(32)
    layer = kvqd.Layer(kv_heads=1, head_dim=DIM, query_heads=HEADS)
    with kvqd.Client(socket) as client, client.register([layer] * LAYERS, fingerprint) as model:
        written = Written(model, 200, seed=21)
        torch.cuda.synchronize()
        until = time.monotonic() + 20
        while model.lookup(list(range(200))).cached_tokens != 192:  # sealing follows a commit within milliseconds
            assert time.monotonic() < until
            model.request_credits(16, deadline_ms=1000)
            time.sleep(0.002)
        q = torch.randn((1, HEADS, DIM), dtype=torch.float16)
        given, made = tmp_path / "given", tmp_path / "made"
        torch.save({"fingerprint": fingerprint, "q": q}, given)
        here = str(pathlib.Path(__file__).resolve().parent)
        subprocess.run([sys.executable, "-c", READER, here, socket, str(given), str(made)], check=True, timeout=120)
        result = torch.load(made)
        assert result["pages"] == written.sequence.block_table()[:3].tolist()
        for index in range(LAYERS):
            want, _ = reference(q.cuda(), written.k[index][:192], written.v[index][:192])
            close(result["out"][index].cuda(), want)
