"""SmolLM2 on a GPU with its K/V in kvqd: two server processes share one document, memory gets short, pages turn int4 under them;
what they say is compared with a dense torch pass on the same GPU.

Invariant: both servers are processes of their own that were exec'd, every number is of this run, and the exit code is 0 only if
all expectations held. A plain program: python3 tests/gpu/python/smollm2.py --out fidelity.json. It needs torch, gguf, tokenizers,
cffi, the model ($KVQ_MODEL) and kvqd's programs ($KVQ_BIN_DIR, $KVQ_LIBRARY); `--device host` runs it on the CPU.
"""

import argparse
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parents[2] / "python", HERE.parents[3] / "client/python"):  # of a bundle, of the checkout
    if (folder / "kvqd").exists():
        sys.path.insert(0, str(folder))

import torch

import kvqd
from dense_reference import Dense, first_difference, same_share
from first_gpu import one_device
from kvqd.demo_report import Expectations
from kvqd.models import gguf_file, kvq_cache, torch_cache
from kvqd.models.llama import log_likelihood
from kvqd.models.llama_torch import Llama
from kvqd.models.tokenizer import SYSTEM, Tokenizer
from kvqd.server_process import ServerFailed, ServerProcess
from kvqd.testing import local_daemon
from result_file import Result

QUESTIONS = [
    "In one sentence: what does this licence let people do?",
    "Who wrote this text, and for whom?",
    "List three words that the text defines.",
]
# How far perplexity may be from dense torch's, and how many of the most likely tokens must be the same.
BOUNDS = {"dense": (0.003, 0.98), "int4": (0.05, 0.85), "int4_k4": (0.05, 0.85), "int4_k8": (0.05, 0.85), "k8v4": (0.05, 0.85)}
MIB = 2**20


