"""The connection to kvqd.

Invariant: a Client owns its kvq_client handle; closing it closes its models first, and closing twice is harmless. A
process forked from the one that connected gets kvqd.Forked from every call and may connect anew.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

from ._abi import library
from .errors import Forked, InvalidArgument
from .model import Model
from .values import Layer, Role


class Client:
    """Connects to the daemon at `socket` (default: $KVQ_SOCKET, else /run/kvq/kvqd.sock)."""

    def __init__(self, socket: str | os.PathLike | None = None, *, label: str | None = None, deadline_ms: int = 0):
        self._library = abi = library()
        self._handle = None
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        path = abi.ffi.new("char[]", os.fsencode(socket)) if socket is not None else abi.ffi.NULL
        name = abi.ffi.new("char[]", label.encode()) if label is not None else abi.ffi.NULL
        options = abi.struct("kvq_connect_options", socket_path=path, label=name, deadline_ms=deadline_ms)
        out = abi.ffi.new("kvq_client**")
        abi.check(abi.lib.kvq_connect(options, out))
        self._handle = out[0]

    def register(
        self,
        layers: Iterable[Layer],
        fingerprint: bytes,
        *,
        role: Role = Role.BOTH,
        format_floor_dense: bool = False,
        credits: int = 0,
        deadline_ms: int = 0,
        device: str | None = None,
    ) -> Model:
        """Opens a session for one model. `fingerprint` is 32 bytes that no other weights have. `device`: the UUID of a
        GPU or "host", where it must be that one; None: where kvqd has its pages (ModelInfo.device)."""
        if self._handle is None:
            raise InvalidArgument("the client is closed")
        model = Model(
            self, self._handle, tuple(layers), fingerprint, role, format_floor_dense, credits, deadline_ms, device
        )
        self._models.add(model)
        return model

    def close(self) -> None:
        if self._handle is None:
            return
        for model in list(self._models):
            model.close()
        handle, self._handle = self._handle, None
        self._library.check(self._library.lib.kvq_disconnect(handle))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        try:
            self.close()
        except Forked:  # the parent's connection is not this process's to end
            pass
