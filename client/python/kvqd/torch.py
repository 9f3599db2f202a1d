"""torch ops over a model's pages, for torch.compile and CUDA graphs.

Invariant: `kvqd::append` and `kvqd::attend` read and write pages that torch does not know of. So that no compiler drops
or reorders them, append mutates its cache's `state` tensor and attend reads it; attend writes only into `out` and `lse`.
Neither reads a value on the CPU: both may be captured, and replayed with other slots, tables and lengths in the same
tensors. Steps are begun and ended around the compiled or captured part.
"""

import itertools
import weakref
from typing import Optional  # the schema of an op is read from its annotations

import torch

from .errors import InvalidArgument
from .model import Model

_models: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()
_next_key = itertools.count(1)


def _model(key: int) -> Model:
    try:
        return _models[key]
    except KeyError:
        raise InvalidArgument("the model of this cache is gone: make a new kvqd.torch.Cache") from None


@torch.library.custom_op("kvqd::append", mutates_args=("state",))
def _append(
    state: torch.Tensor,
    key: int,
    layer: int,
    k: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    slots: torch.Tensor,
    aliases: bool,
) -> None:
    _model(key).append(layer, k, v, slots, aliases=aliases)


@_append.register_fake
def _append_fake(state, key, layer, k, v, slots, aliases) -> None:
    return None


@torch.library.custom_op("kvqd::attend", mutates_args=("out", "lse"))
def _attend(
    state: torch.Tensor,
    key: int,
    layer: int,
    q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lengths: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    alibi_slopes: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    scale: float,
    soft_cap: float,
    window: int,
    max_query_tokens: int,
    aliases: bool,
) -> None:
    _model(key).attend(
        layer,
        q,
        block_table,
        seq_lengths,
        query_starts,
        out=out,
        lse=False if lse is None else lse,
        aliases=aliases,
        max_query_tokens=max_query_tokens,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )


@_attend.register_fake
def _attend_fake(state, key, layer, q, *rest) -> None:
    return None


class Cache:
    """A model's pages as the ops see them. Made once for a model, before anything is traced."""

    def __init__(self, model: Model):
        gpu = model._gpu
        if gpu is not None and gpu.index is None:
            raise InvalidArgument(f"torch does not see {gpu.uuid}, which holds this model's pages")
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu.index)
        self.state = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.key = next(_next_key)
        _models[self.key] = model

    def append(self, layer: int, k, v, slots, *, aliases: bool = False) -> None:
        """As Model.append, on torch's current stream."""
        torch.ops.kvqd.append(self.state, self.key, layer, k, v, slots, aliases)

    def attend(
        self,
        layer: int,
        q,
        block_table,
        seq_lengths,
        query_starts,
        *,
        out=None,
        lse=None,
        alibi_slopes=None,
        sinks=None,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        window: int = -1,
        max_query_tokens: int = 0,
        aliases: bool = False,
    ):
        """As Model.attend, on torch's current stream. Returns out; `lse` is filled when it is given."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        torch.ops.kvqd.attend(
            self.state,
            self.key,
            layer,
            q,
            block_table,
            seq_lengths,
            query_starts,
            out,
            lse,
            alibi_slopes,
            sinks,
            scale,
            soft_cap,
            window,
            max_query_tokens,
            aliases,
        )
        return out
