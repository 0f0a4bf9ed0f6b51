"""Attention Residuals by the compiled kernels (cpu_src/residual.cpp); fp64 and fp16 go to `plain`.

Hyper-connections have no compiled form yet: they are `plain`'s.

Legend: T tokens, D hidden, B sources (blocks), Q queries of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.contracts import AttnResPhase1
from longprefill.kernels.native.library import COMPILED_DTYPES, ops

from . import plain
from .plain import hyper_mix as hyper_mix
from .plain import hyper_update as hyper_update


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


def _is_compiled(sources_BTD: Sequence[torch.Tensor]) -> bool:
    """False for no source at all too: `plain` has the words for that."""
    return len(sources_BTD) > 0 and all(source.dtype in COMPILED_DTYPES for source in sources_BTD)


def _rows(sources_BTD: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [source if source.stride(-1) == 1 else source.contiguous() for source in sources_BTD]
