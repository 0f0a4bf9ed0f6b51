"""Attention Residuals as the formulas stand (arXiv 2603.15031).

Legend: T tokens, D hidden, B sources (blocks), Q queries of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.contracts import AttnResPhase1


def mix(sources_BTD: Sequence[torch.Tensor], query_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """softmax over sources of query . rmsnorm(v), applied to the sources as they are; result in the sources' dtype.

    Raises:
        ValueError: no source.
    """
    values_BTD = _stack(sources_BTD)
    weight_BT = _logits(values_BTD, query_D, eps).softmax(0)
    return (weight_BT.unsqueeze(-1) * values_BTD).sum(0).to(sources_BTD[0].dtype)


def prepare(blocks_BTD: Sequence[torch.Tensor], queries_QD: torch.Tensor, *, eps: float) -> AttnResPhase1:
    """Maximum, sum and weighted sum over finished blocks for each query, fp32 (fp64 for fp64 blocks).

    Raises:
        ValueError: no block.
    """
    values_BTD = _stack(blocks_BTD)
    logits_QBT = torch.stack([_logits(values_BTD, query_D, eps) for query_D in queries_QD])
    max_QT = logits_QBT.amax(1)
    weight_QBT = (logits_QBT - max_QT.unsqueeze(1)).exp()
    return AttnResPhase1(max_QT, weight_QBT.sum(1), torch.einsum("qbt,btd->qtd", weight_QBT, values_BTD))


def update(
    partial_TD: torch.Tensor | None, phase1: AttnResPhase1, query: int, query_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Adds the running partial sum to phase 1 of query number `query`; result in the partial's dtype (None: fp32)."""
    max_T, sum_T, weighted_TD = phase1.max_QT[query], phase1.sum_QT[query], phase1.weighted_QTD[query]
    if partial_TD is None:
        return weighted_TD / sum_T.unsqueeze(-1)
    values_TD = partial_TD.to(weighted_TD.dtype)
    logit_T = _logits(values_TD, query_D, eps)
    top_T = torch.maximum(max_T, logit_T)
    old_T, new_T = (max_T - top_T).exp(), (logit_T - top_T).exp()
    mixed_TD = old_T.unsqueeze(-1) * weighted_TD + new_T.unsqueeze(-1) * values_TD
    return (mixed_TD / (old_T * sum_T + new_T).unsqueeze(-1)).to(partial_TD.dtype)


def _stack(sources_BTD: Sequence[torch.Tensor]) -> torch.Tensor:
    if not sources_BTD:
        raise ValueError("0 sources to mix: need at least 1, the token embedding")
    dtype = torch.float64 if sources_BTD[0].dtype == torch.float64 else torch.float32
    return torch.stack(tuple(sources_BTD)).to(dtype)


def _logits(values: torch.Tensor, query_D: torch.Tensor, eps: float) -> torch.Tensor:
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return normed @ query_D.to(values.dtype)
