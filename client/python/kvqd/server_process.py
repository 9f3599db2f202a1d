"""Runs `python -m kvqd.server` as a child and talks to it.

Invariant: replies are matched by id, so several commands may be under way; a server that dies turns every wait into
ServerFailed.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time

START_SECONDS = 120
REPLY_SECONDS = 240


class ServerFailed(Exception):
    """The server answered with an error, or is gone. `error` is the class name of what it raised."""

    def __init__(self, message: str, error: str = ""):
        super().__init__(message)
        self.error = error


class ServerProcess:
    def __init__(
        self,
        label: str,
        socket: str | os.PathLike | None = None,
        *,
        threads: int = 1,
        deadline_ms: int = 15000,
        compute: str = "numpy",
        wait: bool = True,
    ):
        arguments = [
            sys.executable,
            "-m",
            "kvqd.server",
            "--label",
            label,
            "--compute",
            compute,
            "--threads",
            str(threads),
            "--deadline-ms",
            str(deadline_ms),
        ]
        if socket is not None:
            arguments += ["--socket", os.fspath(socket)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        self.label, self._next_id = label, 0
        self._replies: dict[int, queue.SimpleQueue] = {}
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self.stream_errors: list[str] = []  # of streams that ended by themselves
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        threading.Thread(target=self._read, daemon=True).start()
        if wait:
            self.wait_until_ready()

    def _read(self) -> None:
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("event") == "ready":
                self._ready.put(message)
            elif message.get("id") in self._replies:
                self._replies[message["id"]].put(message)
            else:
                self.stream_errors.append(f"{message.get('error')}: {message.get('message')}")
        gone = {"ok": False, "error": "Gone", "message": f"server {self.label} is gone"}
        self._ready.put(gone)
        for waiting in list(self._replies.values()):
            waiting.put(gone)

    def wait_until_ready(self) -> None:
        try:
            message = self._ready.get(timeout=START_SECONDS)
        except queue.Empty:
            raise ServerFailed(f"server {self.label} is not ready after {START_SECONDS} s", "Timeout") from None
        if message.get("event") != "ready":
            raise ServerFailed(f"server {self.label} did not start", "Gone")

    def send(self, op: str, **fields) -> int:
        """Sends a command; collect() gets its reply."""
        self._next_id += 1
        self._replies[self._next_id] = queue.SimpleQueue()
        try:
            self.process.stdin.write(json.dumps({"id": self._next_id, "op": op, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ServerFailed(f"server {self.label} is gone", "Gone") from None
        return self._next_id

    def collect(self, id: int, timeout: float = REPLY_SECONDS) -> dict:
        try:
            message = self._replies[id].get(timeout=timeout)
        except queue.Empty:
            raise ServerFailed(f"server {self.label} has not answered for {timeout:.0f} s", "Timeout") from None
        del self._replies[id]
        if not message["ok"]:
            raise ServerFailed(f"{message['error']}: {message['message']}", message["error"])
        return message

    def call(self, op: str, **fields) -> dict:
        return self.collect(self.send(op, **fields))

    def wait_until_cached(self, tokens: list[int], count: int, seconds: float = 10) -> None:
        """Until `count` tokens of a prompt are in the prefix index: sealing follows a commit within milliseconds."""
        until = time.monotonic() + seconds
        while self.call("lookup", tokens=tokens)["cached_tokens"] < count:
            if time.monotonic() > until:
                raise ServerFailed(f"{count} tokens are not cached after {seconds:.0f} s", "Timeout")
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()  # end of input ends the server
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