class Run:
    def __init__(self, options):
        self.options, self.began, self.expect = options, time.monotonic(), Expectations()
        self.device = "cpu" if options.device == "host" else "cuda:0"
        self.result = Result("fidelity", self.device, options.commit)
        self.tokenizer = Tokenizer()
        weights = gguf_file.load_weights()
        self.config, self.fingerprint = weights.config, weights.fingerprint
        self.llama = Llama(weights, self.device)
        head = [
            *self.tokenizer.encode_turn("system", SYSTEM),
            self.tokenizer.start_of_turn,
            *self.tokenizer.encode("user\nHere is a licence.\n\n"),
        ]
        text = self.tokenizer.encode(pathlib.Path(options.text).read_text())
        size = options.document_tokens - len(head)
        self.document = head + text[:size]
        self.continuation = text[size : size + options.score_tokens + 1]
        if len(self.continuation) <= options.score_tokens:
            raise SystemExit(f"{options.text} has {len(text)} tokens, too few for --document-tokens and --score-tokens")
        self.shape = f"{options.document_tokens}+{options.score_tokens}"
        layer_bytes = 2 * 64 * self.config.kv_heads * self.config.head_dim * 2
        self.page_bytes = self.config.layers * layer_bytes
        self.pages = -(-len(self.document) // 64)

    def say(self, line):
        print(f"[{time.monotonic() - self.began:6.1f} s] {line}", flush=True)

    def daemon(self, **settings):
        """Room for twice the document's dense pages and a little: a slab holds five, one slab is for transcodes."""
        slabs = 2 * self.pages // 5 + 8
        shape = {"arena_bytes": f"{8 * slabs}MiB", "slab_bytes": "8MiB", "max_pages": 8192, "residual_window_pages": 2}
        return local_daemon(device=self.options.device, start_seconds=60, **{**shape, **settings})

    def compare(self, name, bound, score, dense):
        """Puts a score into the result and judges it against dense torch."""
        agreement = same_share(score["best"], dense["best"])
        change = score["perplexity"] / dense["perplexity"] - 1
        self.result.add(f"{name} perplexity", self.shape, round(score["perplexity"], 5), "")
        self.result.add(f"{name} perplexity change", self.shape, round(100 * change, 4), "%")
        self.result.add(f"{name} top-1 agreement", self.shape, round(100 * agreement, 3), "%")
        most, least = BOUNDS[bound]
        self.expect(f"{name}: perplexity within {100 * most} % ({100 * change:+.3f} %)", abs(change) <= most)
        self.expect(f"{name}: agreement at least {100 * least} % ({100 * agreement:.2f} %)", agreement >= least)


def quantized_by_pressure(run, daemon, sequence):
    """Lets kvqd turn all of the sequence but its newest pages cold; False if that does not happen."""
    for key, value in (("relief", 0.01), ("quantize_at", 0.02)):
        daemon.control("set", key, str(value))
    until = time.monotonic() + 30
    while sequence.info().quantized_pages < run.pages - 4:
        if time.monotonic() > until:
            run.say(f"not quantized: {sequence.info()}")
            return False
        time.sleep(0.02)
    daemon.control("set", "quantize_at", "0.7")  # what comes now stays dense
    return True


def score_in_process(run, forward, document):
    """As a server's `score`: on a fork, so that the document stays as it is."""
    import numpy as np

    child, tokens, likelihood, best = document.fork(10_000), run.continuation, [], []
    for at in range(0, len(tokens) - 1, 256):
        part = tokens[at : min(at + 256, len(tokens) - 1)]
        logits = run.llama.logits(forward([(child, part)]))
        likelihood.append(log_likelihood(logits, np.array(tokens[at + 1 : at + 1 + len(part)])))
        best.extend(logits.argmax(axis=1).tolist())
    forward.check()
    child.release()
    return {"perplexity": float(np.exp(-np.concatenate(likelihood).mean())), "best": best}


def replayed_and_eager(run, model, document):
    """The same tokens, one a pass, once launched kernel by kernel and once as a replayed graph."""
    states, micros = [], []
    for graphs in (False, True):
        forward, child = torch_cache.Forward(run.llama, model, deadline_ms=10_000, graphs=graphs), document.fork(10_000)
        of_run = []
        for index, token in enumerate(run.continuation[:40]):
            if index == 8:  # warm by now, and captured
                began = time.monotonic()
            of_run.append(forward([(child, [token])]).float().cpu())
        micros.append(1e6 * (time.monotonic() - began) / (len(of_run) - 8))
        states.append(torch.cat(of_run))
        child.release()
        run.expect(f"passes were captured only if so asked ({graphs})", forward.captured == int(graphs and run.device != "cpu"))
    apart = ((states[0] - states[1]).abs().max() / states[0].abs().max()).item()
    run.expect(f"replayed passes compute what eager ones do (at most {100 * apart:.3f} % apart)", apart <= 0.01)
    for name, value in zip(("eager", "graphs"), micros):
        run.result.add(f"decode pass, {name}", f"1x{len(document.tokens)}", round(value, 1), "us")


def one_format(run, cold_format, dense):
    """Scores the continuation with the whole document dense, then cold, in this process."""
    with run.daemon(cold_format=cold_format) as daemon, kvqd.Client(daemon.socket, label="formats") as client:
        with kvq_cache.register(client, run.config, run.fingerprint) as model:
            forward = torch_cache.Forward(run.llama, model, deadline_ms=10_000)
            document = kvq_cache.KvqSequence.open(model, run.document)
            while document.length < len(run.document):
                forward([(document, run.document[document.length : document.length + 256])])
            info = model.info()
            replayed_and_eager(run, model, document)
            before = score_in_process(run, forward, document)
            run.compare(f"kvq dense ({cold_format} daemon)", "dense", before, dense)
            held = quantized_by_pressure(run, daemon, document.sequence)
            after = score_in_process(run, forward, document)
            now = document.sequence.info()
            run.say(f"{cold_format}: {now.quantized_pages} of {now.pages} pages cold, {info.cold_page_bytes} bytes each")
            run.expect(f"{cold_format}: the document turns cold ({now.quantized_pages} of {now.pages} pages)", held)
            run.expect(f"{cold_format}: cold pages were really read", after["perplexity"] != before["perplexity"])
            run.compare(f"kvq {cold_format}", cold_format, after, dense)
            run.result.add(f"{cold_format} page bytes", "64 tokens", info.cold_page_bytes / info.dense_page_bytes, "of dense")
            if run.device != "cpu":
                torch.cuda.synchronize()
            document.release()


class Servers:
    """Two exec'd servers over one kvqd."""

    def __init__(self, run, daemon, a, b, dense):
        self.run, self.daemon, self.a, self.b, self.dense = run, daemon, a, b, dense

    def tenant(self):
        return max(self.daemon.control("tenants")["tenants"], key=lambda tenant: tenant["page_bytes"])

    def room(self):
        """Dense pages that the arena holds."""
        arena = self.daemon.control("status")["arena"]
        return (arena["slabs"] - arena["slabs_reserved"]) * (arena["slab_bytes"] // self.run.page_bytes)

    def share(self):
        run, size = self.run, len(self.run.document)
        first = self.a.call("open", name="document", tokens=run.document)
        after_a = self.tenant()["page_bytes"]
        whole = (size - 1) // 64 * 64
        self.b.wait_until_cached(run.document, whole)
        second = self.b.call("open", name="document", tokens=run.document)
        after_b = self.tenant()["page_bytes"]
        run.say(
            f"A computes {size} tokens in {first['seconds']:.2f} s; B attaches {second['cached_tokens']} of them, ready in "
            f"{second['seconds']:.3f} s; page bytes {after_a / MIB:.1f} MiB, then {after_b / MIB:.1f} MiB"
        )
        run.expect("A computes the document itself", first["cached_tokens"] == 0)
        run.expect(f"B's prefix is a cache hit ({second['cached_tokens']} tokens)", second["cached_tokens"] == whole)
        run.expect("status counts the prefix once", after_b - after_a <= 0.1 * after_a and after_a >= whole // 64 * run.page_bytes)
        run.result.add("prefix hit of the second server", f"{size} tokens", second["cached_tokens"], "tokens")
        run.result.add("page bytes with one server", f"{size} tokens", after_a, "bytes")
        run.result.add("page bytes with two servers", f"{size} tokens", after_b, "bytes")
        run.result.add("prefill of the first server", f"{size} tokens", round(1e3 * first["seconds"], 2), "ms")
        run.result.add("prefill of the second server", f"{size} tokens", round(1e3 * second["seconds"], 2), "ms")

    def ask(self, when):
        """All questions to both servers at once; their greedy tokens against dense torch's."""
        run, count = self.run, self.run.options.answer_tokens
        shares = []
        for question, want in zip(QUESTIONS, self.dense["answers"]):
            waiting = [(s, s.send("ask", name="document", question=question, tokens=count)) for s in (self.a, self.b)]
            for server, id in waiting:
                got = server.collect(id)["ids"]
                shares.append(same_share(got, want))
                run.say(f"{when}: {server.label} answers {len(got)} tokens; first difference from dense torch: "
                        f"{first_difference(got, want)}; {run.tokenizer.decode(got)[:70]!r}")
        share = sum(shares) / len(shares)
        run.result.add(f"greedy tokens equal to dense torch's, {when}", f"{len(shares)}x{count}", round(100 * share, 2), "%")
        return share

    def press(self):
        """Both generate while private sequences arrive, until dense pages alone would not fit."""
        run = self.run
        for server in (self.a, self.b):
            server.call("start", name="document", stream="stream", tokens=96)
        before = self.rates(2.0)
        text = run.continuation + run.document
        each, waiting = min(12, max(6, run.pages // 3)), []
        for index in range(3 * self.room() // 4 // each + 1):  # beside the document, more than fit in dense pages
            server = (self.a, self.b)[index % 2]
            tokens = (text[index * 97 :] + text)[: 64 * each]
            waiting.append((server, server.send("open", name=f"private {index}", tokens=tokens, private=True)))
        for server, id in waiting:
            server.collect(id)
        during = self.rates(2.0)
        formats = {name: use["pages"] for name, use in self.tenant()["formats"].items() if use["pages"]}
        status, stats = self.daemon.control("status"), [server.call("stats") for server in (self.a, self.b)]
        run.say(f"pages: {formats}; tokens/s before {before}, under pressure {during}")
        room = self.room()
        held = sum(formats.values())
        run.expect(f"dense pages alone would not fit ({held} pages, room for {room})", held > room)
        run.expect("both servers generate under pressure", min(during) > 0)
        run.expect("nothing was refused", status["refusals"] == 0)
        run.result.add("idle pages dropped under pressure", run.shape, status["dropped_pages"], "pages")
        run.expect("no page was lost", all(each["lost_pages"] == 0 for each in stats))
        run.expect(f"no kernel met a fault ({[each['fault'] for each in stats]})", not any(each["fault"] for each in stats))
        ended = self.a.stream_errors + self.b.stream_errors
        run.expect(f"no stream ended ({ended})", not ended)
        for name, rates in (("before", before), ("under", during)):
            run.result.add(f"tokens/s of each server {name} pressure", run.options.compute, round(sum(rates) / 2, 1), "tokens/s")

    def rates(self, seconds):
        first = [server.call("stats") for server in (self.a, self.b)]
        time.sleep(seconds)
        last = [server.call("stats") for server in (self.a, self.b)]
        return [round((y["generated"] - x["generated"]) / (y["time"] - x["time"]), 1) for x, y in zip(first, last)]


def two_servers(run, dense):
    marks = {"quantize_at": 0.65, "evict_at": 0.85, "refuse_at": 0.95, "relief": 0.03}
    started = {"wait": False, "compute": run.options.compute}
    with run.daemon(cold_format="int4", **marks) as daemon:
        with ServerProcess("A", daemon.socket, **started) as a, ServerProcess("B", daemon.socket, **started) as b:
            a.wait_until_ready()
            b.wait_until_ready()
            run.say(f"two servers are connected, pids {a.process.pid} and {b.process.pid}")
            try:
                scenario(run, Servers(run, daemon, a, b, dense), dense)
            except ServerFailed:
                for line in daemon.log.splitlines()[-8:]:
                    run.say(f"kvqd: {line}")
                raise


def scenario(run, servers, dense):
    a, b = servers.a, servers.b
    servers.share()
    for server in (a, b):
        score = server.call("score", name="document", tokens=run.continuation)
        run.expect(f"{server.label}'s first score is on dense pages", score["quantized_pages"] == 0)
        run.compare(f"server {server.label}, dense pages", "dense", score, dense)
    share = servers.ask("dense pages")
    run.expect(f"greedy answers on dense pages follow dense torch ({100 * share:.0f} %)", share >= 0.5)
    servers.press()
    score = b.call("score", name="document", tokens=run.continuation)
    total = score["quantized_pages"] + score["dense_pages"]
    run.say(f"B scores with {score['quantized_pages']} of {total} pages int4")
    run.expect("most of the document is int4", score["quantized_pages"] > total / 2)
    run.compare("server B, under pressure", "int4", score, dense)
    servers.ask("under pressure")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="of kvqd: cuda, a GPU's UUID, or host")
    parser.add_argument("--compute", default="torch-graphs", choices=("torch", "torch-graphs"), help="of the servers")
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="a long text: the document and what follows it")
    parser.add_argument("--document-tokens", type=int, default=5024)
    parser.add_argument("--score-tokens", type=int, default=1024)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--formats", default="int4,int4_k4,k8v4", help="cold formats to score in this process")
    parser.add_argument("--out", help="where the result goes, as JSON")
    parser.add_argument("--commit", help="what is tested, where there is no git")
    options = parser.parse_args()
    options.device = one_device(options.device)
    return options


def stage(run, name, work):
    """What goes wrong in one part is a broken expectation, and the next part runs all the same."""
    try:
        work()
    except (kvqd.KvqError, ServerFailed, RuntimeError) as error:
        run.expect(f"{name}: goes through ({type(error).__name__}: {error})", False)


def main():
    options = parse()
    run = Run(options)
    reference = Dense(run.llama, run.document)
    dense = reference.score(run.continuation)
    words, ends = run.tokenizer, (run.tokenizer.end_of_turn, run.tokenizer.end_of_text)
    dense["answers"] = []
    for question in QUESTIONS:
        turn = [*words.encode(f"\n\n{question}"), words.end_of_turn, *words.encode("\n"), *words.assistant_start()]
        dense["answers"].append(reference.answer(turn, options.answer_tokens, ends))
    del reference
    run.result.add("dense torch perplexity", run.shape, round(dense["perplexity"], 5), "")
    run.say(f"dense torch on {run.result.document['device']}: perplexity {dense['perplexity']:.4f}")
    stage(run, "two servers", lambda: two_servers(run, dense))
    for cold_format in filter(None, options.formats.split(",")):
        stage(run, f"format {cold_format}", lambda: one_format(run, cold_format, dense))
    run.result.print_table()
    if options.out:
        run.result.write(options.out)
    return run.expect.report(time.monotonic() - run.began)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    sys.exit(main())
