"""Attention Residuals and hyper-connections by blocks of rows, without a normalised copy of any source or stream.

Legend: T tokens, D hidden, B sources (blocks), Q queries of one block, L rows of a block of rows, M residual streams,
N = M + 1 or M M, F = M D, W = 2M + M M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longprefill.kernels.contracts import AttnResPhase1, HyperMix
from longprefill.kernels.norm.plain import rms_norm
from longprefill.kernels.shapes import check_shape

BLOCK_ELEMENTS = 1 << 19
"""Numbers that the sources of one block of rows hold together: 2 MiB in fp32."""


def mix(sources_BTD: Sequence[torch.Tensor], query_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """softmax over sources of query . rmsnorm(v), applied to the sources as they are; result in the sources' dtype.

    Raises:
        ValueError: no source, or sources of several shapes or dtypes.
    """
    check_sources(sources_BTD)
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
        ValueError: no block, or blocks of several shapes or dtypes.
    """
    check_sources(blocks_BTD)
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
    check_shape(partial_TD, "partial", *weighted_TD.shape)
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


def hyper_mix(
    streams_TMD: torch.Tensor, projection_WF: torch.Tensor, base_W: torch.Tensor, scale_3: torch.Tensor, *,
    iterations: int, eps: float, norm_eps: float, input_norm_D: torch.Tensor | None = None, input_eps: float = 0.0,
) -> HyperMix:  # fmt: skip
    """Mixing weights of every token and the sublayer's input (hyper-connections, arXiv 2512.24880).

    Args:
        streams_TMD: the residual streams.
        projection_WF: rows of the weights into the sublayer (M), out of it (M), between the streams (M M, from major).
        base_W: added to the scaled projections.
        scale_3: factors of the three kinds of projections.
        iterations: of the Sinkhorn normalisation; columns come last.
        eps: added to weights and to the sums that they are divided by.
        norm_eps: of the norm of a token's streams together.
        input_norm_D: weight of an RMS norm that the input goes through, or None.
        input_eps: of that norm.

    Returns:
        fp32 weights (fp64 for fp64 streams); the input in the streams' dtype.
    """
    dtype = _compute_dtype(streams_TMD)
    num_rows, num_streams, num_hidden = streams_TMD.shape
    input_TD = streams_TMD.new_empty(num_rows, num_hidden)
    raw_TW = torch.empty(num_rows, base_W.shape[0], dtype=dtype, device=streams_TMD.device)
    projection_FW, base_W, scale_3 = projection_WF.to(dtype).t(), base_W.to(dtype), scale_3.to(dtype)
    widths = (num_streams, num_streams, num_streams**2)
    scale_W = scale_3.repeat_interleave(torch.tensor(widths, device=scale_3.device))
    for rows in _row_blocks(streams_TMD[:, 0], num_streams):
        value_LMD = streams_TMD[rows].to(dtype)
        flat_LF = value_LMD.flatten(1)
        inverse_rms_L = torch.linalg.vecdot(flat_LF, flat_LF).div_(flat_LF.shape[1]).add_(norm_eps).rsqrt_()
        raw_LW = torch.addcmul(base_W, flat_LF @ projection_FW, inverse_rms_L.unsqueeze(1) * scale_W)
        raw_TW[rows] = raw_LW
        pre_LM = raw_LW[:, :num_streams].sigmoid().add_(eps)
        input_TD[rows] = torch.bmm(pre_LM.unsqueeze(1), value_LMD).squeeze(1)
    _, post_TM, comb_TN = raw_TW.split(widths, dim=1)
    comb_TMM = comb_TN.unflatten(1, (num_streams, num_streams)).softmax(-1).add_(eps)
    comb_TMM.div_(comb_TMM.sum(1, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb_TMM.div_(comb_TMM.sum(2, keepdim=True).add_(eps))
        comb_TMM.div_(comb_TMM.sum(1, keepdim=True).add_(eps))
    if input_norm_D is not None:
        input_TD = rms_norm(input_TD, input_norm_D, input_eps)
    return HyperMix(input_TD, post_TM.sigmoid().mul_(2), comb_TMM)


def hyper_update(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """Stream j becomes sum_i comb[i, j] stream i + post[j] output; [T, M, D] in the streams' dtype, a new tensor.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    check_update(streams_TMD, output_TD, post_TM, comb_TMM)
    dtype = comb_TMM.dtype
    new_TMD = torch.empty_like(streams_TMD)
    for rows in _row_blocks(output_TD, 2 * streams_TMD.shape[1]):
        weight_LMN = torch.cat((comb_TMM[rows].transpose(1, 2), post_TM[rows].unsqueeze(2)), dim=2)
        source_LND = torch.cat((streams_TMD[rows].to(dtype), output_TD[rows].to(dtype).unsqueeze(1)), dim=1)
        new_TMD[rows] = torch.bmm(weight_LMN, source_LND)
    return new_TMD


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


def _logits(values: torch.Tensor, queries_QD: torch.Tensor, eps: float) -> torch.Tensor:
    """[Q, ...] query . rmsnorm(value): the norm is a number a row, so it scales the product instead of the row."""
    inverse_rms = torch.linalg.vecdot(values, values).div_(values.shape[-1]).add_(eps).rsqrt_()
    return torch.movedim(values @ queries_QD.t(), -1, 0) * inverse_rms


def check_update(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> None:
    """ValueError unless every token has its output and its weights."""
    num_rows, num_streams, num_hidden = streams_TMD.shape
    check_shape(output_TD, "output", num_rows, num_hidden)
    check_shape(post_TM, "post", num_rows, num_streams)
    check_shape(comb_TMM, "comb", num_rows, num_streams, num_streams)


def check_sources(sources_BTD: Sequence[torch.Tensor]) -> None:
    """ValueError unless there is a source, and all are of one shape and dtype."""
    if not sources_BTD:
        raise ValueError("0 sources to mix: need at least 1, the token embedding")
    first = sources_BTD[0]
    for source in sources_BTD:
        if source.dtype != first.dtype:
            raise ValueError(f"sources of dtypes {first.dtype} and {source.dtype}: cast them to one")
        if source.shape != first.shape:
            raise ValueError(f"sources of shapes {list(first.shape)} and {list(source.shape)}: must be one")


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_blocks(x_TD: torch.Tensor, num_sources: int) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, x_TD.shape[1] * num_sources))
    return (slice(start, start + size) for start in range(0, x_TD.shape[0], size))
