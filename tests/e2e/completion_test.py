#!/usr/bin/env python3
"""Shell completion and the man pages of kvqctl: both name every verb and option that the program has.

Invariant: the program's own --help is the list. bash completes for real; zsh and fish do where they are installed.
usage: completion_test.py KVQCTL
"""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

KVQCTL = sys.argv[1]


def said(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode:
        raise AssertionError(f"{command}: {done.stderr}")
    return done.stdout


def options_of(*verb):
    return sorted(set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", said(KVQCTL, *verb, "--help"), re.M)))


def verbs():
    return re.findall(r"^  ([\w-]+)  ", said(KVQCTL, "--help").split("Subcommands:")[1], re.M)


class Completion(unittest.TestCase):
    def bash(self, *words):
        script = f'source <({KVQCTL} completion bash)\nCOMP_WORDS=("$@")\nCOMP_CWORD=$(($# - 1))\n_kvqctl\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        return said("bash", "-c", script, "bash", "kvqctl", *words).split()

    def test_there_are_verbs_and_options(self):
        self.assertIn("status", verbs())
        self.assertIn("--watch", options_of("status"))
        self.assertGreater(len(verbs()), 10)

    def test_bash_completes_verbs_and_the_options_of_each(self):
        self.assertEqual([word for word in self.bash("") if not word.startswith("-")], verbs())
        self.assertEqual(self.bash("sta"), ["status"])
        for verb in verbs():
            self.assertEqual(sorted(self.bash(verb, "--")), sorted({*options_of(verb), "--socket"}), verb)
        self.assertEqual(self.bash("--socket", "/x", "status", "--wa"), ["--watch"])

    @unittest.skipUnless(shutil.which("fish"), "no fish here")
    def test_fish_completes_them_too(self):
        def fish(line):
            text = said("fish", "-c", f"{KVQCTL} completion fish | source; complete -C '{line}'")
            return [row.split("\t")[0] for row in text.splitlines()]

        self.assertEqual(sorted(fish("kvqctl ")), sorted(verbs()))
        for verb in verbs():
            self.assertEqual(sorted(fish(f"kvqctl {verb} --")), sorted({*options_of(verb), "--socket"}), verb)

    @unittest.skipUnless(shutil.which("zsh"), "no zsh here")
    def test_zsh_takes_the_script(self):
        said("zsh", "-n", "-c", said(KVQCTL, "completion", "zsh"))

    def test_zsh_has_every_name(self):
        script = said(KVQCTL, "completion", "zsh")
        for verb in verbs():
            options = re.search(rf"^ +{verb}\) words_of_verb=\((.*?)^ +\)$", script, re.M | re.S).group(1)
            self.assertEqual(sorted(re.findall(r"^ +'(--[\w-]+):", options, re.M)), sorted({*options_of(verb), "--socket"}), verb)


class Manual(unittest.TestCase):
    PAGES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "man"

    def test_the_page_has_every_verb_and_option(self):
        text = (self.PAGES / "kvqctl.1").read_text().replace("\\-", "-")
        for verb in verbs():
            section = re.search(rf"^\.SS {verb}\b(.*?)(?=^\.S[SH] )", text, re.M | re.S)
            self.assertTrue(section, f"no section of {verb}")
            for option in options_of(verb):
                self.assertIn(option, section.group(1) if option not in ("--help", "--json", "--socket") else text, verb)

    def test_the_page_is_set_without_a_warning(self):
        for page in sorted(self.PAGES.iterdir()):
            done = subprocess.run(["man", "--warnings", "-l", str(page)], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""), page.name)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
