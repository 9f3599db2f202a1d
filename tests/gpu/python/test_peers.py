"""What other kernels are compared with before they are timed: the float64 reference, and what it is told of a paged cache.

Invariant: a second way to the same numbers, torch's own softmax over whole matrices, decides; a wrong row, page or key is seen.
"""

import pathlib
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).resolve()
for folder in (HERE.parents[1] / "bench/peers", HERE.parents[2] / "bench/peers"):  # of a bundle, of the checkout
    if folder.is_dir():
        sys.path.insert(0, str(folder))

import case as cases
import reference


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(reference, "PIECE_TOKENS", 37)


def right(case, q, cache):
    """[rows, heads, d] in float64 by whole matrices."""
    out = []
    for sequence, length in enumerate(case.lengths):
        k, v = (tensor.double().repeat_interleave(case.group, 1) for tensor in cache.values(sequence))
        rows = q[sequence * case.queries : (sequence + 1) * case.queries].double()
        scores = torch.einsum("rhd,thd->hrt", rows, k) / case.head_dim**0.5
        seen = torch.ones(case.queries, length, device=q.device).tril(length - case.queries).bool()
        out.append(torch.einsum("hrt,thd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("queries", [1, 3])
def test_what_is_right_has_no_error_and_what_is_wrong_has_one(dtype, queries):
    case = cases.Case("x", (130, 64, 70), queries, 2, 4, 16)
    cache = cases.PagedCache(case, 16, dtype, 2)
    q = case.query()
    out = right(case, q, cache)
    assert reference.worst_error(case, q, out, cache.values) < 1e-12
    for row in (0, queries - 1, 2 * queries, 3 * queries - 1):
        wrong = out.clone()
        wrong[row, 5] *= 1.01
        assert 1e-4 < reference.worst_error(case, q, wrong, cache.values) < 1e-2
    wrong = out.clone()
    wrong[min(1, queries - 1), 0, 0] = torch.nan  # an unwritten element, also in a row that is not looked at otherwise
    assert reference.worst_error(case, q, wrong, cache.values) == float("inf")


def test_a_caches_copies_are_equal_and_elsewhere_and_its_table_is_that_of_its_lists():
    case = cases.Case("x", (130, 64, 70), 1, 2, 4, 16)
    cache = cases.PagedCache(case, 16, torch.float16, 3)
    assert len({k.data_ptr() for k, _ in cache.sets}) == 3
    assert all(torch.equal(k, cache.sets[0][0]) and torch.equal(v, cache.sets[0][1]) for k, v in cache.sets)
    assert cache.starts.tolist() == [0, 9, 13, 18] and cache.last_page.tolist() == [2, 16, 6]
    table = cache.table()
    assert table.shape == (3, 9) and sorted(cache.indices.tolist()) == list(range(18))
    for sequence, pages in enumerate((9, 4, 5)):
        assert table[sequence, :pages].tolist() == cache.indices[cache.starts[sequence] : cache.starts[sequence + 1]].tolist()


def test_copies_pass_what_the_cache_holds():
    small, large, chunk = cases.Case("x", (4096,), 1, 8, 4, 128), cases.Case("x", (1 << 20,), 1, 8, 4, 128), cases.Case("x", (8192,), 512, 8, 4, 128)
    assert small.sets(torch.float16) == 192 and small.sets(torch.float16) * small.kv_bytes(torch.float16) == cases.ROTATION_BYTES
    assert (large.sets(torch.float16), chunk.sets(torch.float16), small.sets(torch.float8_e4m3fn)) == (2, 12, 200)
