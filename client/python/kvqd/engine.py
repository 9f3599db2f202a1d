"""Advances everything a model server is doing, one forward pass at a time.

Invariant: one pass takes one token of every stream and at most one chunk of the oldest feed, so prefilling never
stops the streams. What fails in a pass fails alone: the feed first, and only a pass without a feed ends the streams.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from .errors import KvqError
from .model import Model
from .models.kvq_cache import KvqBatch, KvqSequence
from .models.llama import Llama

CHUNK_TOKENS = 256  # of a feed that runs alone; larger ones gain no speed and hold their step open for longer
SHARED_CHUNK_TOKENS = 64  # of a feed beside streams, which wait for it


@dataclasses.dataclass(eq=False)
class Feed:
    """Tokens to compute into a sequence."""

    sequence: KvqSequence
    tokens: list[int]
    on_done: Callable[[int], None]  # gets the most likely next token
    on_error: Callable[[Exception], None]
    on_chunk: Callable[[int, np.ndarray], None] | None = (
        None  # gets the first token's place in `tokens`, and all logits
    )
    done: int = 0


@dataclasses.dataclass(eq=False)
class Stream:
    """A sequence that generates greedily."""

    sequence: KvqSequence
    next_token: int
    on_token: Callable[[int], bool]  # gets each token once it is computed in; False ends the stream
    on_error: Callable[[Exception], None]


class Engine:
    def __init__(self, llama: Llama, model: Model, *, threads: int, deadline_ms: int, forward: Callable | None = None):
        """`forward`: computes (sequence, tokens) parts into final hidden states, elsewhere than in numpy."""
        self.llama, self.model, self._threads, self._deadline_ms = llama, model, threads, deadline_ms
        self._forward = forward or self._in_numpy
        self.feeds: collections.deque[Feed] = collections.deque()
        self.streams: list[Stream] = []
        self.generated = 0  # tokens of streams so far
        self.slowest_pass_ms = 0.0  # since it was last set to 0

    @property
    def idle(self) -> bool:
        return not self.feeds and not self.streams

    def advance(self) -> None:
        """One forward pass over what there is to do."""
        streams, feed = list(self.streams), self.feeds[0] if self.feeds else None
        parts = [(stream.sequence, [stream.next_token]) for stream in streams]
        if feed:
            size = SHARED_CHUNK_TOKENS if streams else CHUNK_TOKENS
            parts.append((feed.sequence, feed.tokens[feed.done : feed.done + size]))
        began = time.monotonic()
        try:
            hidden = self._forward(parts)
        except Exception as error:  # no memory before the deadline, a lost page, a vanished daemon
            self._fail(feed, streams, error)
            return
        self.slowest_pass_ms = max(self.slowest_pass_ms, 1e3 * (time.monotonic() - began))
        if streams:
            self._advance_streams(streams, hidden[: len(streams)])
        if feed:
            self._advance_feed(feed, len(parts[-1][1]), hidden[len(streams) :])

    def _in_numpy(self, parts) -> np.ndarray:
        with KvqBatch(self.model, parts, deadline_ms=self._deadline_ms, threads=self._threads) as batch:
            return self.llama.hidden([token for _, tokens in parts for token in tokens], batch)

    def _advance_streams(self, streams: list[Stream], hidden: np.ndarray) -> None:
        for stream, logits in zip(streams, self.llama.logits(hidden)):
            computed, stream.next_token = stream.next_token, int(logits.argmax())
            self.generated += 1
            if not stream.on_token(computed):
                self.end(stream)

    def _advance_feed(self, feed: Feed, count: int, hidden: np.ndarray) -> None:
        at, feed.done = feed.done, feed.done + count
        last = feed.done == len(feed.tokens)
        if feed.on_chunk:
            logits = self.llama.logits(hidden)
            feed.on_chunk(at, logits)
        elif last:
            logits = self.llama.logits(hidden[-1:])
        if last:
            self.feeds.remove(feed)
            feed.on_done(int(logits[-1].argmax()))

    def _fail(self, feed: Feed | None, streams: list[Stream], error: Exception) -> None:
        if feed:
            self.feeds.remove(feed)
            self._release(feed.sequence)
            feed.on_error(error)
            return
        for stream in streams:
            self.end(stream)
            stream.on_error(error)

    def end(self, stream: Stream) -> None:
        self.streams.remove(stream)
        self._release(stream.sequence)

    def _release(self, sequence: KvqSequence) -> None:
        with contextlib.suppress(KvqError):  # the daemon may be gone, and then so is the sequence
            sequence.release()
