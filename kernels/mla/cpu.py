"""Latent attention by the compiled kernel (cpu_src/sparse.cpp): the absorbed form over selected rows, in bf16 on AMX,
else in fp32. fp64 and fp16 queries, and formats that the kernel does not know, go to `plain`, and so does the dense
form for many queries. A single query takes the absorbed form: expanding every key for it costs more than reading it.

Legend: T queries, H heads, R latent rank, P rope dim, S places, Q = nope + P query dim, N nope dim, V value dim.
"""

from __future__ import annotations

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.cpu import format_code, page_arguments
from longprefill.kernels.quant.formats import Fp8LatentRows

from . import plain


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
    format_rank = rows.format.latent_rank if isinstance(rows.format, Fp8LatentRows) else rows.format.width
    return ops().mla_sparse(
        q_THL.contiguous(),
        pages_NPB,
        table,
        num_rows,
        code,
        format_rank,
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
    if len(q_THQ) != 1 or q_THQ.dtype not in COMPILED_DTYPES or format_code(rows.format) is None:
        return plain.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    plain.check_dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start)
    nope, rank = w_uk_HNR.shape[1:]
    absorbed_HR = torch.bmm(q_THQ[0, :, None, :nope], w_uk_HNR.to(q_THQ.dtype))[:, 0]
    q_THL = torch.cat([absorbed_HR, q_THQ[0, :, nope:]], dim=1)[None]
    visible_TS = torch.arange(start + 1, dtype=torch.int32)[None]
    latent_THR = sparse(q_THL, rows, visible_TS, scale=scale, latent_rank=rank)
    return torch.bmm(latent_THR[0, :, None], w_uv_HVR.to(q_THQ.dtype).mT)[:, 0][None]
