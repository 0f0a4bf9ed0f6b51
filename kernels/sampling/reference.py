"""Token sampling by its definition, in Python numbers.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from longprefill.kernels.contracts import LogProbs

from .philox import uniform
from .plain import check_logprobs_request, check_request


def sample(logits_V: torch.Tensor, *, temperature: float, top_p: float, seed: int, sample: int, position: int) -> int:
    """The token at `position` of stream `sample`; same arguments, errors and result as the plain backend."""
    check_request(logits_V, temperature=temperature, top_p=top_p)
    logits = logits_V.to(torch.float64).tolist()
    best_first = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return best_first[0]
    weights = [math.exp((logits[token] - logits[best_first[0]]) / temperature) for token in best_first]
    total = sum(weights)
    nucleus: list[tuple[int, float]] = []
    reached = 0.0
    for token, weight in zip(best_first, weights, strict=True):
        if nucleus and (reached >= top_p * total or weight == 0):
            break
        reached += weight
        nucleus.append((token, weight))
    nucleus.sort()
    ends = list(accumulate(weight for _, weight in nucleus))
    target = uniform(seed=seed, sample=sample, position=position) * ends[-1]
    return next((token for (token, _), end in zip(nucleus, ends, strict=True) if end > target), nucleus[-1][0])


def logprobs(logits_V: torch.Tensor, *, token: int, num_top: int) -> LogProbs:
    """Log-probabilities of `token` and of the `num_top` best; same arguments and errors as the plain backend."""
    check_logprobs_request(logits_V, token=token, num_top=num_top)
    logits = logits_V.to(torch.float64).tolist()
    largest = max(logits)
    total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    best_first = sorted(range(len(logits)), key=lambda number: (-logits[number], number))
    top = [(number, logits[number] - total) for number in best_first[:num_top] if logits[number] > -math.inf]
    return LogProbs(logits[token] - total, tuple(top))
