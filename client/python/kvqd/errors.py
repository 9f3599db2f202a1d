"""Typed exceptions: one class per kvq_status.

Invariant: every failure of the C ABI that a caller can act on is its own class under KvqError, with the numeric
`status` and the library's one-line message.
"""

from __future__ import annotations


class KvqError(Exception):
    status = -1


class InvalidArgument(KvqError, ValueError):
    status = 1


class NoDaemon(KvqError, ConnectionError):
    status = 2


class VersionMismatch(KvqError):
    status = 3


class WrongLayout(KvqError):
    status = 4


class OverQuota(KvqError):
    status = 5


class NoMemory(KvqError, MemoryError):
    status = 6


class StaleId(KvqError):
    status = 7


class LostPage(KvqError):
    status = 8


class PermissionDenied(KvqError, PermissionError):
    status = 9


class LimitReached(KvqError):
    status = 10


class DaemonGone(KvqError, ConnectionError):
    """kvqd is restarting and was not back before the call's deadline (call again later), or it started anew and the
    session is lost (close the model and register again): the message says which."""

    status = 11


class Forked(KvqError):
    status = 12


class SystemFailure(KvqError, OSError):
    status = 13


class Draining(KvqError):
    status = 14


class ContextLost(KvqError):
    """The process's GPU context is gone for good, by a fault or a reset: start the process anew and open the sequences
    again; their sealed pages are attached."""

    status = 15


class LibraryNotFound(KvqError, ImportError):
    """libkvq.so or kvq.h is neither in the package nor in a build beside it."""


BY_STATUS = {
    kind.status: kind
    for kind in (
        InvalidArgument,
        NoDaemon,
        VersionMismatch,
        WrongLayout,
        OverQuota,
        NoMemory,
        StaleId,
        LostPage,
        PermissionDenied,
        LimitReached,
        DaemonGone,
        Forked,
        SystemFailure,
        Draining,
        ContextLost,
    )
}
