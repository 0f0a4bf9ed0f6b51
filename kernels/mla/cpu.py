"""Latent attention by the compiled kernels: the absorbed form over selected rows (cpu_src/sparse.cpp) and the expanded
form, dense or over selected rows: in bf16 on AMX (cpu_src/expanded.cpp), in fp32 products where there are no bf16 ones
(cpu_src/expanded_fp32.cpp). fp64 and fp16 queries, formats that the kernels do not know, and the dense form on what is
left go to `plain`. A single query takes the absorbed form: expanding every key for it costs more than reading it.

Legend: T queries, H heads, R latent rank, P rope dim, S places, Q = nope + P query dim, N nope dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from longprefill.kernels.linear import cpu as linear
from longprefill.kernels.native.library import COMPILED_DTYPES, ops
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.cpu import format_code, page_arguments
from longprefill.kernels.quant.formats import Fp8LatentRows

from . import plain

STATE_BYTES = 64 << 20
"""Sums of the heads that the expanded form takes at once: fp32 [heads, T, V]."""


class FormCosts(NamedTuple):
    """What the absorbed form costs, in products of the expanded one (measured, README.md)."""

    product: float
    gather: float
    """One number of a selected row, read and widened."""
    fewest_heads: int
    """Fewer are multiplied as if they were so many."""


AMX_COSTS = FormCosts(product=0.8, gather=107, fewest_heads=16)
FP32_COSTS = FormCosts(product=1.1, gather=7, fewest_heads=4)


def sparse(
    q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, scale: float, latent_rank: int
) -> torch.Tensor:
    """[T, H, R] in q's dtype: attention over selected rows (see `plain.sparse`).

    Raises:
        ValueError: as `plain.sparse` does.
    """
    code = format_code(rows.format)
    if q_THL.dtype not in COMPILED_DTYPES or code is None:
        return plain.sparse(q_THL, rows, indices_TS, scale=scale, latent_rank=latent_rank)
    plain.check_sparse(q_THL, rows, indices_TS, latent_rank=latent_rank, scale=scale)
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
        ValueError: as `plain.dense` does.
    """
    code = format_code(rows.format)
    if q_THQ.dtype not in COMPILED_DTYPES or code is None or len(q_THQ) == 0:
        return plain.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    plain.check_dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    if len(q_THQ) == 1:
        return _one_query(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    if _expanding_op(q_THQ) is None:
        return plain.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    return _expanded(q_THQ, rows, None, w_uk_HNR, w_uv_HVR, start=start, scale=scale)


def selected(
    q_THQ: torch.Tensor,
    rows: PagedRows,
    indices_TS: torch.Tensor,
    w_uk_HNR: torch.Tensor,
    w_uv_HVR: torch.Tensor,
    *,
    start: int,
    scale: float,
) -> torch.Tensor:
    """[T, H, V] in q's dtype: attention over selected rows (see `plain.selected`), absorbed or as a mask over expanded
    keys, whichever is faster for this shape.

    Raises:
        ValueError: as `plain.selected` does.
    """
    is_compiled = format_code(rows.format) is not None and _expanding_op(q_THQ) is not None
    plain.check_selected(q_THQ, rows, indices_TS, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    if is_compiled and len(q_THQ) > 1 and is_expanding_faster(q_THQ, indices_TS, w_uk_HNR, w_uv_HVR, start):
        return _expanded(q_THQ, rows, indices_TS, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    return _absorbed(q_THQ, rows, indices_TS, w_uk_HNR, w_uv_HVR, scale=scale)


def _expanding_op(q_THQ: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """The operator of the expanded form for these queries: bf16 on AMX, fp32 products where the processor has no bf16
    ones, none elsewhere."""
    if q_THQ.dtype == torch.bfloat16 and ops().mla_has_expanded():
        return ops().mla_expanded
    if q_THQ.dtype in COMPILED_DTYPES and ops().mla_has_expanded_fp32():
        return ops().mla_expanded_fp32
    return None


def is_expanding_faster(
    q_THQ: torch.Tensor, indices_TS: torch.Tensor, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, start: int
) -> bool:
    """Of the two forms over these rows, by counted products at measured costs."""
    num_queries, num_heads, width = q_THQ.shape
    nope, rank = w_uk_HNR.shape[1:]
    value, num_keys = w_uv_HVR.shape[1], start + num_queries
    pairs = num_queries * start + num_queries * (num_queries + 1) // 2
    expanded = num_heads * (pairs * (width + value) + num_keys * rank * (nope + value))
    latent = rank + width - nope
    costs = AMX_COSTS if q_THQ.dtype == torch.bfloat16 and ops().mla_has_expanded() else FP32_COSTS
    a_row = costs.product * max(num_heads, costs.fewest_heads) * (latent + rank) + costs.gather * latent
    return expanded < indices_TS.numel() * a_row


def _expanded(
    q_THQ: torch.Tensor,
    rows: PagedRows,
    indices_TS: torch.Tensor | None,
    w_uk_HNR: torch.Tensor,
    w_uv_HVR: torch.Tensor,
    *,
    start: int,
    scale: float,
) -> torch.Tensor:
    expand = _expanding_op(q_THQ)
    assert expand is not None
    pages_NPB, table, num_rows = page_arguments(rows)
    return expand(
        q_THQ.contiguous(),
        pages_NPB,
        table,
        num_rows,
        format_code(rows.format),
        _format_rank(rows),
        _heads(w_uk_HNR.to(q_THQ.dtype)),
        _heads(w_uv_HVR.to(q_THQ.dtype)),
        None if indices_TS is None else indices_TS.to(torch.int32).contiguous(),
        start,
        scale,
        STATE_BYTES,
    )


def _one_query(
    q_THQ: torch.Tensor, rows: PagedRows, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, *, start: int, scale: float
) -> torch.Tensor:
    """The absorbed form over everything that the query sees."""
    visible_TS = torch.arange(start + 1, dtype=torch.int32)[None]
    return _absorbed(q_THQ, rows, visible_TS, w_uk_HNR, w_uv_HVR, scale=scale)


def _absorbed(
    q_THQ: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor,
    *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention over selected rows with absorbed queries; the products on both sides as fast as they go here."""
    (num_queries, num_heads, _), (_, nope, rank) = q_THQ.shape, w_uk_HNR.shape
    w_uk_HNR, w_uv_HVR = w_uk_HNR.to(q_THQ.dtype), w_uv_HVR.to(q_THQ.dtype)
    if not linear.has_products(q_THQ, w_uk_HNR):
        latent_THR = sparse(plain.absorbed(q_THQ, w_uk_HNR), rows, indices_TS, scale=scale, latent_rank=rank)
        return plain.values_of(latent_THR, w_uv_HVR)
    q_THL = q_THQ.new_empty(num_queries, num_heads, rows.format.width)
    linear.multiply_heads(q_THQ[..., :nope], w_uk_HNR, q_THL[..., :rank], is_transposed=True)
    q_THL[..., rank:] = q_THQ[..., nope:]
    out_THV = q_THQ.new_empty(num_queries, num_heads, w_uv_HVR.shape[1])
    linear.multiply_heads(sparse(q_THL, rows, indices_TS, scale=scale, latent_rank=rank), w_uv_HVR, out_THV)
    return out_THV


def _format_rank(rows: PagedRows) -> int:
    return rows.format.latent_rank if isinstance(rows.format, Fp8LatentRows) else rows.format.width


def _heads(w_HNR: torch.Tensor) -> torch.Tensor:
    """Each head's matrix in one piece; heads may lie apart, as parts of a layer's kv_b do, and are not copied."""
    return w_HNR if w_HNR.stride()[1:] == (w_HNR.shape[2], 1) else w_HNR.contiguous()
