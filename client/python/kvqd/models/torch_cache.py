"""K/V in kvq pages for a model in torch: kvq_cache.py's twin, on the device where kvqd has its pages; and plain torch tensors
as the reference.

Invariant: what a pass needs to know (tokens, positions, slots, tables, lengths) reaches the device in one copy, before the pass,
into tensors that stay where they are for one batch shape; so a pass that was captured into a CUDA graph reads the next step's.
A KvqBatch is one kvq step: room is reserved before it begins, and its tokens are committed only if the pass went through.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import torch as kvqd_torch
from ..errors import KvqError
from ..model import Model
from .gguf_file import Config
from .kvq_cache import KvqSequence
from .llama_torch import Llama

Parts = list[tuple[KvqSequence, list[int]]]


def device_of(model: Model) -> torch.device:
    """Where the model's pages are, as torch calls it."""
    return kvqd_torch.Cache(model).device


class Inputs:
    """The integers of a pass over `batch` sequences with `rows` new tokens, in one buffer on each side."""

    def __init__(self, device: torch.device, batch: int, rows: int, pages: int):
        shapes = {
            "tokens": (torch.int64, (rows,)),
            "positions": (torch.int64, (rows,)),
            "slots": (torch.int64, (rows,)),
            "table": (torch.int32, (batch, pages)),
            "lengths": (torch.int32, (batch,)),
            "starts": (torch.int32, (batch + 1,)),
        }
        size = sum(-(-dtype.itemsize * int(np.prod(shape)) // 8) for dtype, shape in shapes.values())
        self._host = torch.zeros(size, dtype=torch.int64)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self.host: dict[str, np.ndarray] = {}
        at = 0
        for name, (dtype, shape) in shapes.items():
            count, words = int(np.prod(shape)), -(-dtype.itemsize * int(np.prod(shape)) // 8)
            view = [side[at : at + words].view(dtype)[:count].view(shape) for side in (self._host, self._device)]
            self.host[name] = view[0].numpy()
            setattr(self, name, view[1])
            at += words

    def upload(self) -> None:
        """In the current stream's order. The host side may be written again at once: it is pageable, so it is staged."""
        self._device.copy_(self._host, non_blocking=True)


class KvqBatch:
    """New tokens of some sequences of one model: `with KvqBatch(model, parts, inputs) as batch`."""

    def __init__(self, model: Model, parts: Parts, inputs: Inputs, *, deadline_ms: int = 0):
        self._model, self._parts, self._inputs, self._deadline_ms = model, parts, inputs, deadline_ms
        self.tokens, self.positions = inputs.tokens, inputs.positions
        self._longest = max(len(tokens) for _, tokens in parts)

    def __enter__(self) -> KvqBatch:
        sequences = [part.sequence for part, _ in self._parts]
        self._model.reserve(sequences, [len(tokens) for _, tokens in self._parts], self._deadline_ms)
        self._step = self._model.step().__enter__()
        try:
            self._describe()
            self._inputs.upload()
        except BaseException:
            self._step.__exit__()
            raise
        return self

    def _describe(self) -> None:
        host, at = self._inputs.host, 0
        host["table"].fill(0)
        for index, (part, tokens) in enumerate(self._parts):
            end, length = at + len(tokens), part.length + len(tokens)
            host["tokens"][at:end] = tokens
            host["positions"][at:end] = np.arange(part.length, length)
            host["slots"][at:end] = part.sequence.slots(part.length, len(tokens))
            table = part.sequence.block_table()
            host["table"][index, : len(table)] = table
            host["lengths"][index] = length
            host["starts"][index + 1] = at = end

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._model.append(layer, k.to(torch.float16), v.to(torch.float16), self._inputs.slots)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        i = self._inputs
        return self._model.attend(layer, q, i.table, i.lengths, i.starts, max_query_tokens=self._longest)

    def __exit__(self, kind, *_) -> None:
        self._step.__exit__()
        if kind is None:
            for part, tokens in self._parts:
                part.sequence.commit(tokens, self._step.serial)
                part.tokens.extend(tokens)


class Forward:
    """Passes of one model over its kvq pages. With `graphs`, a pass of one token a sequence is captured the first time that there
    are so many sequences, all layers in one CUDA graph, and replayed from then on."""

    def __init__(self, llama: Llama, model: Model, *, deadline_ms: int = 0, graphs: bool = True):
        self._llama, self._model, self._deadline_ms = llama, model, deadline_ms
        self._graphs = graphs and llama.device.type == "cuda"
        self._pages = -(-llama.config.context_tokens // 64)
        self._inputs: dict[int, Inputs] = {}  # of decode passes, by how many sequences they have
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __call__(self, parts: Parts) -> torch.Tensor:
        """Final hidden states of all new tokens, rows in the order of the parts."""
        self.check()
        longest = max(part.length + len(tokens) for part, tokens in parts)
        if longest > self._llama.config.context_tokens:
            raise ValueError(f"{longest} tokens are more than the model's {self._llama.config.context_tokens}")
        rows, batch = sum(len(tokens) for _, tokens in parts), len(parts)
        if not self._graphs or rows != batch:
            inputs = Inputs(self._llama.device, batch, rows, self._pages)
            with KvqBatch(self._model, parts, inputs, deadline_ms=self._deadline_ms) as step:
                return self._llama.hidden(step)
        if batch not in self._inputs:
            self._inputs[batch] = Inputs(self._llama.device, batch, rows, self._pages)
        with KvqBatch(self._model, parts, self._inputs[batch], deadline_ms=self._deadline_ms) as step:
            if batch in self._captured:
                graph, hidden = self._captured[batch]
                graph.replay()
                return hidden.clone()
            hidden = self._llama.hidden(step)  # for real, and so that nothing is done for the first time while capturing
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # libkvq's own thread may map slabs meanwhile
                result = self._llama.hidden(step)
            self._captured[batch] = graph, result
            return hidden

    @property
    def captured(self) -> int:
        return len(self._captured)

    def check(self) -> None:
        """Raises what a kernel of an earlier pass could not do."""
        if fault := self._model.fault():
            raise KvqError(f"a pass could not use page {fault.page} in layer {fault.layer} (status {fault.status})")


class TorchSequence:
    """K and V of one sequence as tensors (layers, kv_heads, capacity, head_dim), rounded to fp16 as in a dense kvq page. Attention
    over them is fp32."""

    def __init__(self, config: Config, device: torch.device, capacity: int):
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.config, self.length = config, 0
        self._k, self._v = (torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(2))

    def fork(self) -> TorchSequence:
        child = object.__new__(TorchSequence)
        child.config, child.length = self.config, self.length
        child._k, child._v = self._k.clone(), self._v.clone()
        return child

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        end = self.length + len(k)
        self._k[layer, :, self.length : end] = k.to(torch.float16).transpose(0, 1)
        self._v[layer, :, self.length : end] = v.to(torch.float16).transpose(0, 1)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        c, rows, end = self.config, len(q), self.length + len(q)
        group = c.heads // c.kv_heads
        k, v = (side[layer, :, :end].float() for side in (self._k, self._v))
        # (kv_heads, group * rows, head_dim): the query heads that share a K/V head go through one product.
        grouped = q.float().view(rows, c.kv_heads, group, c.head_dim).permute(1, 2, 0, 3)
        score = grouped.reshape(c.kv_heads, group * rows, c.head_dim) @ k.transpose(1, 2) * c.head_dim**-0.5
        at = torch.arange(end, device=q.device)
        masked = at[None, :] > at[self.length : end, None]
        score = score.view(c.kv_heads, group, rows, end).masked_fill(masked, float("-inf"))
        out = score.softmax(dim=-1).view(c.kv_heads, group * rows, end) @ v
        return out.view(c.kv_heads, group, rows, c.head_dim).permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)


class TorchBatch:
    """New tokens of one such sequence. Leaving makes them part of it."""

    def __init__(self, sequence: TorchSequence, tokens: list[int]):
        device, length = sequence._k.device, sequence.length
        self._sequence = sequence
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
        self.positions = torch.arange(length, length + len(tokens), device=device)

    def __enter__(self) -> TorchBatch:
        return self

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._sequence.write(layer, k, v)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self._sequence.attend(layer, q)

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self._sequence.length += len(self.tokens)
