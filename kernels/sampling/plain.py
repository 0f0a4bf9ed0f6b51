"""Token sampling by inverse distribution function over the sorted nucleus, in fp64.

Legend: V vocabulary.
"""

from __future__ import annotations

import torch

from .philox import uniform


def sample(logits_V: torch.Tensor, *, temperature: float, top_p: float, seed: int, sample: int, position: int) -> int:
    """The token at `position` of stream `sample`.

    Args:
        logits_V: any float dtype; -inf forbids a token.
        temperature: 0 takes the largest logit, the lowest id on ties.
        top_p: the nucleus is the shortest prefix, by (probability descending, id ascending), that reaches it.
        seed, sample, position: all that the random number depends on, never the order of calls.

    Returns:
        A token id.

    Raises:
        ValueError: NaN or +inf logits, no allowed token, or a temperature or top_p outside its range.
    """
    check_request(logits_V, temperature=temperature, top_p=top_p)
    logits_V = logits_V.to(torch.float64)
    if temperature == 0:
        return int((logits_V == logits_V.amax()).to(torch.int8).argmax())
    sorted_V, ids_V = logits_V.sort(descending=True, stable=True)
    weights_V = ((sorted_V - sorted_V[0]) / temperature).exp_()
    sums_V = weights_V.cumsum(0)
    # Rounding may leave every sum just below top_p of the total: the clamp makes the nucleus end with the vocabulary.
    nucleus = min(int(torch.searchsorted(sums_V, top_p * sums_V[-1])), int((weights_V > 0).sum()) - 1)
    target = uniform(seed=seed, sample=sample, position=position) * sums_V[nucleus]
    return int(ids_V[min(int(torch.searchsorted(sums_V, target, right=True)), nucleus)])


def check_request(logits_V: torch.Tensor, *, temperature: float, top_p: float) -> None:
    """Raises ValueError for what cannot be sampled from."""
    if logits_V.ndim != 1 or logits_V.numel() == 0:
        raise ValueError(f"logits of shape {tuple(logits_V.shape)}: sampling takes one non-empty row [V]")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: use 0 (greedy) or any positive number")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: use a number above 0 and up to 1")
    num_bad = int((logits_V.isnan() | logits_V.isposinf()).sum())
    if num_bad:
        raise ValueError(
            f"{num_bad} of {logits_V.numel()} logits are NaN or +inf: the forward pass broke, nothing is sampled"
        )
    if bool(logits_V.isneginf().all()):
        raise ValueError(f"all {logits_V.numel()} logits are -inf: allow at least one token")
