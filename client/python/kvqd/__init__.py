"""kvqd: the Python side of kvq, a memory manager for the KV cache of language models.

Invariant: importing this package loads no library, starts no thread (numpy's own pool included) and touches no
daemon. Each name is imported by its first use, so that a process may import, fork, and connect in its children.
"""

from __future__ import annotations

import importlib

PAGE_TOKENS = 64

_HOME = {
    "client": ["Client"],
    "model": ["Model", "Step"],
    "values": ["Fault", "Layer", "Lookup", "ModelInfo", "Pressure", "PressureLevel", "Role"],
    "sequence": ["ExtraKey", "Sequence", "SequenceInfo"],
    "errors": [
        "ContextLost",
        "DaemonGone",
        "Draining",
        "Forked",
        "InvalidArgument",
        "KvqError",
        "LibraryNotFound",
        "LimitReached",
        "LostPage",
        "NoDaemon",
        "NoMemory",
        "OverQuota",
        "PermissionDenied",
        "StaleId",
        "SystemFailure",
        "VersionMismatch",
        "WrongLayout",
    ],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["PAGE_TOKENS", "version", *sorted(_MODULE)]


def version() -> str:
    """Version of the loaded libkvq; the package has the same."""
    from ._abi import library

    return library().version


def __getattr__(name: str):
    if name not in _MODULE:
        raise AttributeError(f"module 'kvqd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
