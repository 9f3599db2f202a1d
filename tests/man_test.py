#!/usr/bin/env python3
"""The man pages of kvqd and kvq-hold have every option that the programs have, with no others, and are set without a warning.

Invariant: a program's own --help is the list. usage: man_test.py KVQD KVQ_HOLD
"""

import pathlib
import re
import subprocess
import sys
import unittest

PAGES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "man"
PROGRAMS = {"kvqd.8": sys.argv[1], "kvq-hold.8": sys.argv[2]}


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def options_of(program):
    return set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", said(program, "--help"), re.M))


def options_in(page):
    text = (PAGES / page).read_text().replace("\\-", "-")
    entries = re.findall(r"^\.TP\n(.*)$", text, re.M)
    return {name for entry in entries for name in re.findall(r"--[a-z][\w-]*", entry)}


class Manual(unittest.TestCase):
    def test_each_page_has_the_options_of_its_program(self):
        for page, program in PROGRAMS.items():
            options = options_of(program)
            self.assertGreater(len(options), 5)
            self.assertEqual(options_in(page), options, page)

    def test_each_exit_code_of_kvqd_is_told(self):
        header = (PAGES.parents[1] / "daemon/exit_code.h").read_text()
        codes = re.findall(r"^  \w+ = (\d+),", header, re.M)
        self.assertGreater(len(codes), 5)
        told = (PAGES / "kvqd.8").read_text().split(".SH EXIT STATUS")[1].split(".SH")[0]
        self.assertEqual(re.findall(r"^\.TP\n(\d+)$", told, re.M), codes)

    def test_each_page_is_set_without_a_warning(self):
        for page in PROGRAMS:
            done = subprocess.run(["man", "--warnings", "-l", PAGES / page], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""), page)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
