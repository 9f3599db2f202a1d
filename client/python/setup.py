"""Marks the wheel as native and takes its version from the library that it carries (tools/wheel puts it into kvqd/_native)."""

import ctypes
import pathlib
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARY = pathlib.Path(__file__).parent / "kvqd/_native/libkvq.so"


class NativeDistribution(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython3Wheel(bdist_wheel):
    """The library speaks C, so one wheel serves every Python 3 of the platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if not LIBRARY.exists():
    sys.exit(f"{LIBRARY} is missing: build the wheel with tools/wheel")
library = ctypes.CDLL(str(LIBRARY.resolve()))
library.kvq_version.restype = ctypes.c_char_p
setup(version=library.kvq_version().decode(), distclass=NativeDistribution, cmdclass={"bdist_wheel": AnyPython3Wheel})
