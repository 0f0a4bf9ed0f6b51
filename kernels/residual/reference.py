"""Attention Residuals (arXiv 2603.15031) and hyper-connections (arXiv 2512.24880) as the formulas stand.

Legend: T tokens, D hidden, B sources (blocks), Q queries of one block, M residual streams, F = M D, W = 2M + M M.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.contracts import AttnResPhase1, HyperMix
from longprefill.kernels.norm.reference import rms_norm
from longprefill.kernels.shapes import check_shape

from .plain import check_sources, check_update


def mix(sources_BTD: Sequence[torch.Tensor], query_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """softmax over sources of query . rmsnorm(v), applied to the sources as they are; result in the sources' dtype.

    Raises:
        ValueError: no source, or sources of several shapes or dtypes.
    """
    values_BTD = _stack(sources_BTD)
    weight_BT = _logits(values_BTD, query_D, eps).softmax(0)
    return (weight_BT.unsqueeze(-1) * values_BTD).sum(0).to(sources_BTD[0].dtype)


def prepare(blocks_BTD: Sequence[torch.Tensor], queries_QD: torch.Tensor, *, eps: float) -> AttnResPhase1:
    """Maximum, sum and weighted sum over finished blocks for each query, fp32 (fp64 for fp64 blocks).

    Raises:
        ValueError: no block, or blocks of several shapes or dtypes.
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
    check_shape(partial_TD, "partial", *weighted_TD.shape)
    values_TD = partial_TD.to(weighted_TD.dtype)
    logit_T = _logits(values_TD, query_D, eps)
    top_T = torch.maximum(max_T, logit_T)
    old_T, new_T = (max_T - top_T).exp(), (logit_T - top_T).exp()
    mixed_TD = old_T.unsqueeze(-1) * weighted_TD + new_T.unsqueeze(-1) * values_TD
    return (mixed_TD / (old_T * sum_T + new_T).unsqueeze(-1)).to(partial_TD.dtype)


def hyper_mix(
    streams_TMD: torch.Tensor, projection_WF: torch.Tensor, base_W: torch.Tensor, scale_3: torch.Tensor, *,
    iterations: int, eps: float, norm_eps: float, input_norm_D: torch.Tensor | None = None, input_eps: float = 0.0,
) -> HyperMix:  # fmt: skip
    """Mixing weights of every token, fp32 (fp64 for fp64 streams), and the sublayer's input in the streams' dtype."""
    dtype = torch.float64 if streams_TMD.dtype == torch.float64 else torch.float32
    num_streams = streams_TMD.shape[1]
    values_TMD = streams_TMD.to(dtype)
    flat_TF = values_TMD.flatten(1)
    normed_TF = flat_TF * torch.rsqrt(flat_TF.square().mean(-1, keepdim=True) + norm_eps)
    raw_TW = normed_TF @ projection_WF.to(dtype).t()
    pre_TM, post_TM, comb_TN = raw_TW.split((num_streams, num_streams, num_streams**2), dim=1)
    pre_M, post_M, comb_N = base_W.to(dtype).split((num_streams, num_streams, num_streams**2))
    scale_3 = scale_3.to(dtype)
    pre_TM = torch.sigmoid(pre_TM * scale_3[0] + pre_M) + eps
    post_TM = 2 * torch.sigmoid(post_TM * scale_3[1] + post_M)
    comb_TMM = (comb_TN * scale_3[2] + comb_N).unflatten(1, (num_streams, num_streams)).softmax(-1) + eps
    comb_TMM = comb_TMM / (comb_TMM.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb_TMM = comb_TMM / (comb_TMM.sum(2, keepdim=True) + eps)
        comb_TMM = comb_TMM / (comb_TMM.sum(1, keepdim=True) + eps)
    input_TD = (pre_TM.unsqueeze(-1) * values_TMD).sum(1).to(streams_TMD.dtype)
    if input_norm_D is not None:
        input_TD = rms_norm(input_TD, input_norm_D, input_eps)
    return HyperMix(input_TD, post_TM, comb_TMM)


def hyper_update(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """Stream j becomes sum_i comb[i, j] stream i + post[j] output; [T, M, D] in the streams' dtype."""
    check_update(streams_TMD, output_TD, post_TM, comb_TMM)
    kept_TMD = torch.einsum("tij,tid->tjd", comb_TMM, streams_TMD.to(comb_TMM.dtype))
    added_TMD = post_TM.unsqueeze(-1) * output_TD.to(post_TM.dtype).unsqueeze(1)
    return (kept_TMD + added_TMD).to(streams_TMD.dtype)


def hyper_update_mix(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor,
    projection_WF: torch.Tensor, base_W: torch.Tensor, scale_3: torch.Tensor, *,
    iterations: int, eps: float, norm_eps: float, input_norm_D: torch.Tensor | None = None, input_eps: float = 0.0,
) -> HyperMix:  # fmt: skip
    """`hyper_update`, written over the streams, then `hyper_mix` of them."""
    streams_TMD.copy_(hyper_update(streams_TMD, output_TD, post_TM, comb_TMM))
    return hyper_mix(
        streams_TMD, projection_WF, base_W, scale_3, iterations=iterations, eps=eps, norm_eps=norm_eps,
        input_norm_D=input_norm_D, input_eps=input_eps,
    )  # fmt: skip


def hyper_final(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """The mean of the streams after `hyper_update`, [T, D] in their dtype."""
    return hyper_update(streams_TMD, output_TD, post_TM, comb_TMM).mean(dim=1)


def _stack(sources_BTD: Sequence[torch.Tensor]) -> torch.Tensor:
    check_sources(sources_BTD)
    dtype = torch.float64 if sources_BTD[0].dtype == torch.float64 else torch.float32
    return torch.stack(tuple(sources_BTD)).to(dtype)


def _logits(values: torch.Tensor, query_D: torch.Tensor, eps: float) -> torch.Tensor:
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return normed @ query_D.to(values.dtype)
