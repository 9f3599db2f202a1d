"""torch's scaled_dot_product_attention over contiguous keys and values, by one backend at a time.

Invariant: a backend that torch does not take for a case is an error of torch's, never another backend.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from case import Refused, random_values


class Sdpa:
    tolerance = 2e-3

    def __init__(self, name, backend):
        self.name, self.backend, self.dtype = name, backend, torch.float16

    def prepare(self, case):
        if case.ragged():
            raise Refused("takes sequences of one length")
        if case.queries > 1 and self.backend == SDPBackend.CUDNN_ATTENTION:
            raise Refused("torch lets it mask from the first key on only, not up to the last")
        return Prepared(case, self.backend)


class Prepared:
    choices = (None,)

    def __init__(self, case, backend):
        self.case, self.backend = case, backend
        batch, tokens = len(case.lengths), case.lengths[0]
        first = random_values((2, batch, case.kv_heads, tokens, case.head_dim), torch.float16)
        self.kv = [first, *(first.clone() for _ in range(1, case.sets(torch.float16)))]
        self.sets = len(self.kv)
        self.q = case.query()
        self.by_head = self.q.view(batch, case.queries, case.heads, case.head_dim).transpose(1, 2).contiguous()
        self.mask = causal_lower_right(case.queries, tokens) if case.queries > 1 else None

    def run(self, i):
        with sdpa_kernel(self.backend):
            self.by_head_out = torch.nn.functional.scaled_dot_product_attention(self.by_head, *self.kv[i], attn_mask=self.mask, enable_gqa=self.case.group > 1)

    def result(self):
        return self.by_head_out.transpose(1, 2).reshape(self.q.shape)

    def poison(self):
        self.by_head_out = None

    def values(self, sequence):
        return [tensor[sequence].transpose(0, 1) for tensor in self.kv[0]]


SDPA = [Sdpa("torch_cudnn_fp16", SDPBackend.CUDNN_ATTENTION), Sdpa("torch_flash_fp16", SDPBackend.FLASH_ATTENTION)]
