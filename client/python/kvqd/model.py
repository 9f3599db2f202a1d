"""A registered model: one session of the daemon, with its steps, append and attend.

Invariant: a Model owns its kvq_model handle and knows the sequences open in it; closing it releases them first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._arrays import BatchArrays, ScoreOptions, append_args, attend_args
from ._tensors import Gpu, as_numpy, empty_like, gpu_append_args, gpu_attend_args
from .errors import InvalidArgument
from .sequence import Sequence, extra_key_array, token_array
from .values import Fault, Layer, Lookup, ModelInfo, Pressure, PressureLevel, Role

if TYPE_CHECKING:
    from .client import Client


class Step:
    """One forward pass; `serial` names it in Sequence.commit. Leaving the block ends it, whatever happened inside: on a GPU
    behind what was launched on `stream` (torch's current one, unless given), without waiting for it."""

    def __init__(self, model: Model, stream=None):
        self._model, self._stream, self.serial = model, stream, 0

    def __enter__(self) -> Step:
        abi = self._model._library
        out = abi.ffi.new("uint64_t*")
        abi.check(abi.lib.kvq_step_begin(self._model.handle, out))
        self.serial = out[0]
        return self

    def __exit__(self, *_) -> None:
        abi = self._model._library
        abi.check(abi.lib.kvq_step_end(self._model.handle, self.serial, self._model._stream(self._stream)))


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
        device: str | None = None,
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
        device_name = abi.ffi.new("char[]", device.encode()) if device is not None else abi.ffi.NULL
        desc = abi.struct(
            "kvq_model_desc",
            device=device_name,
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
        info = self.info()
        self._gpu = Gpu(info.device_uuid) if info.device == "cuda" and role != Role.CONTROL else None

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

    def set_aliases(self, aliases: dict[int, int], *, stream=None) -> None:
        """On a GPU a set waits for the steps that run there, unless it is given a `stream` in whose order it happens."""
        abi = self._library
        array = abi.ffi.new("kvq_alias[]", [{"alias": a, "page": p} for a, p in aliases.items()])
        if stream is None:
            abi.check(abi.lib.kvq_set_aliases(self.handle, array, len(aliases)))
        else:
            abi.check(abi.lib.kvq_set_aliases_on(self.handle, array, len(aliases), self._stream(stream)))

    # --- the forward pass

    def _stream(self, stream):
        if self._gpu is None:
            return self._library.ffi.NULL
        return self._library.ffi.cast("void*", self._gpu.stream(stream))

    def step(self, stream=None) -> Step:
        return Step(self, stream)

    def append(self, layer: int, k, v, slots, *, aliases: bool = False, stream=None) -> None:
        """Writes K and V (tokens, kv_heads, head_dim), in the layer's dtype, to `slots`. None: that one later.

        numpy arrays, or tensors (torch's, DLPack's) in the memory where the pages are; they are read in place. On a GPU
        all of them are GPU tensors, and the call is launched on `stream`: torch's current one, unless given.
        """
        if self._gpu is None:
            k, v, slots = (as_numpy(name, value) for name, value in (("k", k), ("v", v), ("slots", slots)))
            args, _alive = append_args(self._library, self.layers, layer, k, v, slots)
        else:
            args = gpu_append_args(self._library, self._gpu, self.layers, layer, k, v, slots)
            args.stream = self._stream(stream)
        args.slots_are_aliases = int(aliases)
        self._library.check(self._library.lib.kvq_append(self.handle, args))

    def attend(
        self,
        layer: int,
        q,
        block_table,
        seq_lengths,
        query_starts,
        *,
        out=None,
        lse=False,
        aliases: bool = False,
        threads: int = 0,
        workspace=None,
        max_query_tokens: int = 0,
        stream=None,
        **scores,
    ):
        """Causal attention of q (query tokens, query_heads, head_dim) over paged K/V.

        block_table (batch, pages) int32, seq_lengths (batch,) int32 with this step's tokens included, query_starts
        (batch + 1,) int32. scores: what ScoreOptions has. Returns out, in q's dtype and library unless given, or (out,
        natural log-sum-exp) with `lse`: True, or the tensor to fill. Tensors and `stream` are as in append; on a GPU
        their values are read when the kernel runs.
        """
        out = empty_like(q) if out is None else out
        sums = empty_like(q, "float32", 2) if lse is True else None if lse is False else lse
        options, batch = ScoreOptions(**scores), (block_table, seq_lengths, query_starts)
        if self._gpu is None:
            batch = BatchArrays(*(as_numpy("a table", value) for value in batch))
            arrays = (as_numpy(name, value) for name, value in (("q", q), ("out", out), ("lse", sums)))
            args, _alive = attend_args(self._library, self.layers, layer, *arrays, batch, options)
        else:
            args = gpu_attend_args(
                self._library, self._gpu, self.layers, layer, q, out, sums, batch, options, workspace
            )
            args.stream, args.max_query_tokens = self._stream(stream), max_query_tokens
        args.table_has_aliases, args.threads = int(aliases), threads
        self._library.check(self._library.lib.kvq_attend(self.handle, args))
        return out if sums is None else (out, sums)

    # --- the GPU

    def workspace_bytes(self) -> int:
        """Bytes of device memory that attend needs when it is given a workspace; 0 on the host."""
        out = self._library.ffi.new("size_t*")
        self._library.check(self._library.lib.kvq_attend_workspace_bytes(self.handle, out))
        return out[0]

    def fault(self) -> Fault | None:
        """The first thing that a kernel could not do since the last question."""
        out = self._library.struct("kvq_fault")
        self._library.check(self._library.lib.kvq_get_fault(self.handle, out))
        return Fault(out.status, out.layer, out.index, out.page) if out.status else None

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
            self._library.text(out.device_uuid),
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
