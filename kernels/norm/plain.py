"""Normalisations by blocks of rows that stay in cache, with the casts of the Hugging Face modules that they stand for.

Legend: T tokens, D hidden, G value heads, V value dim; x is [..., D].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from longprefill.kernels.shapes import check_shape

BLOCK_ELEMENTS = 1 << 18
"""Elements a block of rows: about 1 MiB in fp32."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) in fp32, cast to x's dtype, then times weight in that dtype (Hugging Face's order)."""
    check_shape(weight, "weight", x.shape[-1])
    out, scale = torch.empty(x.shape, dtype=x.dtype, device=x.device), weight.to(x.dtype)
    for rows in _row_blocks(x):
        wide, block = x[rows].to(_compute_dtype(x)), out[rows]
        block.copy_(wide * _inverse_rms(wide, eps)).mul_(scale)
    return out


def add_rms_norm(sum_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `sum_TD`, in place, and returns `rms_norm` of it."""
    sum_TD += x_TD
    return rms_norm(sum_TD, weight_D, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, all in fp32; result in x's dtype."""
    dtype = _compute_dtype(x)
    return torch.nn.functional.layer_norm(x.to(dtype), (x.shape[-1],), weight.to(dtype), bias.to(dtype), eps).to(
        x.dtype
    )


def gated_rms_norm(x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """KDA's output norm: x / rms(x) * weight * sigmoid(gate) over V, in fp32 with one cast to x's dtype at the end."""
    check_shape(gate_TGV, "gate", *x_TGV.shape)
    check_shape(weight_V, "weight", x_TGV.shape[-1])
    dtype = _compute_dtype(x_TGV)
    out_TGV, weight_V = torch.empty(x_TGV.shape, dtype=x_TGV.dtype, device=x_TGV.device), weight_V.to(dtype)
    for rows in _row_blocks(x_TGV):
        wide = x_TGV[rows].to(dtype)
        factor = torch.sigmoid(gate_TGV[rows].to(dtype)).mul_(weight_V)
        out_TGV[rows] = factor.mul_(wide).mul_(_inverse_rms(wide, eps))
    return out_TGV


def _inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.linalg.vecdot(wide, wide).div_(wide.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_blocks(x: torch.Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, x[:1].numel()))
    return (slice(start, start + size) for start in range(0, x.shape[0], size))
