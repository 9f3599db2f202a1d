"""One token stream being served.

Invariant: a Sequence owns its kvq_sequence handle and releases it once; after that every call raises InvalidArgument.
One thread at a time uses a sequence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .errors import InvalidArgument

if TYPE_CHECKING:
    from .model import Model


@dataclasses.dataclass(frozen=True)
class ExtraKey:
    """What else identifies pages that overlap [first_token, first_token + tokens): adapter, image digest, salt."""

    first_token: int
    tokens: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    id: int
    committed_tokens: int
    reserved_tokens: int
    pages: int
    dense_pages: int
    quantized_pages: int
    lost_pages: int
    parked: bool


def token_array(tokens) -> np.ndarray:
    array = np.ascontiguousarray(tokens)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise InvalidArgument("token ids are integers from 0 to 2^32 - 1")
    return array.astype(np.uint32, copy=False).reshape(-1)


def extra_key_array(abi, keys):
    """A kvq_extra_key array and what keeps its bytes alive."""
    data = [abi.ffi.from_buffer(key.data) for key in keys]
    array = abi.ffi.new(
        "kvq_extra_key[]",
        [
            {"first_token": key.first_token, "tokens": key.tokens, "data": pointer, "data_bytes": len(key.data)}
            for key, pointer in zip(keys, data)
        ],
    )
    return array, data


class Sequence:
    def __init__(self, model: Model, handle, cached_tokens: int = 0):
        self._library, self._model, self._handle = model._library, model, handle
        self.cached_tokens = cached_tokens  # attached at opening, not computed
        self._table = None

    @property
    def handle(self):
        if self._handle is None:
            raise InvalidArgument("the sequence is released")
        return self._handle

    def _call(self, name: str, *arguments) -> None:
        self._table = None
        self._library.check(getattr(self._library.lib, name)(self.handle, *arguments))

    def reserve(self, tokens: int, deadline_ms: int = 0) -> None:
        """Room for `tokens` tokens past the committed ones."""
        self._call("kvq_reserve", tokens, deadline_ms)

    def commit(self, tokens, step: int = 0, step_session: int = 0) -> None:
        """Declares the next tokens final; their K and V were appended in `step` (0: in steps that have ended)."""
        array = token_array(tokens)
        self._call("kvq_commit", self._library.array("uint32_t", array), len(array), step, step_session)

    def truncate(self, tokens: int, deadline_ms: int = 0) -> None:
        self._call("kvq_truncate", tokens, deadline_ms)

    def drop_before(self, position: int) -> None:
        self._call("kvq_drop_before", position)

    def fork(self, deadline_ms: int = 0) -> Sequence:
        out = self._library.ffi.new("kvq_sequence**")
        self._call("kvq_fork", deadline_ms, out)
        return self._model._adopt(out[0])

    def park(self) -> None:
        self._call("kvq_park")

    def resume(self, deadline_ms: int = 0) -> None:
        self._call("kvq_resume", deadline_ms)

    def info(self) -> SequenceInfo:
        info = self._library.struct("kvq_sequence_info")
        self._library.check(self._library.lib.kvq_sequence_get_info(self.handle, info))
        return SequenceInfo(
            info.id,
            info.committed_tokens,
            info.reserved_tokens,
            info.pages,
            info.dense_pages,
            info.quantized_pages,
            info.lost_pages,
            bool(info.parked),
        )

    def block_table(self) -> np.ndarray:
        """Page ids, int32. Kept until the next call that may change them."""
        if self._table is None:
            count = self._library.ffi.new("size_t*")
            table = np.empty(self.info().pages, np.int32)
            self._library.check(
                self._library.lib.kvq_block_table(self.handle, self._library.array("int32_t", table), len(table), count)
            )
            self._table = table
        return self._table

    def slots(self, first: int, count: int) -> np.ndarray:
        """Slots of tokens [first, first + count), int64."""
        out = np.empty(count, np.int64)
        self._library.check(
            self._library.lib.kvq_slot_mapping(self.handle, first, count, self._library.array("int64_t", out))
        )
        return out

    def export(self) -> bytes:
        """Flat bytes for another process's data session (Model.import_sequence)."""
        abi, size = self._library, self._library.ffi.new("size_t*")
        abi.check(abi.lib.kvq_sequence_export(self.handle, abi.ffi.NULL, 0, size))
        out = abi.ffi.new("char[]", size[0])
        abi.check(abi.lib.kvq_sequence_export(self.handle, out, size[0], size))
        return bytes(abi.ffi.buffer(out, size[0]))

    def release(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._model._sequences.discard(self)
            self._library.check(self._library.lib.kvq_sequence_release(handle))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_) -> None:
        self.release()
