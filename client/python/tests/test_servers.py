"""Model servers as processes: one serves from the other's pages, and outlives it."""

import time

import pytest

from kvqd.server_process import ServerFailed, ServerProcess


def test_a_second_server_attaches_the_firsts_document_and_answers_alike(daemon, document):
    tokens = document[2000:2600]
    with ServerProcess("first", daemon.socket, wait=False) as first, ServerProcess(
        "second", daemon.socket, wait=False
    ) as second:
        for server in (first, second):
            server.wait_until_ready()
        opened = first.call("open", name="document", tokens=tokens)
        assert opened["cached_tokens"] == 0 and opened["tokens"] == 600
        second.wait_until_cached(tokens, 576)
        attached = second.call("open", name="document", tokens=tokens)
        assert attached["cached_tokens"] == 576
        assert attached["seconds"] < opened["seconds"] / 2
        answers = [
            server.call("ask", name="document", question="Summarise this.", tokens=8)["text"]
            for server in (first, second)
        ]
        assert answers[0] == answers[1] != ""
        scores = [server.call("score", name="document", tokens=document[2600:2700]) for server in (first, second)]
        assert scores[0]["perplexity"] == pytest.approx(scores[1]["perplexity"], rel=1e-3)

        second.call("start", name="document", stream="s", tokens=8)
        first.kill()
        before = second.call("stats")["generated"]
        until = time.monotonic() + 30
        while second.call("stats")["generated"] < before + 10:  # more than one round of the stream
            assert time.monotonic() < until
            time.sleep(0.05)
        second.call("stop", stream="s")
        assert second.stream_errors == []
        pids = [session["pid"] for session in daemon.control("sessions")["sessions"]]
        assert second.process.pid in pids and first.process.pid not in pids


def test_commands_that_cannot_be_done_get_one_error_each(daemon):
    with ServerProcess("errors", daemon.socket) as server:
        for command in (
            {"op": "no such"},
            {"op": "ask", "name": "nothing", "question": "?"},
            {"op": "stop", "stream": "none"},
            {"op": "open"},
        ):
            with pytest.raises(ServerFailed):
                server.call(**command)
        assert server.call("stats")["streams"] == 0
