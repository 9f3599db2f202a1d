"""The forward pass of a llama-architecture model in numpy, with its K/V behind the `Batch` interface.

Invariant: this file never stores a key or a value. It hands each layer's new ones to the batch and asks the batch to
attend; whether they live in numpy arrays or in kvq pages is the batch's business (numpy_cache.py, kvq_cache.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .gguf_file import Weights


class Batch(Protocol):
    """New tokens of one or more sequences in one forward pass, rows in sequence order."""

    positions: np.ndarray  # (rows,) int64: position of each row's token in its own sequence
    last_rows: np.ndarray  # (sequences,): the row of each sequence's last new token

    def append(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Stores K (after RoPE) and V of all rows; both (rows, kv_heads, head_dim) fp32."""

    def attend(self, layer: int, q: np.ndarray) -> np.ndarray:
        """Causal attention of all rows over their sequences; q and result (rows, heads, head_dim) fp32."""


def _rms_norm(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    scale = np.einsum("ij,ij->i", x, x) / x.shape[1]
    return x * (1.0 / np.sqrt(scale + epsilon))[:, None] * gain


def _silu_times(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp of a very negative gate: the quotient is then 0, as it should be
        return gate / (1.0 + np.exp(-gate)) * up


class Llama:
    """Weights and the maths over them. Immutable after construction; any thread may run it."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.config = c = weights.config
        frequency = c.rope_base ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
        angle = np.arange(c.context_tokens, dtype=np.float64)[:, None] * frequency
        self._cos = np.cos(angle).astype(np.float32)[:, None, :]
        self._sin = np.sin(angle).astype(np.float32)[:, None, :]

    def _rotate(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        half = self.config.head_dim // 2
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def hidden(self, tokens: np.ndarray, batch: Batch) -> np.ndarray:
        """Final hidden states (rows, hidden) of the batch's new tokens, after the last norm."""
        c, w, rows = self.config, self.weights, len(tokens)
        if rows and int(batch.positions.max()) >= c.context_tokens:
            raise ValueError(f"position {int(batch.positions.max())} is past the model's {c.context_tokens} tokens")
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        q_end, k_end = c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim
        x = w.embedding[np.asarray(tokens)]
        for index, layer in enumerate(w.layers):
            qkv = _rms_norm(x, layer.attention_norm, c.norm_epsilon) @ layer.qkv.T
            q = self._rotate(qkv[:, :q_end].reshape(rows, c.heads, c.head_dim), cos, sin)
            k = self._rotate(qkv[:, q_end:k_end].reshape(rows, c.kv_heads, c.head_dim), cos, sin)
            batch.append(index, k, qkv[:, k_end:].reshape(rows, c.kv_heads, c.head_dim))
            x = x + batch.attend(index, q).reshape(rows, -1) @ layer.output.T
            gate_up = _rms_norm(x, layer.feed_forward_norm, c.norm_epsilon) @ layer.gate_up.T
            x = x + _silu_times(gate_up[:, : c.feed_forward], gate_up[:, c.feed_forward :]) @ layer.down.T
        return _rms_norm(x, w.final_norm, c.norm_epsilon)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden @ self.weights.embedding.T

    def next_logits(self, tokens: np.ndarray, batch: Batch) -> np.ndarray:
        """(sequences, vocabulary): what each sequence of the batch predicts after its last new token."""
        return self.logits(self.hidden(tokens, batch)[batch.last_rows])


def log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Natural-log probability that each row of `logits` gives to its target."""
    top = logits.max(axis=1)
    total = np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return logits[np.arange(len(targets)), targets] - top - total
