"""FlashInfer's attention over paged keys and values: the tensor-core kernels (FA2, and FA3 for several query tokens) and XQA.

Invariant: every kernel is planned for the very lengths that are timed, outside what is timed, and called as the package's documentation says.
"""

import importlib
import math
from unittest import mock

import torch

from case import DEVICE, PagedCache, Refused

WORKSPACE_BYTES = 512 << 20


def package():
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise Refused(f"{error}; pip install flashinfer-python")


class Paged:
    """What all share: caches, queries, output. `choices`: settings of the call that are all checked and timed, the fastest counts."""

    choices, choice = (None,), None

    def __init__(self, case, page_tokens, dtype, cache=None):
        self.case, self.flashinfer = case, package()
        self.cache = cache or PagedCache(case, page_tokens, dtype)
        self.sets = len(self.cache.sets)
        self.q = case.query()
        self.out = torch.empty_like(self.q)

    def poison(self):
        self.out.fill_(math.nan)

    def result(self):
        return self.out

    def values(self, sequence):
        return self.cache.values(sequence)


class DecodePlan(Paged):
    def __init__(self, case, page_tokens, dtype, cache=None):
        super().__init__(case, page_tokens, dtype, cache)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        self.wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        self.wrapper.plan(self.cache.starts, self.cache.indices, self.cache.last_page, case.heads, case.kv_heads, case.head_dim,
                          page_tokens, q_data_type=torch.float16, kv_data_type=dtype)

    def run(self, i):
        self.wrapper.run(self.q, self.cache.sets[i], out=self.out)


class PrefillPlan(Paged):
    def __init__(self, case, page_tokens, dtype, backend):
        super().__init__(case, page_tokens, dtype)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32) * case.queries
        self.wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        self.wrapper.plan(starts, self.cache.starts, self.cache.indices, self.cache.last_page, case.heads, case.kv_heads, case.head_dim,
                          page_tokens, causal=True, q_data_type=torch.float16, kv_data_type=dtype)

    def run(self, i):
        self.wrapper.run(self.q, self.cache.sets[i], out=self.out)


def causal_bits(batch, queries):
    """[batch, queries, 16-bit words of a row, an even number]: query i sees the new tokens up to its own."""
    rows = [(1 << (i + 1)) - 1 for i in range(queries)]
    words = 2 * (-(-queries // 32))
    return torch.tensor([[row >> (16 * word) & 0xFFFF for word in range(words)] for row in rows], dtype=torch.int32).to(torch.uint16).repeat(batch, 1, 1).to(DEVICE)


class XqaCall(Paged):
    """`generic`: the kernel that xqa() takes for FP8 on every GPU but Hopper, where it takes one of Hopper's own. It runs there too, and is often
    faster. A choice says whether launches may overlap, which the package allows unless told otherwise: seen half as slow again on an H200 where a
    sequence is split."""

    choices = (True, False)

    def __init__(self, case, page_tokens, dtype, generic, cache=None):
        super().__init__(case, page_tokens, dtype, cache)
        self.module, self.generic = importlib.import_module("flashinfer.xqa"), generic
        self.table = self.cache.table()
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE).view(torch.uint32)[:, None]
        self.semaphores = torch.zeros(2 << 20, dtype=torch.int32, device=DEVICE).view(torch.uint32)
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        tokens = [] if case.queries == 1 else [case.queries]
        shape = (len(case.lengths), 1, *tokens, case.heads, case.head_dim)
        self.call_q, self.call_out = self.q.view(shape), self.out.view(shape)
        self.mask = None if case.queries == 1 else causal_bits(len(case.lengths), case.queries)

    def run(self, i):
        k, v = self.cache.sets[i]
        call = lambda: self.module.xqa(self.call_q, k, v, self.table, self.lengths, self.call_out, self.workspace, self.semaphores, self.case.kv_heads,
                                       self.cache.page_tokens, enable_pdl=self.choice, q_seq_len=self.case.queries, mask=self.mask)
        if not self.generic:
            return call()
        with mock.patch.object(self.module, "get_compute_capability", lambda device: (10, 0)):
            call()


class PersistentPlan(Paged):
    """One launch for all sequences, its work split by the plan over the whole GPU: the package's answer to ragged batches."""

    def __init__(self, case, page_tokens, dtype):
        super().__init__(case, page_tokens, dtype)
        self.wrapper = self.flashinfer.BatchAttention("NHD", DEVICE)
        starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32) * case.queries
        self.wrapper.plan(starts, self.cache.starts, self.cache.indices, torch.tensor(case.lengths, dtype=torch.int32), case.heads, case.kv_heads,
                          case.head_dim, case.head_dim, page_tokens, causal=case.queries > 1, q_data_type=torch.float16, kv_data_type=dtype)
        self.lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=DEVICE)

    def run(self, i):
        self.wrapper.run(self.q, self.cache.sets[i], out=self.out, lse=self.lse)


class Peer:
    """`plan(case)` makes what runs. `refuses(case)`: why it has no time for a case, or nothing."""

    def __init__(self, name, dtype, plan, refuses=lambda case: None, tolerance=2e-3):
        self.name, self.dtype, self.plan, self.refuses, self.tolerance = name, dtype, plan, refuses, tolerance

    def prepare(self, case):
        if why := self.refuses(case):
            raise Refused(why)
        return self.plan(case)


def but_usual(case):
    if case.queries > 16:
        return "for few query tokens"
    return None if (case.group, case.head_dim) == (4, 128) else "each head group and size is a module of its own: built for group 4, d 128 only"


FP16, FP8 = torch.float16, torch.float8_e4m3fn
ONE_TOKEN = [
    Peer("flashinfer_fp16", FP16, lambda case: DecodePlan(case, 64, FP16)),
    Peer("flashinfer_fp16_page16", FP16, lambda case: DecodePlan(case, 16, FP16)),
    Peer("flashinfer_fp8", FP8, lambda case: DecodePlan(case, 64, FP8)),
    Peer("flashinfer_fp8_page16", FP8, lambda case: DecodePlan(case, 16, FP8)),
    Peer("flashinfer_persistent_fp16", FP16, lambda case: PersistentPlan(case, 64, FP16), but_usual),
    Peer("flashinfer_persistent_fp8", FP8, lambda case: PersistentPlan(case, 64, FP8), but_usual),
    Peer("flashinfer_xqa_fp16", FP16, lambda case: XqaCall(case, 64, FP16, False), but_usual),
    Peer("flashinfer_xqa_fp8_generic", FP8, lambda case: XqaCall(case, 64, FP8, True), but_usual),
    Peer("flashinfer_xqa_fp8", FP8, lambda case: XqaCall(case, 64, FP8, False), but_usual, tolerance=8e-2)]  # quantizes queries and probabilities too
SEVERAL_TOKENS = [
    Peer("flashinfer_fa2_fp16", FP16, lambda case: PrefillPlan(case, 64, FP16, "fa2")),
    Peer("flashinfer_fa3_fp16", FP16, lambda case: PrefillPlan(case, 64, FP16, "fa3")),
    Peer("flashinfer_fa2_fp8", FP8, lambda case: PrefillPlan(case, 64, FP8, "fa2")),
    Peer("flashinfer_persistent_fp16", FP16, lambda case: PersistentPlan(case, 64, FP16)),
    Peer("flashinfer_xqa_fp16", FP16, lambda case: XqaCall(case, 64, FP16, False), but_usual),
    Peer("flashinfer_xqa_fp8_generic", FP8, lambda case: XqaCall(case, 64, FP8, True), but_usual)]
