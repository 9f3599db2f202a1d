"""Two processes attend to one prefix in VRAM, each inside its own CUDA graph, while the GPU's own count of used memory is held
against what kvqd says it uses.

Invariant: the prefix is written once, by the first process; the second only maps it. The exit code is 0 only if outputs, hits and
bytes were as expected. A plain program: python3 tests/gpu/python/shared_prefix.py; `--device host` runs it without a GPU, without
graphs and without the GPU's count.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parents[2] / "python", HERE.parents[3] / "client/python"):  # of a bundle, of the checkout
    if (folder / "kvqd").exists():
        sys.path.insert(0, str(folder))

import torch

import kvqd
from first_gpu import one_device
from kvqd.demo_report import Expectations
from kvqd.models.torch_cache import device_of
from kvqd.testing import local_daemon
from result_file import Result

LAYERS, KV_HEADS, HEADS, DIM = 8, 8, 32, 128
PAGE_BYTES = LAYERS * 64 * KV_HEADS * DIM * 2 * 2
REPLAYS = 24
FINGERPRINT = b"shared_prefix".ljust(32, b".")
MIB = 2**20


# --- a process: reads one command a line, answers with one line


class Child:
    def __init__(self, socket, tokens):
        self.tokens, self.client = tokens, kvqd.Client(socket, label=f"prefix {os.getpid()}")
        layer = kvqd.Layer(kv_heads=KV_HEADS, head_dim=DIM, query_heads=HEADS)
        self.model = self.client.register([layer] * LAYERS, FINGERPRINT, credits=4)
        self.device = device_of(self.model)
        torch.ones(64, 64, device=self.device) @ torch.ones(64, 64, device=self.device)  # the context and cuBLAS are there now

    def _random(self, seed, *shape):
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).half()

    def _prefix(self, layer, at, count):
        """K and V of tokens [at, at + count), the same in every process."""
        return self._random(1000 * layer + at // 4096, 2, count, KV_HEADS, DIM)

    def write(self):
        self.sequence = self.model.open(range(self.tokens))
        for at in range(0, self.tokens, 4096):
            count = min(4096, self.tokens - at)
            self.sequence.reserve(count, deadline_ms=10_000)
            slots = torch.from_numpy(self.sequence.slots(at, count)).to(self.device)
            with self.model.step() as step:
                for layer in range(LAYERS):
                    self.model.append(layer, *self._prefix(layer, at, count), slots)
            self.sequence.commit(range(at, at + count), step.serial)
        self._settle()
        return {"cached_tokens": self.sequence.cached_tokens}

    def attach(self):
        until = time.monotonic() + 10  # sealing follows the commit within milliseconds
        while self.model.lookup(range(self.tokens)).cached_tokens < self.tokens and time.monotonic() < until:
            time.sleep(0.005)
        self.sequence = self.model.open(range(self.tokens))
        return {"cached_tokens": self.sequence.cached_tokens}

    def decode(self):
        """REPLAYS steps of one token each, all layers in one graph; how far the last output is from double arithmetic."""
        self.sequence.reserve(REPLAYS, deadline_ms=10_000)
        pages = len(self.sequence.block_table())
        table = torch.from_numpy(self.sequence.block_table()).to(self.device).view(1, pages)
        slots = torch.from_numpy(self.sequence.slots(self.tokens, REPLAYS)).to(self.device)
        slot, lengths = torch.zeros_like(slots[:1]), torch.zeros(1, dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        k, v, q = (self._random(7 + i, REPLAYS, LAYERS, heads, DIM) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS)))
        now = [torch.zeros_like(tensor[0]) for tensor in (k, v, q)]
        out = torch.zeros(LAYERS, 1, HEADS, DIM, dtype=torch.float16, device=self.device)

        def layers():
            for layer in range(LAYERS):
                self.model.append(layer, now[0][layer : layer + 1], now[1][layer : layer + 1], slot)
                self.model.attend(
                    layer, now[2][layer : layer + 1], table, lengths, starts, out=out[layer], max_query_tokens=1
                )

        graph, began = None, 0.0
        for index in range(REPLAYS):
            for into, source in zip((*now, slot), (k[index], v[index], q[index], slots[index : index + 1])):
                into.copy_(source)
            lengths.fill_(self.tokens + index + 1)
            with self.model.step() as step:
                if graph is None:
                    layers()
                    graph = self._capture(layers)
                    self._settle()
                    began = time.monotonic()
                else:
                    graph()
            self.sequence.commit([self.tokens + index], step.serial)
        self._settle()
        seconds = time.monotonic() - began
        fault = self.model.fault()
        error = self._error(k, v, q[-1], out)
        return {
            "error": error,
            "sum": float(out.double().sum()),
            "step_us": round(1e6 * seconds / (REPLAYS - 1), 1),
            "captured": self.device.type == "cuda",
            "fault": str(fault or ""),
        }

    def _capture(self, layers):
        if self.device.type != "cuda":
            return layers
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            layers()
        return graph.replay

    def _error(self, k, v, q, out):
        """The largest difference of layer 0's and the last layer's output from attention in double."""
        worst = 0.0
        for layer in (0, LAYERS - 1):
            parts = [self._prefix(layer, at, min(4096, self.tokens - at)) for at in range(0, self.tokens, 4096)]
            keys = torch.cat([part[0] for part in parts] + [k[:, layer]]).double().repeat_interleave(HEADS // KV_HEADS, dim=1)
            values = torch.cat([part[1] for part in parts] + [v[:, layer]]).double().repeat_interleave(HEADS // KV_HEADS, dim=1)
            score = torch.einsum("hd,thd->ht", q[layer].double(), keys) / DIM**0.5
            want = torch.einsum("ht,thd->hd", score.softmax(-1), values)
            worst = max(worst, (out[layer, 0].double() - want).abs().max().item())
        return worst

    def _settle(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def trim(self):
        """Gives torch's own cached memory back, so that what is left is the context and what kvq maps."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def serve(self):
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(self, line.strip())()), flush=True)
        self._settle()
        self.client.close()


