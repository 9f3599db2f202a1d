#!/usr/bin/env python3
"""How much of the machine kvqd's unit leaves open, as systemd counts it (0: nothing, 10: everything), alone and with each drop-in.

Invariant: the figures here are those of docs/operations.md, and each hardening line of the unit stands under a reason.
usage: exposure_test.py SYSTEMD_ANALYZE
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
UNITS = ROOT / "systemd"
MOST = {"none": 0.8, "gpu": 1.0, "metrics": 1.5}  # of kvqd.service by drop-in; versions of systemd differ by a tenth
SLACK = 0.1


def exposure(drop_in):
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder) / "kvqd.service"
        shutil.copy(UNITS / "kvqd.service", unit)
        if drop_in != "none":
            (unit.parent / "kvqd.service.d").mkdir()
            shutil.copy(UNITS / f"kvqd-{drop_in}.conf", unit.parent / "kvqd.service.d" / "x.conf")
        done = subprocess.run([sys.argv[1], "security", "--offline=yes", "--no-pager", unit], capture_output=True, text=True)
        return float(re.search(r"exposure level for kvqd.service: ([\d.]+)", done.stdout).group(1))


class Exposure(unittest.TestCase):
    def test_it_is_as_low_as_the_docs_say(self):
        docs = (ROOT / "docs/operations.md").read_text()
        for drop_in, most in MOST.items():
            found = exposure(drop_in)
            self.assertLessEqual(found, most + SLACK, drop_in)
            self.assertGreater(found, most - 3 * SLACK, f"{drop_in}: better than the docs say; lower it there and here")
            self.assertRegex(docs, rf"\| [^|]*{drop_in}[^|]* \| {most} \|")

    def test_each_line_of_the_service_has_a_reason(self):
        for file in ("kvqd.service", "kvqd-gpu.conf", "kvqd-metrics.conf"):
            paragraph_has_reason = False
            for line in (UNITS / file).read_text().split("[Service]")[1].split("[Install]")[0].splitlines():
                paragraph_has_reason = line.startswith("#") or (paragraph_has_reason and line != "")
                self.assertTrue(line == "" or paragraph_has_reason, f"{file}: {line}: say why, above it")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
