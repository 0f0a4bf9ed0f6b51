"""Latent attention by the compiled kernels: the absorbed form over selected rows (cpu_src/sparse.cpp), in bf16 on AMX,
else in fp32, and the dense form in bf16 on AMX (cpu_src/dense.cpp). fp64 and fp16 queries, formats that the kernels do
not know, and the dense form elsewhere go to `plain`. A single query takes the absorbed form: expanding every key for it
costs more than reading it.

Legend: T queries, H heads, R latent rank, P rope dim, S places, Q = nope + P query dim, N nope dim, V value dim.
"""

from __future__ import annotations

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.cpu import format_code, page_arguments
from longprefill.kernels.quant.formats import Fp8LatentRows

from . import plain

STATE_BYTES = 64 << 20
"""Sums of the heads that `dense` takes at once: fp32 [heads, T, V]."""


def sparse(
    q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, scale: float, latent_rank: int
) -> torch.Tensor:
    """[T, H, R] in q's dtype: attention over selected rows (see `plain.sparse`).

    Raises:
        ValueError: shapes that do not fit each other, or an index outside the cache.
    """
    code = format_code(rows.format)
    if q_THL.dtype not in COMPILED_DTYPES or code is None:
        return plain.sparse(q_THL, rows, indices_TS, scale=scale, latent_rank=latent_rank)
    plain.check_sparse(q_THL, rows, indices_TS, latent_rank=latent_rank)
    pages_NPB, table, num_rows = page_arguments(rows)
    return ops().mla_sparse(
        q_THL.contiguous(),
        pages_NPB,
        table,
        num_rows,
        code,
        _format_rank(rows),
        indices_TS.to(torch.int32).contiguous(),
        scale,
        latent_rank,
    )


def dense(
    q_THQ: torch.Tensor, rows: PagedRows, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, *, start: int, scale: float
) -> torch.Tensor:
    """[T, H, V] in q's dtype: causal attention over rows [0, start + t] (see `plain.dense`).

    Raises:
        ValueError: shapes that do not fit each other, or fewer cached rows than the last query sees.
    """
    code = format_code(rows.format)
    if q_THQ.dtype not in COMPILED_DTYPES or code is None or len(q_THQ) == 0:
        return plain.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    plain.check_dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start)
    if len(q_THQ) == 1:
        return _one_query(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    if q_THQ.dtype != torch.bfloat16 or not ops().mla_has_dense():
        return plain.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    pages_NPB, table, num_rows = page_arguments(rows)
    return ops().mla_dense(
        q_THQ.contiguous(),
        pages_NPB,
        table,
        num_rows,
        code,
        _format_rank(rows),
        w_uk_HNR.to(q_THQ.dtype).contiguous(),
        w_uv_HVR.to(q_THQ.dtype).contiguous(),
        start,
        scale,
        STATE_BYTES,
    )


def _one_query(
    q_THQ: torch.Tensor, rows: PagedRows, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, *, start: int, scale: float
) -> torch.Tensor:
    """The absorbed form over everything that the query sees."""
    nope, rank = w_uk_HNR.shape[1:]
    absorbed_HR = torch.bmm(q_THQ[0, :, None, :nope], w_uk_HNR.to(q_THQ.dtype))[:, 0]
    q_THL = torch.cat([absorbed_HR, q_THQ[0, :, nope:]], dim=1)[None]
    visible_TS = torch.arange(start + 1, dtype=torch.int32)[None]
    latent_THR = sparse(q_THL, rows, visible_TS, scale=scale, latent_rank=rank)
    return torch.bmm(latent_THR[0, :, None], w_uv_HVR.to(q_THQ.dtype).mT)[:, 0][None]


def _format_rank(rows: PagedRows) -> int:
    return rows.format.latent_rank if isinstance(rows.format, Fp8LatentRows) else rows.format.width
