"""K/V in kvq pages: the same interface as numpy_cache.py, with libkvq doing the storing and the attention.

Invariant: no key or value outlives the call that brings it here, except in kvq pages. A KvqBatch is one kvq step: it
reserves room before it begins, and its tokens are committed only if the whole forward pass went through.
"""

from __future__ import annotations

import numpy as np

from ..client import Client
from ..model import Model
from ..sequence import Sequence
from ..values import Layer
from .gguf_file import Config


def register(client: Client, config: Config, fingerprint: bytes, **options) -> Model:
    """A session for a llama model whose K/V are kept as fp16."""
    layer = Layer(kv_heads=config.kv_heads, head_dim=config.head_dim, query_heads=config.heads)
    return client.register([layer] * config.layers, fingerprint, **options)


class KvqSequence:
    """A kvq sequence and the tokens in it."""

    def __init__(self, sequence: Sequence, tokens: list[int]):
        self.sequence, self.tokens = sequence, tokens

    @classmethod
    def open(cls, model: Model, prompt: list[int], **options) -> KvqSequence:
        """Starts with the longest cached prefix of `prompt`, never all of it: the last token's logits are wanted."""
        sequence = model.open(prompt[:-1], **options)
        return cls(sequence, list(prompt[: sequence.cached_tokens]))

    @property
    def length(self) -> int:
        return len(self.tokens)

    def fork(self, deadline_ms: int) -> KvqSequence:
        return KvqSequence(self.sequence.fork(deadline_ms), list(self.tokens))

    def release(self) -> None:
        self.sequence.release()


class KvqBatch:
    """New tokens of some sequences of one model: `with KvqBatch(model, [(sequence, tokens), ...]) as batch`."""

    def __init__(
        self, model: Model, parts: list[tuple[KvqSequence, list[int]]], *, deadline_ms: int = 0, threads: int = 1
    ):
        self._model, self._parts, self._threads, self._deadline_ms = model, parts, threads, deadline_ms
        counts = [len(tokens) for _, tokens in parts]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.last_rows = self.starts[1:] - 1
        self.positions = np.concatenate(
            [np.arange(s.length, s.length + n, dtype=np.int64) for (s, _), n in zip(parts, counts)]
        )
        self._lengths = np.array([s.length + n for (s, _), n in zip(parts, counts)], np.int32)

    def __enter__(self) -> KvqBatch:
        sequences = [part.sequence for part, _ in self._parts]
        self._model.reserve(sequences, [len(tokens) for _, tokens in self._parts], self._deadline_ms)
        self._step = self._model.step().__enter__()
        try:
            self._slots = np.concatenate(
                [part.sequence.slots(part.length, len(tokens)) for part, tokens in self._parts]
            )
            tables = [sequence.block_table() for sequence in sequences]
            self._table = np.zeros((len(tables), max(map(len, tables))), np.int32)
            for row, table in zip(self._table, tables):
                row[: len(table)] = table
        except BaseException:
            self._step.__exit__()
            raise
        return self

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        self._model.append(layer, k.astype(np.float16), v.astype(np.float16), self._slots)

    def attend(self, layer: int, q: np.ndarray) -> np.ndarray:
        return self._model.attend(layer, q, self._table, self._lengths, self.starts, threads=self._threads)

    def __exit__(self, kind, *_) -> None:
        self._step.__exit__()
        if kind is None:
            for part, tokens in self._parts:
                part.sequence.commit(tokens, self._step.serial)
                part.tokens.extend(tokens)
