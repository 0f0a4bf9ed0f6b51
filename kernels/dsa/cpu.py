"""Lightning indexer by the compiled kernel (cpu_src/indexer.cpp). fp64 and fp16 queries, and formats that the kernel
does not know, go to `plain`; so do `scores` and `pool_keys`, which are no part of a prefill's time.

Legend: T queries, I indexer heads, X indexer dim, S places.
"""

from __future__ import annotations

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.cpu import format_code, page_arguments

from . import plain
from .plain import pool_keys, scores

__all__ = ["pool_keys", "scores", "select", "select_pooled"]


def select(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int) -> torch.Tensor:
    """int32 [T, topk]: the min(topk, start + t + 1) best of [0, start + t], ascending, then -1 (see `plain.select`).

    Raises:
        ValueError: shapes that do not fit each other, topk < 1, or fewer cached keys than the last query sees.
    """
    if not _is_compiled(q_TIX, keys):
        return plain.select(q_TIX, w_TI, keys, start=start, topk=topk)
    plain.check_queries(q_TIX, w_TI, keys, needed=start + len(q_TIX))
    if topk < 1:
        raise ValueError(f"topk={topk}: an indexer keeps at least one position")
    return _select(q_TIX, w_TI, keys, start=start, pool=1, places=topk)


def select_pooled(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, pooled: PagedRows, *, start: int, topk: int, pool: int
) -> torch.Tensor:
    """int32 [T, topk + pool - 1]: tokens of the best pools and of the incomplete tail (see `plain.select_pooled`).

    Raises:
        ValueError: as `select`, or pool < 1.
    """
    if not _is_compiled(q_TIX, pooled) or topk < pool or pool < 1:
        return plain.select_pooled(q_TIX, w_TI, pooled, start=start, topk=topk, pool=pool)
    plain.check_queries(q_TIX, w_TI, pooled, needed=(start + len(q_TIX)) // pool)
    chosen_TS = _select(q_TIX, w_TI, pooled, start=start, pool=pool, places=topk // pool)
    visible_T = torch.arange(start + 1, start + len(q_TIX) + 1)
    return plain.tokens_of_pools(chosen_TS, visible_T, topk=topk, pool=pool)


def _is_compiled(q_TIX: torch.Tensor, keys: PagedRows) -> bool:
    is_key_format = keys.format.name != "fp8"  # latent rows: what is read depends on their rank
    return q_TIX.dtype in COMPILED_DTYPES and is_key_format and format_code(keys.format) is not None


def _select(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, pool: int, places: int
) -> torch.Tensor:
    return ops().indexer_select(
        q_TIX.contiguous(),
        w_TI.float().contiguous(),
        *page_arguments(keys),
        format_code(keys.format),
        start,
        pool,
        places,
    )
