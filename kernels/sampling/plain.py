"""Token sampling by inverse distribution function over the nucleus in the order of ids, in fp64.

Legend: V vocabulary.
"""

from __future__ import annotations

import torch

from longprefill.kernels.contracts import LogProbs

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
    # By id, so that rounding of logits moves the borders of the draw and never swaps two tokens that are nearly equal.
    ids_N, order_N = ids_V[: nucleus + 1].sort()
    sums_N = weights_V[: nucleus + 1][order_N].cumsum(0)
    target = uniform(seed=seed, sample=sample, position=position) * sums_N[-1]
    return int(ids_N[min(int(torch.searchsorted(sums_N, target, right=True)), nucleus)])


def logprobs(logits_V: torch.Tensor, *, token: int, num_top: int) -> LogProbs:
    """Log-probabilities of `token` and of the `num_top` best tokens.

    Args:
        logits_V: any float dtype; -inf forbids a token.
        num_top: 0 or more; fewer come when fewer tokens are allowed.

    Raises:
        ValueError: NaN or +inf logits, no allowed token, or a token outside the vocabulary.
    """
    check_logprobs_request(logits_V, token=token, num_top=num_top)
    logprobs_V = logits_V.float().log_softmax(0)
    own = float(logprobs_V[token])
    num_top = min(num_top, logprobs_V.numel())
    if num_top == 0:
        return LogProbs(own, ())
    # By the logits, as a greedy sample goes: log-probabilities are rounded, and two tokens may meet there. topk leaves
    # the order of equal values open: take all that reach the last place, by id, and sort them stably.
    least = logits_V.topk(num_top).values[-1]
    ids_N = torch.nonzero(logits_V >= least).flatten()
    best_N = ids_N[logits_V[ids_N].sort(descending=True, stable=True).indices[:num_top]]
    pairs = zip(best_N.tolist(), logprobs_V[best_N].tolist(), strict=True)
    return LogProbs(own, tuple((number, value) for number, value in pairs if value > float("-inf")))


def check_logprobs_request(logits_V: torch.Tensor, *, token: int, num_top: int) -> None:
    """Raises ValueError for what has no log-probabilities."""
    check_request(logits_V, temperature=0, top_p=1)
    if not 0 <= token < logits_V.numel():
        raise ValueError(f"token={token} is outside the vocabulary of {logits_V.numel()}")
    if num_top < 0:
        raise ValueError(f"num_top={num_top}: use 0 or more")


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
