"""The demo: two model servers share one document's K/V, kvqd dies and comes back, memory gets short, pages turn int4
under them, one server dies.

Invariant: every number printed is from this run, and each promise that the demo makes is an expectation that can
fail: the exit code is 0 only if all of them held.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

from .demo_report import Expectations, table
from .demo_restart import Restart
from .models.tokenizer import SYSTEM, Tokenizer
from .server_process import ServerFailed, ServerProcess
from .testing import LocalDaemon, local_daemon

LICENCES = pathlib.Path("/usr/share/common-licenses")
DOCUMENT = "GPL-3"
OTHERS = ["GPL-2", "LGPL-2.1", "MPL-2.0", "Apache-2.0", "GFDL-1.3", "Artistic"]
QUESTION = "In one sentence: what does this licence let people do?"
ARENA = {
    "arena_bytes": "160MiB",
    "slab_bytes": "8MiB",
    "quantize_at": 0.65,
    "evict_at": 0.85,
    "refuse_at": 0.95,
    "relief": 0.03,
    "residual_window_pages": 2,
}
DOCUMENT_TOKENS = 2080  # 32 pages and a half
SCORED_TOKENS = 384  # of the document, after those
OTHER_TOKENS = 776  # each of six: 13 pages
RATE_SECONDS = 8.0
RECLAIM_MS = 250.0
ANSWER_TOKENS = 40


class Demo:
    def __init__(self, daemon: LocalDaemon, tokenizer: Tokenizer, began: float):
        self.daemon, self.tokenizer, self.began = daemon, tokenizer, began
        self.expect = Expectations()
        text = tokenizer.encode((LICENCES / DOCUMENT).read_text())
        head = [
            *tokenizer.encode_turn("system", SYSTEM),
            tokenizer.start_of_turn,
            *tokenizer.encode("user\nHere is a licence.\n\n"),
        ]
        size = DOCUMENT_TOKENS - len(head)
        self.document, self.continuation = head + text[:size], text[size : size + SCORED_TOKENS + 1]

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {line}", flush=True)

    # --- measurements

    def tenant(self) -> dict:
        return max(self.daemon.control("tenants")["tenants"], key=lambda tenant: tenant["page_bytes"])

    def rates(self, *servers: ServerProcess, seconds: float = RATE_SECONDS) -> list[float]:
        """Tokens per second of each server's stream over the next `seconds`."""
        first = [server.call("stats") for server in servers]
        time.sleep(seconds)
        last = [server.call("stats") for server in servers]
        return [(b["generated"] - a["generated"]) / (b["time"] - a["time"]) for a, b in zip(first, last)]

    def pages(self) -> str:
        formats = self.tenant()["formats"]
        held = ", ".join(f"{use['pages']} {name}" for name, use in formats.items() if use["pages"])
        return f"pages: {held or 'none'}; level {self.daemon.control('status')['level']}"

    # --- the acts

    def share_a_document(self, a: ServerProcess, b: ServerProcess) -> None:
        self.say(f"A prefills {DOCUMENT} ({len(self.document)} tokens)")
        self.first = a.call("open", name="document", tokens=self.document)
        self.say(
            f"A is done after {self.first['seconds']:.2f} s "
            f"({len(self.document) / self.first['seconds']:.0f} tokens/s); {self.pages()}"
        )
        b.wait_until_cached(self.document, len(self.document) // 64 * 64)
        self.second = b.call("open", name="document", tokens=self.document)
        self.say(
            f"B opens the same document: {self.second['cached_tokens']} tokens attached in "
            f"{1e3 * self.second['attach_s']:.1f} ms, "
            f"ready after {self.second['seconds']:.2f} s"
        )
        self.expect("A computes the document itself", self.first["cached_tokens"] == 0)
        self.expect("B is served from A's pages", self.second["cached_tokens"] == len(self.document) // 64 * 64)
        self.expect("B is ready at least 5 times sooner", self.second["seconds"] * 5 < self.first["seconds"])
        self.dense = a.call("score", name="document", tokens=self.continuation)
        self.expect("the first score is on dense pages", self.dense["quantized_pages"] == 0)
        self.say(f"A scores the next {SCORED_TOKENS} tokens on dense pages: perplexity {self.dense['perplexity']:.3f}")

    def kill_kvqd(self, a: ServerProcess, b: ServerProcess) -> None:
        self.restart = Restart(self.daemon, self.expect, self.say, self.request)
        self.restart.before(a, b)
        for server, answer in zip((a, b), self.restart.undisturbed):
            self.say(f"{server.label} answers: {one_line(answer)}")
        self.restart.kill(a, b)

    request = {"name": "document", "question": QUESTION, "tokens": ANSWER_TOKENS}

    def ask(self, server: ServerProcess) -> str:
        return one_line(server.call("ask", **self.request))

    def fill_memory(self, a: ServerProcess, b: ServerProcess) -> None:
        for server in (a, b):
            server.call("start", name="document", stream="stream", tokens=96)
        self.calm = self.rates(a, b)
        held = self.tenant()["formats"]
        self.expect(
            "all pages are dense before there is pressure",
            all(not use["pages"] for name, use in held.items() if name != "dense"),
        )
        self.say(f"both generate: A {self.calm[0]:.1f}, B {self.calm[1]:.1f} tokens/s; {self.pages()}")
        waiting = []
        for index, name in enumerate(OTHERS):
            server = (a, b)[index % 2]
            tokens = self.tokenizer.encode((LICENCES / name).read_text())[:OTHER_TOKENS]
            waiting.append((server, name, server.send("open", name=name, tokens=tokens, private=True)))
        before = [server.call("stats") for server in (a, b)]
        for server, name, id in waiting:
            server.collect(id)
            self.say(f"{server.label} holds {name} too; {self.pages()}")
        after = [server.call("stats") for server in (a, b)]
        self.arriving = [(y["generated"] - x["generated"]) / (y["time"] - x["time"]) for x, y in zip(before, after)]
        self.slowest_ms = max(stats["slowest_pass_ms"] for stats in after)
        self.pressed = self.rates(a, b)
        self.say(f"both still generate: A {self.pressed[0]:.1f}, B {self.pressed[1]:.1f} tokens/s; {self.pages()}")
        self.expect("both servers generate while sequences arrive", min(self.arriving) > 0)
        self.expect("both servers generate under pressure", min(self.pressed) > 0)

    def measure_memory(self, b: ServerProcess) -> None:
        status, tenant, stats = self.daemon.control("status"), self.tenant(), b.call("stats")
        self.formats = {name: use for name, use in tenant["formats"].items() if use["pages"]}
        count = sum(use["pages"] for use in self.formats.values())
        self.bytes_now = sum(use["bytes"] for use in self.formats.values())
        self.bytes_dense = count * stats["dense_page_bytes"]
        arena = status["arena"]
        slots = (arena["slabs"] - arena["slabs_reserved"]) * (arena["slab_bytes"] // stats["dense_page_bytes"])
        self.say(f"{count} pages are held; the arena has room for {slots} dense ones")
        self.expect("dense pages alone would not fit", count > slots)
        self.expect("nothing was dropped or refused", status["dropped_pages"] == 0 and status["refusals"] == 0)
        self.expect("no page was lost", stats["lost_pages"] == 0)

    def score_again(self, b: ServerProcess) -> None:
        self.cold = b.call("score", name="document", tokens=self.continuation)
        same = sum(x == y for x, y in zip(self.dense["best"], self.cold["best"]))
        self.agreement = same / len(self.dense["best"])
        self.say(
            f"B scores the same tokens with {self.cold['quantized_pages']} of the document's pages int4: perplexity "
            f"{self.cold['perplexity']:.3f}, agreement {100 * self.agreement:.1f} %"
        )
        total = self.cold["quantized_pages"] + self.cold["dense_pages"]
        self.expect("most of the document is int4", self.cold["quantized_pages"] > total / 2)
        self.expect("int4 was really read (perplexity differs)", self.cold["perplexity"] != self.dense["perplexity"])
        self.expect("agreement is plausible (85 to 100 %)", 0.85 <= self.agreement <= 1)
        self.expect(
            "perplexity is within 5 % of dense", abs(self.cold["perplexity"] / self.dense["perplexity"] - 1) < 0.05
        )
        self.say(f"B answers: {self.ask(b)}")

    def kill_a(self, a: ServerProcess, b: ServerProcess) -> None:
        stats, before = a.call("stats"), self.tenant()
        own = [use for name, use in stats["sequences"].items() if name != "document"]
        expected = sum(
            use["dense_pages"] * stats["dense_page_bytes"] + use["quantized_pages"] * stats["cold_page_bytes"]
            for use in own
        )
        self.say(f"SIGKILL to A, which alone holds {expected / 2**20:.1f} MiB")
        a.kill()
        exited, polls = time.monotonic(), 0
        while True:
            polls += 1
            now, sessions = self.tenant(), self.daemon.control("sessions")["sessions"]
            self.reclaim_ms = 1e3 * (time.monotonic() - exited)
            self.returned = before["page_bytes"] - now["page_bytes"]
            gone = all(session["pid"] != a.process.pid for session in sessions)
            if (gone and self.returned >= 0.9 * expected) or self.reclaim_ms > 10000:
                break
        self.say(
            f"{self.returned / 2**20:.1f} MiB are back {self.reclaim_ms:.0f} ms after A's exit (look {polls}); "
            f"{self.pages()}"
        )
        self.expect("A's memory returns", gone and self.returned >= 0.9 * expected)
        self.expect(f"within {RECLAIM_MS:.0f} ms of its exit", self.reclaim_ms <= RECLAIM_MS)
        self.alone = self.rates(b)[0]
        self.say(f"B goes on at {self.alone:.1f} tokens/s and answers: {self.ask(b)}")
        self.expect("B goes on", self.alone > 0 and not b.stream_errors)

    def results(self) -> list[tuple[str, str]]:
        formats = ", ".join(f"{use['pages']} {name}" for name, use in self.formats.items())
        pair = "A {:.1f}, B {:.1f}".format
        saved = self.first["seconds"] - self.second["seconds"]
        return [
            ("prefix hit", f"{self.second['cached_tokens']} of {len(self.document)} tokens"),
            (
                "prefill time, A / B",
                f"{self.first['seconds']:.2f} s / {self.second['seconds']:.2f} s ({saved:.2f} s saved)",
            ),
            (
                "bytes now / all dense",
                f"{self.bytes_now / 2**20:.1f} MiB / {self.bytes_dense / 2**20:.1f} MiB "
                f"({100 * self.bytes_now / self.bytes_dense:.0f} %)",
            ),
            ("pages by format", formats),
            ("tokens/s before pressure", pair(*self.calm)),
            ("tokens/s while sequences arrive", pair(*self.arriving) + f" (slowest pass {self.slowest_ms:.0f} ms)"),
            ("tokens/s under pressure", pair(*self.pressed)),
            ("next-token agreement with dense", f"{100 * self.agreement:.1f} % of {len(self.dense['best'])} tokens"),
            ("perplexity, dense / now", f"{self.dense['perplexity']:.3f} / {self.cold['perplexity']:.3f}"),
            ("time to reclaim after SIGKILL", f"at most {self.reclaim_ms:.0f} ms for {self.returned / 2**20:.1f} MiB"),
            ("tokens/s of B afterwards", f"{self.alone:.1f}"),
            *self.restart.rows(),
        ]


def one_line(answer: dict) -> str:
    return " ".join(answer["text"].split())


def run(began: float) -> int:
    tokenizer = Tokenizer()
    with local_daemon(held=True, **ARENA) as daemon:
        demo = Demo(daemon, tokenizer, began)
        demo.say(
            f"kvqd, held by kvq-hold, serves {ARENA['arena_bytes']} in slabs of {ARENA['slab_bytes']}; "
            "servers A and B load SmolLM2-135M-Instruct"
        )
        try:
            with ServerProcess("A", daemon.socket, wait=False) as a, ServerProcess("B", daemon.socket, wait=False) as b:
                a.wait_until_ready()
                b.wait_until_ready()
                demo.say("both servers are connected")
                demo.share_a_document(a, b)
                demo.kill_kvqd(a, b)
                demo.fill_memory(a, b)
                demo.measure_memory(b)
                demo.score_again(b)
                demo.kill_a(a, b)
        except (ServerFailed, RuntimeError) as error:
            demo.expect(f"every step works ({error})", False)
            print(daemon.log[-3000:], file=sys.stderr)
        else:
            table(demo.results())
    return demo.expect.report(time.monotonic() - began)


def main() -> int:
    argparse.ArgumentParser(prog="python -m kvqd.demo", description=__doc__.splitlines()[0]).parse_args()
    try:
        return run(time.monotonic())
    except (FileNotFoundError, RuntimeError) as error:  # no program, no model, no daemon
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
