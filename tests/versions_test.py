#!/usr/bin/env python3
"""The numbers of docs/versions.md are those of the sources, and kvq.h declares just what the symbol list has.

Invariant: the sources are read as text, so this needs no build. The built library is compared with the list by kvq_exports_test.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def found(path, pattern):
    (value,) = set(re.findall(pattern, (ROOT / path).read_text()))
    return value


class Versions(unittest.TestCase):
    def test_the_table_has_the_numbers_of_the_sources(self):
        abi = found("include/kvq/kvq.h", r"#define KVQ_ABI_VERSION (\d+)")
        self.assertEqual(found("CMakeLists.txt", r"set\(KVQ_SOVERSION (\d+)\)"), abi)
        self.assertEqual(found("client/exports.map", r"KVQ_(\d+) \{"), abi)
        numbers = {"release": found("CMakeLists.txt", r"project\(kvq VERSION ([\d.]+)"), "ABI": abi,
                   "contract": found("include/kvq/types.h", r"kContractVersion = (\d+)"),
                   "state": found("daemon/shm/table_file.h", r"kStateVersion = (\d+)")}
        table = (ROOT / "docs/versions.md").read_text()
        self.assertEqual(dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.M)), numbers)

    def test_the_symbol_list_is_that_of_the_header(self):
        declared = re.findall(r"\bKVQ_API\s[^;(]*?\b(kvq_\w+)\(", (ROOT / "include/kvq/kvq.h").read_text())
        self.assertGreater(len(declared), 30)
        listed = (ROOT / "tests/client/exports.txt").read_text().split()
        self.assertEqual(sorted(declared), listed)


if __name__ == "__main__":
    unittest.main(verbosity=2)
