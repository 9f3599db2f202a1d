"""What attention is, in float64, in pieces that fit beside everything else.

Invariant: the query tokens are the last ones of their sequence, and each sees the keys up to its own. An error is the norm of the difference over
the norm of what is right, over the rows of one query token and KV head, as kvq's own benchmark says it; the largest of those looked at.
"""

import math

import torch

PIECE_TOKENS = 32768


def attention(q, k, v, positions):
    """q [rows, heads, d] at `positions`, k and v [tokens, kv_heads, d]: [rows, heads, d] in float64, by KV head [rows, kv_heads, group, d]."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    q = q.double().view(rows, kv_heads, heads // kv_heads, dim)
    top = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for at in range(0, len(k), PIECE_TOKENS):
        piece = k[at : at + PIECE_TOKENS].double()
        scores = torch.einsum("rhgd,thd->rhgt", q, piece) / math.sqrt(dim)
        hidden = torch.arange(at, at + len(piece), device=q.device)[None, :] > positions[:, None]
        scores.masked_fill_(hidden[:, None, None, :], -math.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        weights, kept = torch.exp(scores - new_top[..., None]), torch.exp(top - new_top)
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + torch.einsum("rhgt,thd->rhgd", weights, v[at : at + PIECE_TOKENS].double())
        top = new_top
    return out / total[..., None]


def worst_error(case, q, out, values):
    """Of the first and the last query token of the first, the middle and the last sequence, all heads. `values(sequence)` gives K and V."""
    if not torch.isfinite(out).all():
        return math.inf
    last, worst = len(case.lengths) - 1, 0.0
    for sequence in sorted({0, last // 2, last}):
        tokens = sorted({0, case.queries - 1})
        rows = [sequence * case.queries + token for token in tokens]
        positions = torch.tensor([case.lengths[sequence] - case.queries + token for token in tokens], device=q.device)
        want = attention(q[rows], *values(sequence), positions)
        got = out[rows].double().view(want.shape)
        error = (got - want).flatten(2).norm(dim=-1) / want.flatten(2).norm(dim=-1)
        worst = max(worst, float(error.max()))
    return worst
