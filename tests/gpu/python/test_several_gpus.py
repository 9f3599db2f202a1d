"""One kvqd and two GPUs: each server works on the GPU that it names, whatever number that has in its process, and the loss of one
GPU's worker is nothing to the other.

Invariant: a server is a process of its own, since CUDA_VISIBLE_DEVICES is read once in a process. Needs two GPUs.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

import kvqd
from kvqd.testing import local_daemon

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Arguments: this folder, socket, UUID, seconds. Decodes over 500 tokens of its own until the time is over.
SERVER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from conftest import *
import kvqd.torch
with kvqd.Client(sys.argv[2]) as client:
    layer = kvqd.Layer(kv_heads=1, head_dim=DIM, query_heads=HEADS)
    with client.register([layer] * LAYERS, b"x" * 32, device=sys.argv[3]) as model:
        device = kvqd.torch.Cache(model).device
        torch.cuda.set_device(device)
        written = Written(model, 500, seed=int(sys.argv[3][4:12], 16))
        q = torch.randn((1, HEADS, DIM), dtype=torch.float16, device=device)
        table, steps, until = written.table(), 0, time.monotonic() + float(sys.argv[4])
        while steps < 20 or time.monotonic() < until:
            with model.step():
                out = [model.attend(layer, q, table, int32(500), int32(0, 1)) for layer in range(LAYERS)]
            for index in range(LAYERS):
                close(out[index], reference(q, written.k[index], written.v[index])[0])
            steps += 1
            if steps == 20:
                print("decoding", flush=True)
        fault = str(model.fault() or "")
        print(json.dumps({"number": device.index, "uuid": model.info().device_uuid, "fault": fault}), flush=True)
        torch.cuda.synchronize()
"""


def uuid_of(number):
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


def start(daemon, uuid, visible, seconds=0.0):
    here = str(pathlib.Path(__file__).resolve().parent)
    command = [sys.executable, "-c", SERVER, here, str(daemon.socket), uuid, str(seconds)]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=visible)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(server):
    out, errors = server.communicate(timeout=120)
    assert server.returncode == 0, errors[-2000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def daemon():
    with local_daemon(device="cuda", start_seconds=60, arena_bytes="256MiB", slab_bytes="2MiB", max_pages=8192) as started:
        yield started


def test_a_uuid_finds_its_gpu_whatever_number_it_has(daemon):
    first, second = uuid_of(0), uuid_of(1)
    cases = [(first, "0,1", 0), (second, "0,1", 1), (first, "1,0", 1), (second, "1,0", 0), (second, "1", 0), (first, first, 0)]
    servers = [start(daemon, uuid, visible) for uuid, visible, _ in cases]
    for (uuid, visible, number), server in zip(cases, servers):
        said = answer(server)
        assert (said["uuid"], said["number"], said["fault"]) == (uuid, number, ""), visible
    devices = {device["name"]: device for device in daemon.control("status")["devices"]}
    assert set(devices) >= {first, second}
    for uuid in (first, second):
        assert devices[uuid]["device_health"]["state"] == "ok"
        assert devices[uuid]["device_health"]["held_bytes"] >= 256 * 2**20


def test_a_gpu_that_is_not_visible_is_refused_by_name(daemon):
    server = start(daemon, uuid_of(1), "0")
    _, errors = server.communicate(timeout=120)
    assert server.returncode != 0
    assert uuid_of(1) in errors and "CUDA_VISIBLE_DEVICES" in errors


def test_the_loss_of_one_worker_is_nothing_to_the_other_gpu(daemon):
    servers = {uuid_of(number): start(daemon, uuid_of(number), "0,1", seconds=3.0) for number in (0, 1)}
    for server in servers.values():
        assert server.stdout.readline().strip() == "decoding"
    search = ["pgrep", "-P", str(daemon.pid), "-f", f"kvqd-gpu --uuid {uuid_of(1)}"]
    found = subprocess.run(search, capture_output=True, text=True).stdout.split()
    assert len(found) == 1, found
    os.kill(int(found[0]), signal.SIGKILL)
    for uuid, server in servers.items():
        said = answer(server)
        assert (said["uuid"], said["fault"]) == (uuid, "")
    until = time.monotonic() + 20
    while True:
        health = {device["name"]: device["device_health"] for device in daemon.control("status")["devices"]}
        if health[uuid_of(1)]["worker_restarts"] == 1 and health[uuid_of(1)]["state"] == "ok":
            break
        assert time.monotonic() < until, health
        time.sleep(0.05)
    assert health[uuid_of(0)]["worker_restarts"] == 0
    with kvqd.Client(daemon.socket) as client:
        layer = kvqd.Layer(kv_heads=1, head_dim=64, query_heads=2)
        with client.register([layer] * 2, os.urandom(32), device=uuid_of(1)) as model:
            assert model.info().device_uuid == uuid_of(1)
