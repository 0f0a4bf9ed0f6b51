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
"""Of a compiled `hyper_update` (cpu_src/hyper.cpp)."""


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
    iterations: int, eps: float, norm_eps: float,
) -> HyperMix:  # fmt: skip
    """Mixing weights of every token, fp32, and the sublayer's input in the streams' dtype (see `plain.hyper_mix`)."""
    if streams_TMD.dtype not in COMPILED_DTYPES:
        return plain.hyper_mix(
            streams_TMD, projection_WF, base_W, scale_3, iterations=iterations, eps=eps, norm_eps=norm_eps
        )
    weights = (tensor.float().contiguous() for tensor in (projection_WF, base_W, scale_3))
    return HyperMix(*ops().hyper_mix(streams_TMD.contiguous(), *weights, iterations, eps, norm_eps))


def hyper_update(
    streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
) -> torch.Tensor:
    """[T, M, D] in the streams' dtype, a new tensor (see `plain.hyper_update`)."""
    same_types = output_TD.dtype == streams_TMD.dtype and comb_TMM.dtype == torch.float32
    if not _is_compiled([streams_TMD]) or not same_types or streams_TMD.shape[1] > MAX_STREAMS:
        return plain.hyper_update(streams_TMD, output_TD, post_TM, comb_TMM)
    weights = (post_TM.contiguous(), comb_TMM.contiguous())
    return ops().hyper_update(streams_TMD.contiguous(), *_rows([output_TD]), *weights)


def _is_compiled(sources_BTD: Sequence[torch.Tensor]) -> bool:
    """False for no source at all too: `plain` has the words for that."""
    return len(sources_BTD) > 0 and all(source.dtype in COMPILED_DTYPES for source in sources_BTD)


def _rows(sources_BTD: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [source if source.stride(-1) == 1 else source.contiguous() for source in sources_BTD]
