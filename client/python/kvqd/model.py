"""A registered model: one session of the daemon, with its steps, append and attend.

Invariant: a Model owns its kvq_model handle and knows the sequences open in it; closing it releases them first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._arrays import BatchArrays, ScoreOptions, append_args, attend_args
from .errors import InvalidArgument
from .sequence import Sequence, extra_key_array, token_array
from .values import Layer, Lookup, ModelInfo, Pressure, PressureLevel, Role

if TYPE_CHECKING:
    from .client import Client


class Step:
    """One forward pass; `serial` names it in Sequence.commit. Leaving the block ends it, whatever happened inside."""

    def __init__(self, model: Model):
        self._model, self.serial = model, 0

    def __enter__(self) -> Step:
        abi = self._model._library
        out = abi.ffi.new("uint64_t*")
        abi.check(abi.lib.kvq_step_begin(self._model.handle, out))
        self.serial = out[0]
        return self

    def __exit__(self, *_) -> None:
        abi = self._model._library
        abi.check(abi.lib.kvq_step_end(self._model.handle, self.serial, abi.ffi.NULL))


class Model:
    def __init__(
        self,
        client: Client,
        client_handle,
        layers: tuple[Layer, ...],
        fingerprint: bytes,
        role: Role,
        format_floor_dense: bool,
        credits: int,
        deadline_ms: int,
    ):
        self._library = abi = client._library
        self._client, self._handle, self.layers = client, None, layers
        self._sequences: set[Sequence] = set()
        if len(fingerprint) != 32:
            raise InvalidArgument(f"fingerprint has {len(fingerprint)} bytes, not 32")
        table = abi.ffi.new(
            "kvq_layer[]",
            [
                {
                    "kv_heads": layer.kv_heads,
                    "head_dim": layer.head_dim,
                    "dtype": int(layer.bf16),
                    "keep_dense": int(layer.keep_dense),
                    "query_heads": layer.query_heads,
                }
                for layer in layers
            ],
        )
        desc = abi.struct(
            "kvq_model_desc",
            layers=table,
            layer_count=len(layers),
            page_tokens=abi.macros["KVQ_PAGE_TOKENS"],
            fingerprint=list(fingerprint),
            role=int(role),
            format_floor_dense=int(format_floor_dense),
            credits=credits,
            deadline_ms=deadline_ms,
        )
        out = abi.ffi.new("kvq_model**")
        abi.check(abi.lib.kvq_register_model(client_handle, desc, out))
        self._handle = out[0]

    @property
    def handle(self):
        if self._handle is None:
            raise InvalidArgument("the model is closed")
        return self._handle

    def _adopt(self, handle, cached_tokens: int = 0) -> Sequence:
        sequence = Sequence(self, handle, cached_tokens)
        self._sequences.add(sequence)
        return sequence

    # --- what is cached, sequences

    def lookup(self, tokens, extra_keys=()) -> Lookup:
        """Longest cached prefix, from shared memory, without side effects."""
        abi, array = self._library, token_array(tokens)
        keys, _alive = extra_key_array(abi, extra_keys)
        out = abi.struct("kvq_lookup_result")
        abi.check(abi.lib.kvq_lookup(self.handle, abi.array("uint32_t", array), len(array), keys, len(keys), out))
        return Lookup(out.cached_tokens, out.dense_tokens, out.quantized_tokens, out.host_tokens, bool(out.pending))

    def open(self, tokens=(), *, extra_keys=(), private: bool = False, format_floor_dense: bool = False) -> Sequence:
        """A running sequence that starts with the longest cached prefix of `tokens` (see Sequence.cached_tokens)."""
        abi, array = self._library, token_array(tokens)
        keys, _alive = extra_key_array(abi, extra_keys)
        options = abi.struct(
            "kvq_open_options",
            extra_keys=keys,
            extra_key_count=len(keys),
            private_pages=int(private),
            format_floor_dense=int(format_floor_dense),
        )
        cached, out = abi.ffi.new("uint64_t*"), abi.ffi.new("kvq_sequence**")
        abi.check(
            abi.lib.kvq_sequence_open(self.handle, abi.array("uint32_t", array), len(array), options, cached, out)
        )
        return self._adopt(out[0], cached[0])

    def import_sequence(self, data: bytes) -> Sequence:
        out = self._library.ffi.new("kvq_sequence**")
        self._library.check(
            self._library.lib.kvq_sequence_import(self.handle, self._library.ffi.from_buffer(data), len(data), out)
        )
        return self._adopt(out[0])

    def reserve(self, sequences: list[Sequence], tokens: list[int], deadline_ms: int = 0) -> None:
        """Room for `tokens[i]` more tokens in each sequence; all or nothing."""
        abi = self._library
        for sequence in sequences:
            sequence._table = None
        handles = abi.ffi.new("kvq_sequence*[]", [sequence.handle for sequence in sequences])
        counts = np.asarray(tokens, np.uint64)
        if len(counts) != len(sequences):
            raise InvalidArgument(f"{len(sequences)} sequences but {len(counts)} token counts")
        abi.check(abi.lib.kvq_reserve_batch(handles, abi.array("uint64_t", counts), len(sequences), deadline_ms))

    # --- credits, pressure, loss

    def request_credits(self, pages: int, deadline_ms: int = 0) -> None:
        self._library.check(self._library.lib.kvq_credits_request(self.handle, pages, deadline_ms))

    def return_credits(self, pages: int) -> None:
        self._library.check(self._library.lib.kvq_credits_return(self.handle, pages))

    def pressure(self) -> Pressure:
        out = self._library.struct("kvq_pressure")
        self._library.check(self._library.lib.kvq_get_pressure(self.handle, out))
        return Pressure(
            PressureLevel(out.level),
            out.credits,
            out.credits_wanted_back,
            out.lost_pages,
            bool(out.draining),
            bool(out.reconnecting),
            out.reconnects,
        )

    def notice_fd(self) -> int:
        """An eventfd, owned by the model, readable when pressure() may say something new or kvqd goes or comes back."""
        out = self._library.ffi.new("int*")
        self._library.check(self._library.lib.kvq_notice_fd(self.handle, out))
        return out[0]

    def lost_pages(self, since: int = 0, capacity: int = 4096) -> tuple[list[tuple[int, int]], int]:
        """(page, sequence id) pairs lost after the count `since`, and the count to pass next time."""
        abi = self._library
        pages, sequences = np.empty(capacity, np.int32), np.empty(capacity, np.uint32)
        count, now = abi.ffi.new("size_t*"), abi.ffi.new("uint64_t*")
        abi.check(
            abi.lib.kvq_lost_pages(
                self.handle, since, abi.array("int32_t", pages), abi.array("uint32_t", sequences), capacity, count, now
            )
        )
        filled = min(count[0], capacity)
        return list(zip(pages[:filled].tolist(), sequences[:filled].tolist())), now[0]

    def set_aliases(self, aliases: dict[int, int]) -> None:
        array = self._library.ffi.new("kvq_alias[]", [{"alias": a, "page": p} for a, p in aliases.items()])
        self._library.check(self._library.lib.kvq_set_aliases(self.handle, array, len(aliases)))

    # --- the forward pass

    def step(self) -> Step:
        return Step(self)

    def append(
        self, layer: int, k: np.ndarray | None, v: np.ndarray | None, slots: np.ndarray, *, aliases: bool = False
    ) -> None:
        """Writes K and V (tokens, kv_heads, head_dim), in the layer's dtype, to `slots`. None: that one later."""
        args, _alive = append_args(self._library, self.layers, layer, k, v, slots)
        args.slots_are_aliases = int(aliases)
        self._library.check(self._library.lib.kvq_append(self.handle, args))

    def attend(
        self,
        layer: int,
        q: np.ndarray,
        block_table: np.ndarray,
        seq_lengths: np.ndarray,
        query_starts: np.ndarray,
        *,
        out: np.ndarray | None = None,
        lse: bool = False,
        aliases: bool = False,
        threads: int = 0,
        **scores,
    ):
        """Causal attention of q (query tokens, query_heads, head_dim) over paged K/V.

        block_table (batch, pages) int32, seq_lengths (batch,) int32 with this step's tokens included, query_starts
        (batch + 1,) int32. scores: what ScoreOptions has. Returns out, in q's dtype unless given, or (out, natural
        log-sum-exp) with `lse`.
        """
        batch = BatchArrays(block_table, seq_lengths, query_starts)
        out = np.empty(q.shape, q.dtype) if out is None else out
        sums = np.empty(q.shape[:2], np.float32) if lse else None
        options = ScoreOptions(**scores)
        args, _alive = attend_args(self._library, self.layers, layer, q, out, sums, batch, options)
        args.table_has_aliases, args.threads = int(aliases), threads
        self._library.check(self._library.lib.kvq_attend(self.handle, args))
        return (out, sums) if lse else out

    # --- end

    def info(self) -> ModelInfo:
        out = self._library.struct("kvq_model_info")
        self._library.check(self._library.lib.kvq_model_get_info(self.handle, out))
        return ModelInfo(
            out.session,
            out.tenant,
            self._library.text(out.tenant_name),
            out.arena_bytes,
            out.slab_bytes,
            out.dense_page_bytes,
            out.cold_page_bytes,
            out.cold_format,
            self._library.text(out.device),
        )

    def close(self) -> None:
        """Releases the sequences that are still open, then ends the session."""
        if self._handle is None:
            return
        for sequence in list(self._sequences):
            sequence.release()
        handle, self._handle = self._handle, None
        self._library.check(self._library.lib.kvq_model_close(handle))

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_) -> None:
        self.close()