# --- the parent


class Process:
    def __init__(self, socket, tokens):
        command = [sys.executable, str(HERE), "--child", str(socket), "--tokens", str(tokens)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"process {self.process.pid} is gone")
        return json.loads(line)

    def __call__(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        self.process.stdin.close()
        return self.process.wait(timeout=60)


class Memory:
    """What the GPU counts as used, and what kvqd says it uses, at named moments. kvqd's is nothing before `daemon` is there."""

    def __init__(self, gpu):
        self._gpu, self.daemon, self.at = gpu, None, {}

    def note(self, moment):
        now = {"pages": 0, "slabs": 0, "kvqd": 0}
        if self.daemon is not None:
            status = self.daemon.control("status")
            health = status["device_health"]
            now["pages"] = sum(tenant["page_bytes"] for tenant in status["tenants"])
            now["slabs"] = sum(tenant["slab_bytes"] for tenant in status["tenants"])
            now["kvqd"] = health["held_bytes"] + health["overhead_bytes"]
        if self._gpu:
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={self._gpu}"]
            now["nvidia_smi"] = int(subprocess.run(asked, capture_output=True, text=True).stdout.split()[0]) * MIB
        self.at[moment] = now
        print(f"{moment}: " + ", ".join(f"{name} {value / MIB:.1f} MiB" for name, value in self.at[moment].items()), flush=True)

    def grown(self, before, after, what):
        return self.at[after][what] - self.at[before][what]


def judge(expect, memory, gpu, tokens, allowed):
    prefix = tokens // 64 * PAGE_BYTES
    written, shared = (memory.grown(*span, "pages") for span in (("two contexts", "written"), ("written", "shared")))
    expect(f"the prefix is counted once: +{written / MIB:.1f} MiB, then +{shared / MIB:.1f} MiB",
           prefix <= written <= 1.1 * prefix and shared <= 0.1 * prefix)
    if not gpu:
        return
    def differs(before, after):
        return memory.grown(before, after, "nvidia_smi") - memory.grown(before, after, "kvqd")

    for before, after in (("nothing", "kvqd"), ("two contexts", "written"), ("written", "shared"), ("nothing", "ended")):
        apart = differs(before, after)
        expect(f"from {before} to {after} nvidia-smi and kvqd agree ({apart / MIB:+.1f} MiB apart)", abs(apart) <= allowed)
    contexts = differs("kvqd", "two contexts")
    print(f"two contexts and what else their processes hold: {contexts / MIB:.1f} MiB")


def run(options):
    expect, gpu = Expectations(), options.device != "host"
    if gpu:
        torch.ones(1, device="cuda")  # this process's own context is part of every count
    arena = 3 * options.tokens // 64 * PAGE_BYTES // 2 // MIB + 256
    settings = {"arena_bytes": f"{arena // 16 * 16}MiB", "slab_bytes": "16MiB", "max_pages": 16384}
    memory = Memory(options.device if gpu else None)
    memory.note("nothing")
    with local_daemon(device=options.device, start_seconds=60, **settings) as daemon:
        memory.daemon = daemon
        memory.note("kvqd")
        first, second = (Process(daemon.socket, options.tokens) for _ in range(2))
        for process in (first, second):
            process.answer()
        memory.note("two contexts")
        wrote = first("write")
        first("trim")
        memory.note("written")
        attached = second("attach")
        expect(f"the first writes all ({wrote['cached_tokens']} cached)", wrote["cached_tokens"] == 0)
        expect(f"the second's prefix is a hit ({attached['cached_tokens']})", attached["cached_tokens"] == options.tokens)
        memory.note("shared")
        answers = [process("decode") for process in (first, second)]
        for process in (first, second):
            process("trim")
        memory.note("decoded")
        for name, answer in zip(("first", "second"), answers):
            print(f"{name}: {answer}")
            expect(f"the {name} attends right (error {answer['error']:.2g})", answer["error"] < 3e-4)
            expect(f"the {name}'s kernels met no fault {answer['fault']}", not answer["fault"])
        expect("both see the same bytes", answers[0]["sum"] == answers[1]["sum"])
        expect("both processes end well", [process.end() for process in (first, second)] == [0, 0])
        time.sleep(1)
        memory.note("ended")
        judge(expect, memory, gpu, options.tokens, options.allowed_mib * MIB)
    if options.out:
        write(options, memory, answers)
    return expect


def write(options, memory, answers):
    result = Result("shared_prefix", "cuda" if options.device != "host" else "cpu", options.commit)
    shape = f"{options.tokens} tokens, {LAYERS} layers, {KV_HEADS} KV heads, d {DIM}"
    for moment, counts in memory.at.items():
        for name, value in counts.items():
            result.add(f"{name}_bytes", moment, value, "bytes")
    for name, answer in zip(("first", "second"), answers):
        result.add("worst_error", f"{shape}, {name} process", answer["error"], "")
        result.add("decode_step", f"{shape}, {name} process", answer["step_us"], "us")
    result.write(options.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="of kvqd: cuda, a GPU's UUID, or host")
    parser.add_argument("--tokens", type=int, default=32768, help="of the prefix: a multiple of 64")
    parser.add_argument("--allowed-mib", type=int, default=64, help="how far the two counts may be apart")
    parser.add_argument("--out", help="where the result goes, as JSON")
    parser.add_argument("--commit", help="what is tested, where there is no git")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        Child(options.child, options.tokens).serve()
        return 0
    options.device = one_device(options.device)
    began = time.monotonic()
    expect = run(options)
    return expect.report(time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
