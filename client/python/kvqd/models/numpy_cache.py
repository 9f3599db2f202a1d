"""K/V in plain numpy arrays: the reference that kvq's pages are compared with.

Invariant: with `rounding` float16 every stored key and value is exactly what a dense kvq page holds, so that any
difference between the two backends comes from the order of sums alone.
"""

from __future__ import annotations

import numpy as np

from .gguf_file import Config


class NumpySequence:
    """K and V of one sequence: per layer (kv_heads, capacity, head_dim) fp32, grown by doubling."""

    def __init__(self, config: Config, rounding=np.float32):
        self.config, self.rounding, self.length = config, rounding, 0
        self._k = self._v = np.empty((config.layers, config.kv_heads, 0, config.head_dim), np.float32)

    def reserve(self, tokens: int) -> None:
        if tokens <= self._k.shape[2]:
            return
        shape = (self.config.layers, self.config.kv_heads, max(tokens, 2 * self._k.shape[2], 64), self.config.head_dim)
        for name in ("_k", "_v"):
            grown = np.zeros(shape, np.float32)
            grown[:, :, : self.length] = getattr(self, name)[:, :, : self.length]
            setattr(self, name, grown)

    def write(self, layer: int, at: int, k: np.ndarray, v: np.ndarray) -> None:
        end = at + len(k)
        self._k[layer, :, at:end] = k.astype(self.rounding).swapaxes(0, 1)
        self._v[layer, :, at:end] = v.astype(self.rounding).swapaxes(0, 1)

    def attend(self, layer: int, at: int, q: np.ndarray) -> np.ndarray:
        c, rows, end = self.config, len(q), at + len(q)
        group = c.heads // c.kv_heads
        k, v = self._k[layer, :, :end], self._v[layer, :, :end]
        # (kv_heads, group * rows, head_dim): the query heads that share a K/V head go through one product.
        grouped = (
            q.reshape(rows, c.kv_heads, group, c.head_dim).transpose(1, 2, 0, 3).reshape(c.kv_heads, -1, c.head_dim)
        )
        score = np.matmul(grouped, k.swapaxes(1, 2)) * np.float32(c.head_dim**-0.5)
        if rows > 1:
            masked = np.arange(end)[None, :] > np.arange(at, end)[:, None]
            score.reshape(c.kv_heads, group, rows, end)[:, :, masked] = -np.inf
        score = np.exp(score - score.max(axis=-1, keepdims=True))
        score /= score.sum(axis=-1, keepdims=True)
        out = np.matmul(score, v).reshape(c.kv_heads, group, rows, c.head_dim)
        return out.transpose(2, 0, 1, 3).reshape(rows, c.heads, c.head_dim)


class NumpyBatch:
    """New tokens of some numpy sequences. Entering makes room, leaving makes the tokens part of the sequences."""

    def __init__(self, parts: list[tuple[NumpySequence, int]]):
        self._parts = parts
        counts = [count for _, count in parts]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.last_rows = self._starts[1:] - 1
        self.positions = np.concatenate([np.arange(s.length, s.length + n, dtype=np.int64) for s, n in parts])

    def __enter__(self) -> NumpyBatch:
        for sequence, count in self._parts:
            sequence.reserve(sequence.length + count)
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            for sequence, count in self._parts:
                sequence.length += count

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        for (sequence, _), start, end in zip(self._parts, self._starts, self._starts[1:]):
            sequence.write(layer, sequence.length, k[start:end], v[start:end])

    def attend(self, layer: int, q: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [
                sequence.attend(layer, sequence.length, q[start:end])
                for (sequence, _), start, end in zip(self._parts, self._starts, self._starts[1:])
            ]
        )
