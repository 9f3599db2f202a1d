"""The forward pass of a llama-architecture model in torch, on a GPU or the CPU, with its K/V behind the `Batch` interface.

Invariant: as in llama.py, nothing here stores a key or a value, and nothing waits for the GPU: `hidden` may be captured into a
CUDA graph, and replayed with other numbers in the batch's tensors. The residual stream, the norms and RoPE are fp32; the weights
and what is multiplied with them are of one dtype.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from .gguf_file import Weights


class Batch(Protocol):
    """New tokens of one or more sequences in one forward pass, rows in sequence order; tensors on the model's device."""

    tokens: torch.Tensor  # (rows,) int64
    positions: torch.Tensor  # (rows,) int64: position of each row's token in its own sequence

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores K (after RoPE) and V of all rows; both (rows, kv_heads, head_dim)."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Causal attention of all rows over their sequences; q and result (rows, heads, head_dim)."""


class Llama:
    """Weights on one device and the maths over them. Immutable after construction."""

    def __init__(self, weights: Weights, device: torch.device | str, dtype: torch.dtype | None = None):
        self.config = c = weights.config
        self.device = torch.device(device)
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.float16)

        def matrix(array: np.ndarray) -> torch.Tensor:
            return torch.tensor(array).to(self.device, self.dtype)  # a copy: the file's pages are not writable

        def vector(array: np.ndarray) -> torch.Tensor:
            return torch.tensor(array).to(self.device)

        self._embedding, self._final_norm = matrix(weights.embedding), vector(weights.final_norm)
        self._layers = [
            (
                vector(layer.attention_norm),
                matrix(layer.qkv),
                matrix(layer.output),
                vector(layer.feed_forward_norm),
                matrix(layer.gate_up),
                matrix(layer.down),
            )
            for layer in weights.layers
        ]
        frequency = c.rope_base ** (-np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
        angle = np.arange(c.context_tokens, dtype=np.float64)[:, None] * frequency
        self._cos = vector(np.cos(angle).astype(np.float32)[:, None, :])
        self._sin = vector(np.sin(angle).astype(np.float32)[:, None, :])

    def _norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + self.config.norm_epsilon)
        return (x * scale * gain).to(self.dtype)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = self.config.head_dim // 2
        low, high = x[..., :half].float(), x[..., half:].float()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(self.dtype)

    @torch.no_grad()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """Final hidden states (rows, hidden) of the batch's new tokens, after the last norm."""
        c, rows = self.config, len(batch.tokens)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        q_end, k_end = c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim
        x = self._embedding[batch.tokens].float()
        for index, (attention_norm, qkv, output, feed_forward_norm, gate_up, down) in enumerate(self._layers):
            row = self._norm(x, attention_norm) @ qkv.T
            q = self._rotate(row[:, :q_end].view(rows, c.heads, c.head_dim), cos, sin)
            k = self._rotate(row[:, q_end:k_end].view(rows, c.kv_heads, c.head_dim), cos, sin)
            batch.append(index, k, row[:, k_end:].view(rows, c.kv_heads, c.head_dim))
            x = x + batch.attend(index, q).reshape(rows, -1) @ output.T
            row = (self._norm(x, feed_forward_norm) @ gate_up.T).float()
            gate, up = row[:, : c.feed_forward], row[:, c.feed_forward :]
            x = x + (torch.nn.functional.silu(gate) * up).to(self.dtype) @ down.T
        return self._norm(x, self._final_norm)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> np.ndarray:
        """(rows, vocabulary) fp32, on the host: waits for the pass."""
        return (hidden @ self._embedding.T).float().cpu().numpy()
