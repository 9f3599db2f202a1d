"""The demo's act in which kvqd dies: SIGKILL while both servers generate, and what they say stays the same.

Invariant: the two runs that are compared start from the same state. Both are forks of one committed sequence, fed with
the same question in passes of the same size, one stream and one thread in each server, greedy; all pages are dense and
the level is calm in both, since a page that turned int4 in between would change the text for reasons of its own.
That is why this act comes before the one that fills the memory, which then runs on the kvqd that took over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .demo_report import Expectations
from .server_process import ServerFailed, ServerProcess
from .testing import LocalDaemon

# The document ends in the middle of a page and the question comes behind it, so the answer goes on into a new page
# soon after these tokens: its room comes from the magazine while no kvqd runs, and the next one seals the full page.
TOKENS_BEFORE_KILL = 8
STALL_MS = 500.0


class Restart:
    def __init__(self, daemon: LocalDaemon, expect: Expectations, say: Callable[[str], None], ask: dict):
        self.daemon, self.expect, self.say, self.request = daemon, expect, say, ask

    def _begin(self, servers: tuple[ServerProcess, ...]) -> list[int]:
        return [server.send("ask", **self.request) for server in servers]

    def before(self, *servers: ServerProcess) -> None:
        """The same prompts with kvqd alive."""
        self.undisturbed = [server.collect(id) for server, id in zip(servers, self._begin(servers))]

    def kill(self, *servers: ServerProcess) -> None:
        status = self.daemon.control("status")
        self.expect("the level is calm when kvqd is killed", status["level"] == "calm")
        first = [server.call("stats") for server in servers]
        under_way = self._begin(servers)
        at_kill = self._generated(servers, first, TOKENS_BEFORE_KILL)
        killed = self.daemon.kill()
        now = self.daemon.control("status")  # waits in the backlog of the socket, which the holder keeps open
        self.serving_ms = 1e3 * (time.monotonic() - killed)
        at_return = self._generated(servers, first, 0)
        self.after = [server.collect(id) for server, id in zip(servers, under_way)]
        last = [server.call("stats") for server in servers]
        self.adopt = now["adopt"]
        self.same = [x["ids"] == y["ids"] for x, y in zip(self.undisturbed, self.after)]
        self.say(
            f"SIGKILL to kvqd after {' and '.join(map(str, at_kill))} tokens of the answers: another serves "
            f"{self.serving_ms:.0f} ms later, after {' and '.join(map(str, at_return))}; both finish"
        )
        for server, x, y, same in zip(servers, self.undisturbed, self.after, self.same):
            self.say(
                f"{server.label}: {len(y['ids'])} tokens, {'the same' if same else 'NOT the same'} as before; longest "
                f"wait for a token {y['slowest_token_ms']:.0f} ms (undisturbed {x['slowest_token_ms']:.0f} ms)"
            )
        self.expect("another kvqd serves, and took over", now["pid"] != status["pid"] and self.adopt["adopted"])
        self.expect("it has the arena of the dead one", now["instance"] == status["instance"])
        self.expect("it took over both sessions", self.adopt["sessions"] == len(servers))
        self.expect("it took over both documents", self.adopt["sequences"] >= 2 * len(servers) and self.adopt["pages"])
        for server, x, y, kill, back, same, stats in zip(
            servers, self.undisturbed, self.after, at_kill, at_return, self.same, last
        ):
            self.expect(f"{server.label} was in the middle", kill <= back < len(y["ids"]))
            self.expect(f"{server.label} says the same, token by token", same and len(x["ids"]) > TOKENS_BEFORE_KILL)
            longer_ms = y["slowest_token_ms"] - x["slowest_token_ms"]
            self.expect(f"{server.label} waits at most {STALL_MS:.0f} ms longer for a token", longer_ms <= STALL_MS)
            self.expect(f"{server.label} came back to the next kvqd once", stats["reconnects"] == 1)
            self.expect(f"{server.label} lost no page", stats["lost_pages"] == 0 and not server.stream_errors)

    def _generated(self, servers, first, least: int) -> list[int]:
        """Tokens of each answer so far, once each has `least`."""
        until = time.monotonic() + 60
        while True:
            now = [server.call("stats")["generated"] for server in servers]
            done = [b - a["generated"] for a, b in zip(first, now)]
            if min(done) >= least:
                return done
            if time.monotonic() > until:
                raise ServerFailed(f"no {least} tokens of an answer within 60 s", "Timeout")

    def rows(self) -> list[tuple[str, str]]:
        stalls = ", ".join(
            f"{label} {y['slowest_token_ms']:.0f} ms ({x['slowest_token_ms']:.0f} ms)"
            for label, x, y in zip("AB", self.undisturbed, self.after)
        )
        adopted = (
            f"{self.adopt['sessions']} sessions, {self.adopt['sequences']} sequences, {self.adopt['pages']} pages"
        )
        return [
            ("longest wait for a token, kvqd killed (alive)", stalls),
            ("from SIGKILL of kvqd to serving again", f"{self.serving_ms:.0f} ms"),
            ("adopted by the next kvqd", adopted),
            ("same text", "yes" if all(self.same) else "NO"),
        ]
