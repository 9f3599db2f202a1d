"""For tests of programs that use kvq: a private daemon.

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
import subprocess
import tempfile
import time
from collections.abc import Iterator

_CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


def find_program(name: str) -> pathlib.Path:
    """kvqd or kvqctl: $KVQ_BIN_DIR, then a release build of this checkout, then PATH."""
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
    process: subprocess.Popen
    directory: pathlib.Path
    socket: pathlib.Path

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

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=20)


def _toml(value) -> str:
    return json.dumps(value)  # texts, numbers and booleans are written alike in both


@contextlib.contextmanager
def local_daemon(*, start_seconds: float = 20, **settings) -> Iterator[LocalDaemon]:
    """A kvqd of its own, with `settings` as in its configuration file: local_daemon(arena_bytes="64MiB")."""
    settings = {"arena_bytes": "256MiB", "slab_bytes": "8MiB", "max_pages": 65536, **settings}
    with tempfile.TemporaryDirectory(prefix="kvqd-") as name:
        directory = pathlib.Path(name)
        settings.setdefault("socket", str(directory / "kvqd.sock"))
        (directory / "kvqd.toml").write_text("".join(f"{key} = {_toml(value)}\n" for key, value in settings.items()))
        with open(directory / "log", "wb") as log:
            process = subprocess.Popen(
                [find_program("kvqd"), "--config", directory / "kvqd.toml"], stdout=log, stderr=log
            )
        daemon = LocalDaemon(process, directory, pathlib.Path(settings["socket"]))
        try:
            until = time.monotonic() + start_seconds
            while not daemon.socket.exists():
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
