"""Attention Residuals by blocks of rows, without a normalised copy of any source (arXiv 2603.15031).

Legend: T tokens, D hidden, B sources (blocks), Q queries of one block, L rows of a block of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longprefill.kernels.contracts import AttnResPhase1

BLOCK_ELEMENTS = 1 << 19
"""Numbers that the sources of one block of rows hold together: 2 MiB in fp32."""


def mix(sources_BTD: Sequence[torch.Tensor], query_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """softmax over sources of query . rmsnorm(v), applied to the sources as they are; result in the sources' dtype.

    Raises:
        ValueError: no source.
    """
    _check_sources(sources_BTD)
    dtype = _compute_dtype(sources_BTD[0])
    query_1D = query_D.to(dtype).unsqueeze(0)
    out_TD = torch.empty_like(sources_BTD[0])
    for rows in _row_blocks(sources_BTD[0], len(sources_BTD)):
        values = [source[rows].to(dtype) for source in sources_BTD]
        weight_BL = torch.stack([_logits(value, query_1D, eps)[0] for value in values]).softmax(0)
        mixed_LD = values[0] * weight_BL[0].unsqueeze(-1)
        for value, weight_L in zip(values[1:], weight_BL[1:], strict=True):
            mixed_LD.addcmul_(value, weight_L.unsqueeze(-1))
        out_TD[rows] = mixed_LD
    return out_TD


def prepare(blocks_BTD: Sequence[torch.Tensor], queries_QD: torch.Tensor, *, eps: float) -> AttnResPhase1:
    """Maximum, sum and weighted sum over finished blocks for each query, fp32 (fp64 for fp64 blocks).

    Raises:
        ValueError: no block.
    """
    _check_sources(blocks_BTD)
    dtype = _compute_dtype(blocks_BTD[0])
    queries_QD = queries_QD.to(dtype)
    (num_rows, num_hidden), num_queries = blocks_BTD[0].shape, queries_QD.shape[0]
    weighted_QTD = torch.empty(num_queries, num_rows, num_hidden, dtype=dtype, device=queries_QD.device)
    max_QT, sum_QT = weighted_QTD.new_empty(num_queries, num_rows), weighted_QTD.new_empty(num_queries, num_rows)
    for rows in _row_blocks(blocks_BTD[0], len(blocks_BTD) + num_queries):
        values_LBD = torch.stack([block[rows].to(dtype) for block in blocks_BTD], dim=1)
        logits_QLB = _logits(values_LBD, queries_QD, eps)
        max_QT[:, rows] = logits_QLB.amax(-1)
        weight_QLB = logits_QLB.sub_(max_QT[:, rows].unsqueeze(-1)).exp_()
        sum_QT[:, rows] = weight_QLB.sum(-1)
        weighted_QTD[:, rows] = torch.bmm(weight_QLB.transpose(0, 1), values_LBD).transpose(0, 1)
    return AttnResPhase1(max_QT, sum_QT, weighted_QTD)


def update(
    partial_TD: torch.Tensor | None, phase1: AttnResPhase1, query: int, query_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Adds the running partial sum to phase 1 of query number `query`; result in the partial's dtype (None: fp32)."""
    max_T, sum_T, weighted_TD = phase1.max_QT[query], phase1.sum_QT[query], phase1.weighted_QTD[query]
    if partial_TD is None:
        return weighted_TD / sum_T.unsqueeze(-1)
    query_1D = query_D.to(weighted_TD.dtype).unsqueeze(0)
    out_TD = torch.empty_like(partial_TD)
    for rows in _row_blocks(partial_TD, 2):
        value_LD = partial_TD[rows].to(weighted_TD.dtype)
        logit_L = _logits(value_LD, query_1D, eps)[0]
        top_L = torch.maximum(max_T[rows], logit_L)
        old_L, new_L = (max_T[rows] - top_L).exp_(), (logit_L - top_L).exp_()
        total_L = torch.addcmul(new_L, old_L, sum_T[rows])
        mixed_LD = weighted_TD[rows] * (old_L / total_L).unsqueeze(-1)
        out_TD[rows] = mixed_LD.addcmul_(value_LD, (new_L / total_L).unsqueeze(-1))
    return out_TD


def _logits(values: torch.Tensor, queries_QD: torch.Tensor, eps: float) -> torch.Tensor:
    """[Q, ...] query . rmsnorm(value): the norm is a number a row, so it scales the product instead of the row."""
    inverse_rms = torch.linalg.vecdot(values, values).div_(values.shape[-1]).add_(eps).rsqrt_()
    return torch.movedim(values @ queries_QD.t(), -1, 0) * inverse_rms


def _check_sources(sources_BTD: Sequence[torch.Tensor]) -> None:
    if not sources_BTD:
        raise ValueError("0 sources to mix: need at least 1, the token embedding")


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_blocks(x_TD: torch.Tensor, num_sources: int) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, x_TD.shape[1] * num_sources))
    return (slice(start, start + size) for start in range(0, x_TD.shape[0], size))
