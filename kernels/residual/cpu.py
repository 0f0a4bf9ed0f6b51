"""Attention Residuals (cpu_src/residual.cpp) and hyper-connections (cpu_src/hyper.cpp) by the compiled kernels; fp64
and fp16 go to `plain`.

Legend: T tokens, D hidden, B sources (blocks), Q queries of one block, M streams, W = 2M + M M weights, F = M D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.contracts import AttnResPhase1, HyperMix
from longprefill.kernels.native.library import COMPILED_DTYPES, ops

from . import plain

MAX_STREAMS = 16
"""Of the compiled hyper-connections (cpu_src/hyper.cpp)."""


def mix(sources_BTD: Sequence[torch.Tensor], query_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """softmax over sources of query . rmsnorm(v), applied to the sources as they are; result in the sources' dtype.

    Raises:
        ValueError: no source, or sources of several shapes or dtypes.
    """
    if not _is_compiled(sources_BTD):
        return plain.mix(sources_BTD, query_D, eps=eps)
    return ops().attn_res_mix(_rows(sources_BTD), query_D.float().contiguous(), eps)


def prepare(blocks_BTD: Sequence[torch.Tensor], queries_QD: torch.Tensor, *, eps: float) -> AttnResPhase1:
    """Maximum, sum and weighted sum over finished blocks for each query, fp32.

    Raises:
        ValueError: no block, or blocks of several shapes or dtypes.
    """
    if not _is_compiled(blocks_BTD) or queries_QD.dtype == torch.float64:
        return plain.prepare(blocks_BTD, queries_QD, eps=eps)
    return AttnResPhase1(*ops().attn_res_prepare(_rows(blocks_BTD), queries_QD.float().contiguous(), eps))


def update(
    partial_TD: torch.Tensor | None, phase1: AttnResPhase1, query: int, query_D: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Adds the running partial sum to phase 1 of query number `query`; result in the partial's dtype (None: fp32)."""
    if partial_TD is None or not _is_compiled([partial_TD]) or phase1.weighted_QTD.dtype != torch.float32:
        return plain.update(partial_TD, phase1, query, query_D, eps=eps)
    one_query = (part[query].contiguous() for part in phase1)
    return ops().attn_res_update(*_rows([partial_TD]), *one_query, query_D.float().contiguous(), eps)


def hyper_mix(
    streams_TMD: torch.Tensor, projection_WF: torch.Tensor, base_W: torch.Tensor, scale_3: torch.Tensor, *,
    iterations: int, eps: float, norm_eps: float, input_norm_D: torch.Tensor | None = None, input_eps: float = 0.0,
) -> HyperMix:  # fmt: skip
    """Mixing weights of every token, fp32, and the sublayer's input in the streams' dtype (see `plain.hyper_mix`)."""
    if not _are_compiled_streams(streams_TMD):
        return plain.hyper_mix(
            streams_TMD, projection_WF, base_W, scale_3, iterations=iterations, eps=eps, norm_eps=norm_eps,
            input_norm_D=input_norm_D, input_eps=input_eps,
        )  # fmt: skip
    weights = (tensor.float().contiguous() for tensor in (projection_WF, base_W, scale_3))
    input_norm = None if input_norm_D is None else input_norm_D.to(streams_TMD.dtype).contiguous()
    return HyperMix(
        *ops().hyper_mix(streams_TMD.contiguous(), *weights, iterations, eps, norm_eps, input_norm, input_eps)
    )


def hyper_update(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """[T, M, D] in the streams' dtype, a new tensor (see `plain.hyper_update`)."""
    if not _are_compiled_streams(streams_TMD, output_TD, comb_TMM):
        return plain.hyper_update(streams_TMD, output_TD, post_TM, comb_TMM)
    weights = (post_TM.contiguous(), comb_TMM.contiguous())
    return ops().hyper_update(streams_TMD.contiguous(), *_rows([output_TD]), *weights)


def hyper_update_mix(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor,
    projection_WF: torch.Tensor, base_W: torch.Tensor, scale_3: torch.Tensor, *,
    iterations: int, eps: float, norm_eps: float, input_norm_D: torch.Tensor | None = None, input_eps: float = 0.0,
) -> HyperMix:  # fmt: skip
    """`hyper_update`, written over the streams, then `hyper_mix` of them while they are in cache."""
    if not _are_compiled_streams(streams_TMD, output_TD, comb_TMM) or not streams_TMD.is_contiguous():
        return plain.hyper_update_mix(
            streams_TMD, output_TD, post_TM, comb_TMM, projection_WF, base_W, scale_3, iterations=iterations, eps=eps,
            norm_eps=norm_eps, input_norm_D=input_norm_D, input_eps=input_eps,
        )  # fmt: skip
    weights = (tensor.float().contiguous() for tensor in (projection_WF, base_W, scale_3))
    input_norm = None if input_norm_D is None else input_norm_D.to(streams_TMD.dtype).contiguous()
    return HyperMix(
        *ops().hyper_update_mix(
            streams_TMD, *_rows([output_TD]), post_TM.contiguous(), comb_TMM.contiguous(), *weights, iterations, eps,
            norm_eps, input_norm, input_eps,
        )
    )  # fmt: skip


def hyper_final(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """The mean of the streams after `hyper_update`, which are not written anywhere; [T, D] in their dtype."""
    if not _are_compiled_streams(streams_TMD, output_TD, comb_TMM):
        return plain.hyper_final(streams_TMD, output_TD, post_TM, comb_TMM)
    weights = (post_TM.contiguous(), comb_TMM.contiguous())
    return ops().hyper_final(streams_TMD.contiguous(), *_rows([output_TD]), *weights)


def _are_compiled_streams(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor | None = None, comb_TMM: torch.Tensor | None = None
) -> bool:
    return (
        streams_TMD.dtype in COMPILED_DTYPES
        and streams_TMD.shape[1] <= MAX_STREAMS
        and (output_TD is None or output_TD.dtype == streams_TMD.dtype)
        and (comb_TMM is None or comb_TMM.dtype == torch.float32)
    )


def _is_compiled(sources_BTD: Sequence[torch.Tensor]) -> bool:
    """False for no source at all too: `plain` has the words for that."""
    return len(sources_BTD) > 0 and all(source.dtype in COMPILED_DTYPES for source in sources_BTD)


def _rows(sources_BTD: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [source if source.stride(-1) == 1 else source.contiguous() for source in sources_BTD]
