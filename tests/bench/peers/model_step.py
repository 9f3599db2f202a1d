"""A decode step's append and attention over all layers of a model, by FlashInfer: what kvq_bench_gpu_attend's topic step does by kvq.

Invariant: as many layers' caches as have room are in memory, and the layers take them in turn; each is many times what the second-level cache
holds, so a step reads as many bytes from memory as it would over layers of its own. The row says how many there were.
"""

import gc

import torch

from case import DEVICE, Case, PagedCache, Refused, random_values
from flashinfer_paged import FP8, FP16, DecodePlan, XqaCall, package

SPARE_BYTES = 8 << 30  # of the GPU: workspaces, graphs, what the check makes
PAGE_TOKENS = 64


class Step:
    """`kernel(case, cache)` attends over one layer."""

    def __init__(self, name, dtype, kernel):
        self.name, self.dtype, self.kernel = name, dtype, kernel

    def prepare(self, entry):
        package()
        one = Case(entry["shape"], (entry["tokens"],), 1, entry["kv_heads"], entry["group"], entry["head_dim"])
        layers = entry["layers"]
        sequences = entry["sequences"] or int(entry["kv_bytes"] // (layers * one.kv_bytes(self.dtype)))
        if sequences == 0:
            return None
        case = Case(one.shape, one.lengths * sequences, 1, one.kv_heads, one.group, one.head_dim)
        gc.collect()
        torch.cuda.empty_cache()
        room = torch.cuda.mem_get_info()[0] - SPARE_BYTES
        held = min(layers, int(room // case.kv_bytes(self.dtype)))
        if held < 1:
            raise Refused("one layer's cache is larger than the GPU's memory")
        return Prepared(case, layers, PagedCache(case, PAGE_TOKENS, self.dtype, held), self.kernel)


class Prepared:
    def __init__(self, case, layers, cache, kernel):
        self.case, self.layers, self.cache, self.sets = case, layers, cache, 1
        self.flashinfer, self.attention = package(), kernel(case, cache)
        self.new = random_values((2, len(case.lengths), case.kv_heads, case.head_dim), cache.dtype)
        self.sequences = torch.arange(len(case.lengths), dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) - 1
        self.starts, self.last_page = cache.starts.to(DEVICE), cache.last_page.to(DEVICE)
        self.choices = self.attention.choices
        self.poison, self.result, self.values, self.q = self.attention.poison, self.attention.result, self.attention.values, self.attention.q

    @property
    def choice(self):
        return self.attention.choice

    @choice.setter
    def choice(self, choice):
        self.attention.choice = choice

    def layer(self, i):
        held = i % len(self.cache.sets)
        self.flashinfer.append_paged_kv_cache(self.new[0], self.new[1], self.sequences, self.positions, self.cache.sets[held], self.cache.indices,
                                              self.starts, self.last_page)
        self.attention.run(held)

    def run(self, _):
        for i in range(self.layers):
            self.layer(i)

    def more(self, us):
        batch = len(self.case.lengths)
        return {"batch": batch, "layers_in_memory": len(self.cache.sets), "tokens_s": batch / us * 1e6}


STEPS = [Step("flashinfer_fp16", FP16, lambda case, cache: DecodePlan(case, PAGE_TOKENS, FP16, cache)),
         Step("flashinfer_fp8", FP8, lambda case, cache: DecodePlan(case, PAGE_TOKENS, FP8, cache)),
         Step("flashinfer_xqa_fp8_generic", FP8, lambda case, cache: XqaCall(case, PAGE_TOKENS, FP8, True, cache))]
