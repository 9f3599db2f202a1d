#!/usr/bin/env python3
"""Each verb's --json against a kvqd at work: every key of every document is in docs/kvqctl.md, and the lists are not empty.

Invariant: the documents are those of the programs as built; only keys that are names of something (a tenant's, a log line's word) are
left out.
usage: documents_test.py KVQD KVQCTL KVQ_LOAD
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

KVQD, KVQCTL, LOAD = sys.argv[1:4]
TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "kvqctl.md").read_text()
TOLD = {word for span in re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", TEXT, flags=re.S)) for word in re.findall(r"\w+", span)}
PATIENCE_S = 60
NAMES = {"fields"}  # of an event: the words of its line

CONFIG = """
arena_bytes = "16MiB"
slab_bytes = "1MiB"
max_pages = 4096
quantize_at = 0.4
"""


def keys_of(document):
    if isinstance(document, list):
        return {key for entry in document for key in keys_of(entry)}
    if not isinstance(document, dict):
        return set()
    return set(document) | {key for name, value in document.items() if name not in NAMES for key in keys_of(value)}


class Documents(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="kvq-documents-")
        folder = pathlib.Path(cls.directory.name)
        cls.socket = str(folder / "kvqd.sock")
        (folder / "kvqd.toml").write_text(CONFIG)
        command = [KVQD, "--socket", cls.socket, "--config", str(folder / "kvqd.toml")]
        cls.daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        cls.load = subprocess.Popen([LOAD, cls.socket, "1", "200"], stdin=subprocess.PIPE)
        cls.wait_until(lambda: cls.ask("sequences")["total"] > 2 and cls.ask("prefix")["tenants"][0]["hit_tokens"] > 0)

    @classmethod
    def tearDownClass(cls):
        cls.load.stdin.close()
        cls.load.wait()
        cls.daemon.terminate()
        cls.daemon.wait()
        cls.directory.cleanup()

    @classmethod
    def wait_until(cls, holds):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                if holds():
                    return
            except (AssertionError, IndexError):
                pass  # no kvqd yet, or no session
            time.sleep(0.1)
        raise AssertionError("it never came true")

    @classmethod
    def ask(cls, *words, codes=(0,)):
        done = subprocess.run([KVQCTL, "--socket", cls.socket, *words, "--json"], capture_output=True, text=True)
        if done.returncode not in codes:
            raise AssertionError(f"{words}: {done.returncode} {done.stderr}")
        return json.loads(done.stdout)

    def expect_documented(self, document, *, empty=()):
        for key, value in document.items():
            if isinstance(value, list) and key not in empty:
                self.assertTrue(value, f"{key} is empty, so its entries cannot be compared")
        missing = sorted(keys_of(document) - TOLD)
        self.assertEqual(missing, [], "not in docs/kvqctl.md")

    def test_lists(self):
        for verb in ("sessions", "tenants", "pages", "sequences", "prefix"):
            with self.subTest(verb):
                self.expect_documented(self.ask(verb))

    def test_status(self):
        self.expect_documented(self.ask("status"), empty=("not_served",))

    def test_changes(self):
        session = self.ask("sessions")["sessions"][0]["id"]
        for words in (["quantize"], ["quantize", "--dry-run"], ["set", "quantize_at", "0.41", "--save"], ["set", "quota.uid-0", "8MiB", "--dry-run"],
                      ["evict-session", str(session), "--dry-run"], ["drain", "--dry-run"], ["verify"]):
            with self.subTest(" ".join(words)):
                words = [word.replace("uid-0", self.ask("tenants")["tenants"][0]["name"]) for word in words]
                self.expect_documented(self.ask(*words))

    def test_doctor(self):
        self.expect_documented(self.ask("doctor", codes=(0, 5)))

    def test_events(self):
        done = subprocess.run([KVQCTL, "--socket", self.socket, "events", "--json"], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            self.expect_documented(json.loads(line))

    def test_bench(self):
        with tempfile.TemporaryDirectory(prefix="kvq-documents-") as folder:  # the load above leaves it no room
            socket = f"{folder}/kvqd.sock"
            daemon = subprocess.Popen([KVQD, "--socket", socket, "--arena-bytes", "16MiB", "--slab-bytes", "1MiB", "--max-pages", "4096"], stderr=subprocess.DEVNULL)
            bench = lambda: subprocess.run([KVQCTL, "--socket", socket, "bench", "--seconds", "0.5", "--json"], capture_output=True, text=True)
            while (done := bench()).returncode == 3 and daemon.poll() is None:
                time.sleep(0.05)
            daemon.terminate()
            daemon.wait()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_documented({**json.loads(done.stdout), "skipped": [{"name": "attach", "why": ""}]})

    def test_every_verb_has_its_document(self):
        text = subprocess.run([KVQCTL, "--help"], capture_output=True, text=True, check=True).stdout
        for verb in re.findall(r"^  ([\w-]+)  ", text.split("Subcommands:")[1], re.M):
            options = subprocess.run([KVQCTL, verb, "--help"], capture_output=True, text=True, check=True).stdout
            self.assertEqual("--json" in options, verb not in ("top", "completion"), verb)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
