#!/usr/bin/env python3
"""kvqctl top as an operator meets it: the real program in a terminal of 80x24, over a real kvqd with two loaded model servers.

usage: top_test.py KVQD KVQCTL KVQ_LOAD            the tests
       top_test.py KVQD KVQCTL KVQ_LOAD --capture  what the docs show: prints screens, tests nothing
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import terminal

KVQD, KVQCTL, KVQ_LOAD = sys.argv[1:4]
SETTINGS = ["--arena-bytes", "16MiB", "--slab-bytes", "256KiB", "--max-pages", "4096", "--quantize-at", "0.4", "--evict-at", "0.6",
            "--refuse-at", "0.9"]


class Node:
    """kvqd and its servers, in a folder of their own."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-top-")
        self.socket = os.path.join(self.folder.name, "kvqd.sock")
        self.children = []
        self.daemon = None

    def start(self):
        log = open(os.path.join(self.folder.name, "log"), "ab")
        self.daemon = subprocess.Popen([KVQD, "--socket", self.socket, *SETTINGS], stderr=log)
        while subprocess.run([KVQCTL, "--socket", self.socket, "status"], capture_output=True).returncode:
            if self.daemon.poll() is not None:
                raise AssertionError("kvqd ended: " + open(log.name).read())
        log.close()

    def load(self, stream, turns=20):
        self.children.append(subprocess.Popen([KVQ_LOAD, self.socket, str(stream), str(turns)], stdin=subprocess.PIPE,
                                              stderr=subprocess.DEVNULL))

    def kill(self):
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()

    def close(self):
        for child in [*self.children, self.daemon]:
            if child is not None:
                child.kill()
                child.communicate()
        self.folder.cleanup()

    def top(self, *options, columns=80, rows=24, **environment):
        return terminal.Terminal([KVQCTL, "--socket", self.socket, "top", "--interval", "0.25", *options], columns, rows, **environment)


def moving(lines):
    """Something is quantized, and pages are hit."""
    text = "\n".join(lines)
    return re.search(r"quantized [0-9.]*[1-9][0-9.]*/s \(", text) and re.search(r"hits [0-9.]*[1-9][0-9.]*/s", text)


class Top(unittest.TestCase):
    def setUp(self):
        self.node = Node()
        self.addCleanup(self.node.close)

    def open(self, *options, **more):
        top = self.node.top(*options, **more)
        self.addCleanup(top.close)
        return top

    def quit(self, top):
        top.type("q")
        self.assertEqual(top.end(), 0)
        self.assertEqual(terminal.termios.tcgetattr(top.fd), top.modes, "the terminal is not as it was")

    def test_an_operator_watches_two_servers_while_kvqd_is_killed_and_started_again(self):
        self.node.start()
        for stream in (1, 2):
            self.node.load(stream)
        top = self.open()
        top.see(moving)
        for text in ("2 sessions", "host ", "of 16.0 MiB", "# dense", "+ int4", "100 %|", "TENANT", f"uid-{os.getuid()}", "q quit"):
            top.see(text)
        top.see(lambda lines: any(re.search(r"\|.*\+", line) for line in lines[4:10]))  # a bar over time with quantized pages
        top.type("\t")
        top.see(lambda lines: sum("server" in line and "connected" in line for line in lines) == 2)
        top.type(f"/{self.node.children[0].pid}\n")
        top.see(lambda lines: sum("connected" in line for line in lines) == 1)
        top.type("\x1b")
        top.see(lambda lines: sum("connected" in line for line in lines) == 2)

        top.resize(132, 40)
        top.see(lambda lines: "LABEL" in "\n".join(lines) and any(len(line) > 100 for line in lines) and "q quit" in lines[39])
        top.resize(60, 14)
        top.see(lambda lines: "q quit" in lines[13])
        top.resize(30, 5)
        top.see("too small")
        top.resize(80, 24)
        top.see(lambda lines: "q quit" in lines[23] and "100 %|" in "\n".join(lines))

        self.node.kill()
        top.see("waiting for kvqd")
        top.see("server 1")  # the last look stays
        self.node.start()
        top.see("kvqd was restarted")
        top.see(f"pid {self.node.daemon.pid}")
        top.see(moving)
        self.quit(top)

    def test_pause_holds_the_picture(self):
        self.node.start()
        top = self.open()
        top.see("kvqd 0.")
        top.type("p")
        top.see("paused")
        top.settle()
        before = top.screen.lines()
        for _ in range(8):  # looks go on, at four a second
            top.read(0.25)
        self.assertEqual(top.screen.lines(), before)
        top.type("p")
        top.see(lambda lines: lines[0] != before[0])
        self.quit(top)

    def test_a_stopped_kvqd_is_waited_for_and_keys_are_answered(self):
        self.node.start()
        top = self.open()
        top.see("up ")
        self.node.daemon.send_signal(signal.SIGSTOP)
        top.see("waiting for kvqd")
        top.type("?")
        top.see("any key goes back")
        self.node.daemon.send_signal(signal.SIGCONT)
        top.type("x")
        top.see(lambda lines: lines[1] == "" and "TENANT" in "\n".join(lines))
        self.quit(top)

    def test_it_starts_before_kvqd_does(self):
        top = self.open()
        top.see("waiting for kvqd")
        self.node.start()
        top.see("TENANT")
        self.quit(top)

    def test_colours_are_used_only_where_they_are_wished(self):
        self.node.start()
        colours = set(range(31, 38))
        for options, environment, expected in [([], {}, True), (["--no-color"], {}, False), ([], {"NO_COLOR": "1"}, False),
                                               ([], {"TERM": "vt220"}, False)]:
            top = self.open(*options, **environment)
            top.see("CALM")
            self.quit(top)
            self.assertEqual(bool(colours & top.screen.styles), expected, (options, environment, top.screen.styles))

    def test_without_a_terminal_it_refuses_and_says_what_to_use(self):
        self.node.start()
        done = subprocess.run([KVQCTL, "--socket", self.node.socket, "top"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 2)
        self.assertIn("status --watch", done.stderr)
        self.assertEqual(done.stdout, "")
        for kind in ("dumb", "nonsense"):
            top = self.open(TERM=kind)
            self.assertEqual(top.end(), 2)
            self.assertIn("status --watch", " ".join(top.screen.lines()))

    def test_a_signal_gives_the_terminal_back(self):
        self.node.start()
        top = self.open()
        top.see("TENANT")
        os.kill(top.pid, signal.SIGTERM)
        self.assertEqual(top.end(), 0)
        self.assertEqual(terminal.termios.tcgetattr(top.fd), top.modes)


def capture():
    node = Node()
    try:
        node.start()
        for stream in (1, 2):
            node.load(stream, turns=12)
        top = node.top()
        top.see(moving)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            top.read(0.1)
        for keys in ("", "\t"):
            top.type(keys)
            top.see(lambda lines, head="SESSION" if keys else "TENANT": any(line.lstrip().startswith(head) for line in lines))
            top.settle()
            print("\n".join(top.screen.lines()) + "\n")
        top.close()
    finally:
        node.close()


if __name__ == "__main__":
    if "--capture" in sys.argv:
        capture()
    else:
        unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
