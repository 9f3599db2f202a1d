#!/usr/bin/env python3
"""What a model server is built against, as installed: found by CMake and by pkg-config, from C and from C++, and from wherever the
installed tree was moved to.

Invariant: the outside project sees the installed files alone. usage: package_test.py BUILD_FOLDER VERSION
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

OUTSIDE = pathlib.Path(__file__).resolve().parent / "package"


def run(*command, **more):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return done.stdout.strip()


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvq-package-")
        first = pathlib.Path(cls.folder.name) / "installed"
        for component in ("libkvq1", "libkvq-dev"):
            run("cmake", "--install", BUILD, "--component", component, "--prefix", first)
        cls.prefix = first.rename(pathlib.Path(cls.folder.name) / "moved")
        (cls.pc,) = cls.prefix.glob("**/pkgconfig/kvq.pc")
        cls.libraries = cls.pc.parent.parent

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def expect_runs(self, program):
        said = run(program, env=dict(os.environ, LD_LIBRARY_PATH=str(self.libraries)))
        self.assertEqual(said, f"{VERSION} no_daemon")

    def test_find_package(self):
        build = self.prefix / "by_cmake"
        run("cmake", "-S", OUTSIDE, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}")
        run("cmake", "--build", build)
        for name in ("server_c", "server_cc"):
            self.expect_runs(build / name)

    def test_pkg_config(self):
        environment = dict(os.environ, PKG_CONFIG_PATH=str(self.pc.parent))
        self.assertEqual(run("pkg-config", "--modversion", "kvq", env=environment), VERSION)
        flags = run("pkg-config", "--cflags", "--libs", "kvq", env=environment).split()
        for compiler, source in ((("cc", "-std=c99"), "server.c"), (("c++", "-std=c++20"), "server.cc")):
            program = self.prefix / f"by_pkg_config_{source.replace('.', '_')}"
            run(*compiler, "-Wall", "-Werror", "-pedantic", OUTSIDE / source, "-o", program, *flags)
            self.expect_runs(program)

    def test_a_later_release_is_refused_by_its_number(self):
        project = self.prefix / "later"
        project.mkdir()
        (project / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(later C)\nfind_package(kvq 99 REQUIRED)\n")
        done = subprocess.run(["cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}"], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(VERSION, done.stderr)


if __name__ == "__main__":
    BUILD, VERSION = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
