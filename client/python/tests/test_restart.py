"""kvqd dies: what goes on, what waits, and what a caller is told."""

import time

import numpy as np
import pytest

import kvqd
from conftest import write
from kvqd.server_process import ServerProcess
from kvqd.testing import local_daemon


def wait_until(true, seconds=20):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)


def tiny(client):
    layer = kvqd.Layer(kv_heads=1, head_dim=64, query_heads=2)
    return client.register([layer] * 2, bytes(range(32)))


def attend(model, sequence, tokens):
    q = np.full((1, 2, 64), 0.5, np.float32)
    with model.step():
        return model.attend(0, q, [sequence.block_table()], [tokens], [0, 1])


def test_a_sequence_goes_on_over_sigkill_and_the_caller_can_see_it():
    with local_daemon(held=True, restart_ms=1500, arena_bytes="64MiB") as daemon, kvqd.Client(daemon.socket) as client:
        with tiny(client) as model:
            sequence = model.open()
            k, v = write(model, sequence, list(range(100)))
            before = attend(model, sequence, 100)
            assert (model.pressure().reconnecting, model.pressure().reconnects) == (False, 0)

            # What still waits in its ring is taken from there by the next kvqd, and counted by none.
            wait_until(lambda: daemon.control("sessions")["sessions"][0]["sequences"] == 1)
            first = daemon.pid
            daemon.kill()
            wait_until(lambda: model.pressure().reconnecting)
            np.testing.assert_array_equal(attend(model, sequence, 100), before)  # with no daemon
            with pytest.raises(kvqd.DaemonGone):  # a call that needs one, and cannot wait that long
                model.request_credits(64, deadline_ms=100)
            model.request_credits(64, deadline_ms=20000)
            assert (model.pressure().reconnecting, model.pressure().reconnects) == (False, 1)

            status = daemon.control("status")
            assert status["pid"] != first and status["adopt"]["adopted"]
            assert (status["adopt"]["sessions"], status["adopt"]["sequences"]) == (1, 1)
            np.testing.assert_array_equal(attend(model, sequence, 100), before)
            write(model, sequence, list(range(100, 200)), seed=1)
            wait_until(lambda: model.lookup(list(range(200))).cached_tokens == 192)


def test_without_a_holder_calls_fail_with_daemon_gone_and_steps_go_on():
    with local_daemon(arena_bytes="64MiB") as daemon, kvqd.Client(daemon.socket) as client:
        with tiny(client) as model:
            sequence = model.open()
            write(model, sequence, list(range(100)))
            before = attend(model, sequence, 100)
            daemon.kill()
            wait_until(lambda: model.pressure().reconnecting)
            for _ in range(2):
                with pytest.raises(kvqd.DaemonGone):
                    model.request_credits(64, deadline_ms=100)
            assert model.pressure().reconnecting
            np.testing.assert_array_equal(attend(model, sequence, 100), before)


def test_a_session_is_lost_when_another_kvqd_starts_anew():
    with local_daemon(arena_bytes="64MiB") as daemon, kvqd.Client(daemon.socket) as client:
        with tiny(client) as model:
            sequence = model.open()
            write(model, sequence, list(range(100)))
            daemon.kill()
            daemon.process.wait()
            with local_daemon(arena_bytes="64MiB", socket=str(daemon.socket)):
                with pytest.raises(kvqd.DaemonGone):
                    model.request_credits(64, deadline_ms=20000)
                with pytest.raises(kvqd.DaemonGone):
                    model.pressure()
                model.close()
                with tiny(client) as again:  # the same client: a new session of the new one
                    write(again, again.open(), list(range(100)))


def test_a_server_says_the_same_over_sigkill(document):
    with local_daemon(held=True, arena_bytes="128MiB") as daemon, ServerProcess("over", daemon.socket) as server:
        server.call("open", name="document", tokens=document[:400])
        question = {"name": "document", "question": "What is this?", "tokens": 32}
        undisturbed = server.call("ask", **question)
        began = server.call("stats")["generated"]
        under_way = server.send("ask", **question)
        wait_until(lambda: server.call("stats")["generated"] >= began + 4)
        daemon.kill()
        disturbed = server.collect(under_way)
        assert disturbed["ids"] == undisturbed["ids"] and len(disturbed["ids"]) > 4
        assert daemon.control("status")["adopt"]["sequences"] >= 1
        wait_until(lambda: server.call("stats")["reconnects"] == 1)
        assert server.stream_errors == []
