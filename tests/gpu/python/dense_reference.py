"""The same model without kvq: K/V as torch tensors on the device, attention in fp32. What kvq's answers are compared with.

Invariant: it is fed what a server is fed (document, turns, one token at a time), with the same weights on the same device, so
that on dense pages only the order of sums differs.
"""

import numpy as np
import torch

from kvqd.models.llama import log_likelihood
from kvqd.models.torch_cache import TorchBatch, TorchSequence

CHUNK_TOKENS = 256


class Dense:
    def __init__(self, llama, document):
        self.llama = llama
        self.sequence = TorchSequence(llama.config, llama.device, llama.config.context_tokens)
        for _ in self._feed(self.sequence, document):
            pass

    def _feed(self, sequence, tokens):
        for at in range(0, len(tokens), CHUNK_TOKENS):
            with TorchBatch(sequence, tokens[at : at + CHUNK_TOKENS]) as batch:
                hidden = self.llama.hidden(batch)
            yield at, hidden

    def score(self, tokens):
        """Perplexity of `tokens` after the document, and the most likely token at each place."""
        likelihood, best = [], []
        for at, hidden in self._feed(self.sequence.fork(), tokens[:-1]):
            logits = self.llama.logits(hidden)
            likelihood.append(log_likelihood(logits, np.array(tokens[at + 1 : at + 1 + len(logits)])))
            best.extend(logits.argmax(axis=1).tolist())
        return {"perplexity": float(np.exp(-np.concatenate(likelihood).mean())), "best": best}

    def answer(self, turn, count, ends):
        """Greedy tokens after document and turn: `count` of them, or those before one of `ends`."""
        child, ids = self.sequence.fork(), []
        *_, (_, hidden) = self._feed(child, turn)
        while True:
            following = int(self.llama.logits(hidden[-1:])[0].argmax())
            if ids and (len(ids) == count or following in ends):
                break
            ids.append(following)
            ((_, hidden),) = self._feed(child, ids[-1:])
        del child
        if self.llama.device.type == "cuda":
            torch.cuda.synchronize()
        return ids


def same_share(left, right):
    """The share of equal tokens, place by place, over the longer of two answers."""
    return sum(a == b for a, b in zip(left, right)) / max(len(left), len(right), 1)


def first_difference(left, right):
    """The first place where two answers differ; None: they are the same."""
    for place, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))
