"""Plain values that go into and come out of the C ABI. Invariant: immutable, and nothing here calls anything."""

from __future__ import annotations

import dataclasses
import enum


class Role(enum.IntEnum):
    BOTH = 0
    CONTROL = 1
    DATA = 2


class PressureLevel(enum.IntEnum):
    CALM = 0
    QUANTIZE = 1
    EVICT = 2
    REFUSE = 3


@dataclasses.dataclass(frozen=True)
class Layer:
    kv_heads: int
    head_dim: int
    query_heads: int
    bf16: bool = False
    keep_dense: bool = False


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    session: int
    tenant: int
    tenant_name: str
    arena_bytes: int
    slab_bytes: int
    dense_page_bytes: int
    cold_page_bytes: int
    cold_format: int
    device: str  # "host" or "cuda"
    device_uuid: str = ""  # of the GPU that holds the pages


@dataclasses.dataclass(frozen=True)
class Lookup:
    cached_tokens: int
    dense_tokens: int
    quantized_tokens: int
    host_tokens: int
    pending: bool


@dataclasses.dataclass(frozen=True)
class Pressure:
    level: PressureLevel
    credits: int
    credits_wanted_back: int
    lost_pages: int
    draining: bool
    reconnecting: bool  # kvqd is away; the session waits to be resumed
    reconnects: int  # times it was resumed by a kvqd that came back


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a kernel could not do: the rows that needed the page are NaN, the token was left out."""

    status: int  # as of the exception's class, e.g. LostPage.status
    layer: int
    index: int  # of the sequence in the batch, or of the token
    page: int
