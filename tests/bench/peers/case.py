"""One shape at which other kernels are timed, as kvq_bench_gpu_attend lists it, and memory that holds its keys and values.

Invariant: keys and values are standard normal, pages lie in random order, and a case has as many copies of its cache as pass ROTATION_BYTES together,
so that calls that take one after the other find nothing of theirs in the second-level cache. Copies are equal in bytes: only their place differs.
"""

import dataclasses

import torch

ROTATION_BYTES, MOST_SETS = 3 << 30, 200
CHUNK_QUERIES, MOST_SETS_OF_CHUNKS = 64, 12  # a chunk reads each page so often that the cache hides none
DEVICE = "cuda"


class Refused(Exception):
    """Why a peer has no time for a case."""


@dataclasses.dataclass(frozen=True)
class Case:
    shape: str
    lengths: tuple  # tokens of each sequence, its queries included
    queries: int  # of each sequence: the last tokens
    kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def of(cls, entry):
        return cls(entry["shape"], tuple(entry["lengths"]), *(entry[key] for key in ("queries", "kv_heads", "group", "head_dim")))

    @property
    def heads(self):
        return self.kv_heads * self.group

    @property
    def token_bytes(self):
        """Of K and V in 16 bits."""
        return self.kv_heads * self.head_dim * 2 * 2

    def kv_bytes(self, dtype):
        return sum(self.lengths) * self.token_bytes * dtype.itemsize // 2

    def sets(self, dtype):
        most = MOST_SETS if self.queries < CHUNK_QUERIES else MOST_SETS_OF_CHUNKS
        return int(min(max(ROTATION_BYTES // self.kv_bytes(dtype), 2), most))

    def query(self):
        return torch.randn(len(self.lengths) * self.queries, self.heads, self.head_dim, dtype=torch.float16, device=DEVICE)

    def ragged(self):
        return len(set(self.lengths)) > 1


def random_values(shape, dtype):
    """Made in pieces: what is made in between is never much larger than a piece."""
    out = torch.empty(shape, dtype=dtype, device=DEVICE)
    for piece in out.view(-1).split(1 << 28):
        piece.copy_(torch.randn(piece.shape, dtype=torch.float16, device=DEVICE))
    return out


class PagedCache:
    """Copies of K and V as [pages, page_tokens, kv_heads, head_dim], and where the sequences' pages are."""

    def __init__(self, case, page_tokens, dtype, sets=None):
        self.case, self.page_tokens, self.dtype = case, page_tokens, dtype
        counts = [-(-length // page_tokens) for length in case.lengths]
        self.page_order = torch.randperm(sum(counts))
        shape = (sum(counts), page_tokens, case.kv_heads, case.head_dim)
        first = random_values((2, *shape), dtype)
        self.sets = [(first[0], first[1])]
        for _ in range(1, case.sets(dtype) if sets is None else sets):
            copy = first.clone()
            self.sets.append((copy[0], copy[1]))
        self.starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.indices = self.page_order.int().to(DEVICE)
        self.last_page = torch.tensor([(length - 1) % page_tokens + 1 for length in case.lengths], dtype=torch.int32)

    def table(self):
        """[sequences, pages of the longest], as kernels take it that know no list."""
        rows = self.page_order.int().split(self.starts.diff().tolist())
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).contiguous().to(DEVICE)

    def values(self, sequence):
        """K and V of the first copy as the sequence sees them, in its own order: [tokens, kv_heads, head_dim]."""
        pages = self.page_order[self.starts[sequence] : self.starts[sequence + 1]].to(DEVICE)
        at = [tensor.view(torch.uint8)[pages].view(self.dtype) for tensor in self.sets[0]]
        return [tensor.reshape(-1, self.case.kv_heads, self.case.head_dim)[: self.case.lengths[sequence]] for tensor in at]
