"""Loads libkvq and turns kvq.h into callable functions.

Invariant: kvq.h is the only declaration of the C interface; nothing here repeats a struct or a number of it. The
header and the library come from the same place, so that they always match.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re

from .errors import BY_STATUS, KvqError, LibraryNotFound, VersionMismatch

_PACKAGE = pathlib.Path(__file__).resolve().parent
_INSTALLED = pathlib.Path("libkvq.so.1")  # no path: the dynamic linker finds it


def _locations():
    """(header, library) pairs to try: $KVQ_LIBRARY, the wheel's own, a release build of this file's checkout, the system's."""
    native, checkout = _PACKAGE / "_native", _PACKAGE.parents[2]
    header = native / "kvq.h" if (native / "kvq.h").exists() else checkout / "include/kvq/kvq.h"
    if path := os.environ.get("KVQ_LIBRARY"):
        yield header, pathlib.Path(path)
        return
    yield native / "kvq.h", native / "libkvq.so"
    yield checkout / "include/kvq/kvq.h", checkout / "build/release/libkvq.so"
    yield native / "kvq.h", _INSTALLED


def declarations(header: str) -> tuple[str, dict[str, int]]:
    """What cffi can parse of kvq.h, and its integer macros."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    text = re.sub(r"#if defined\(__cplusplus\).*?#endif", "", text, flags=re.S)
    macros = {
        name: int(value, 0)
        for name, value in re.findall(r"^#define\s+(KVQ_\w+)\s+\(?(-?(?:0x)?[0-9a-fA-F]+)\)?\s*$", text, flags=re.M)
    }
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    return re.sub(r"\bKVQ_API\b", "", text), macros


class Library:
    """libkvq, loaded once per process."""

    def __init__(self, header: pathlib.Path, path: pathlib.Path):
        import cffi

        text, self.macros = declarations(header.read_text())
        self.ffi = cffi.FFI()
        self.ffi.cdef(text)
        try:
            self.lib = self.ffi.dlopen(str(path))
        except OSError as error:
            raise LibraryNotFound(f"cannot load {path}: {error}") from None
        found, expected = self.lib.kvq_abi_version(), self.macros["KVQ_ABI_VERSION"]
        if found != expected:
            raise VersionMismatch(f"{path} has ABI version {found}, {header} describes {expected}: reinstall kvqd")
        self.version = self.ffi.string(self.lib.kvq_version()).decode()

    def check(self, status: int) -> None:
        """Raises the exception of a status that is not KVQ_OK."""
        if status:
            message = self.ffi.string(self.lib.kvq_last_error()).decode(errors="replace")
            name = self.ffi.string(self.lib.kvq_status_name(status)).decode()
            raise BY_STATUS.get(status, KvqError)(message or name)

    def struct(self, name: str, **fields):
        """A zeroed struct whose `size` is set, as every sized struct of kvq.h wants it."""
        value = self.ffi.new(f"{name}*", fields)
        value.size = self.ffi.sizeof(name)
        return value

    def text(self, pointer) -> str:
        return self.ffi.string(pointer).decode(errors="replace") if pointer else ""

    def array(self, ctype: str, values):
        """Pointer to a numpy array's elements; the caller keeps the array alive during the call."""
        return self.ffi.cast(f"{ctype}*", values.ctypes.data) if values is not None and values.size else self.ffi.NULL


@functools.cache
def library() -> Library:
    tried = []
    for header, path in _locations():
        if header.exists() and (path.exists() or path == _INSTALLED):
            return Library(header, path)
        tried.append(str(path))
    raise LibraryNotFound(
        f"libkvq.so not found (looked at {', '.join(tried)}): install the kvqd wheel, build the release "
        "preset, or set KVQ_LIBRARY"
    )
