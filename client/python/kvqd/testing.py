"""For tests of programs that use kvq: a private daemon, also one that can be killed and comes back.

Invariant: everything a local daemon makes (socket, configuration, log) is in one temporary directory that leaves with
it, and it never outlives the block that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

_CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


def find_program(name: str) -> pathlib.Path:
    """kvqd, kvqctl or kvq-hold: $KVQ_BIN_DIR, then a release build of this checkout, then PATH."""
    for directory in filter(None, (os.environ.get("KVQ_BIN_DIR"), _CHECKOUT / "build/release")):
        if (path := pathlib.Path(directory) / name).exists():
            return path
    if found := shutil.which(name):
        return pathlib.Path(found)
    raise FileNotFoundError(
        f"{name} is neither in KVQ_BIN_DIR nor in {_CHECKOUT / 'build/release'} nor on PATH: build the release preset"
    )


@dataclasses.dataclass
class LocalDaemon:
    process: subprocess.Popen  # of kvq-hold when it is held, else of kvqd
    directory: pathlib.Path
    socket: pathlib.Path
    held: bool = False

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def control(self, *arguments: str):
        """Runs kvqctl on this daemon and returns what it says as JSON."""
        command = [find_program("kvqctl"), "--socket", self.socket, *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"kvqctl {' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
        return json.loads(done.stdout)

    @property
    def pid(self) -> int:
        """Of kvqd. While a held one is away this waits for the next."""
        return self.control("status")["pid"] if self.held else self.process.pid

    def kill(self) -> float:
        """SIGKILL to kvqd alone; a held one is started again by its holder. Returns when it was sent (monotonic)."""
        victim = self.pid
        sent = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return sent

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=20)


def _toml(value) -> str:
    return json.dumps(value)  # texts, numbers and booleans are written alike in both


def _command(directory: pathlib.Path, socket: str, held: bool, restart_ms: int) -> list:
    command = [find_program("kvqd"), "--config", directory / "kvqd.toml"]
    if not held:
        return command
    return [find_program("kvq-hold"), "--socket", socket, "--restart-ms", str(restart_ms), "--", *command]


@contextlib.contextmanager
def local_daemon(
    *, start_seconds: float = 20, held: bool = False, restart_ms: int = 200, **settings
) -> Iterator[LocalDaemon]:
    """A kvqd of its own, with `settings` as in its configuration file: local_daemon(arena_bytes="64MiB"). A `held` one
    runs under kvq-hold, which starts it again `restart_ms` after its death: it takes over what the dead one had."""
    settings = {"arena_bytes": "256MiB", "slab_bytes": "8MiB", "max_pages": 65536, **settings}
    with tempfile.TemporaryDirectory(prefix="kvqd-") as name:
        directory = pathlib.Path(name)
        settings.setdefault("socket", str(directory / "kvqd.sock"))
        (directory / "kvqd.toml").write_text("".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()))
        with open(directory / "log", "wb") as log:
            command = _command(directory, settings["socket"], held, restart_ms)
            process = subprocess.Popen(command, stdout=log, stderr=log)
        daemon = LocalDaemon(process, directory, pathlib.Path(settings["socket"]), held)
        try:
            until = time.monotonic() + start_seconds
            # The holder's socket is there before anybody serves it.
            while not ("kvq-hold: ready" in daemon.log if held else daemon.socket.exists()):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"kvqd did not start: {daemon.log.strip()}")
                time.sleep(0.01)
            yield daemon
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
