"""Normalisations as the formulas stand, with the casts of the Hugging Face modules that they stand for.

Legend: T tokens, D hidden, G value heads, V value dim; x is [..., D].
"""

from __future__ import annotations

import torch

from longprefill.kernels.shapes import check_shape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) in fp32, cast to x's dtype, then times weight in that dtype (Hugging Face's order)."""
    check_shape(weight, "weight", x.shape[-1])
    wide = x.to(_compute_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def add_rms_norm(sum_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `sum_TD`, in place, and returns `rms_norm` of it."""
    sum_TD += x_TD
    return rms_norm(sum_TD, weight_D, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, all in fp32; result in x's dtype."""
    check_shape(weight, "weight", x.shape[-1])
    check_shape(bias, "bias", x.shape[-1])
    dtype = _compute_dtype(x)
    wide = x.to(dtype)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(dtype) + bias.to(dtype)).to(x.dtype)


def gated_rms_norm(x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """KDA's output norm: x / rms(x) * weight * sigmoid(gate) over V, in fp32 with one cast to x's dtype at the end."""
    check_shape(gate_TGV, "gate", *x_TGV.shape)
    check_shape(weight_V, "weight", x_TGV.shape[-1])
    dtype = _compute_dtype(x_TGV)
    wide_TGV = x_TGV.to(dtype)
    normed_TGV = wide_TGV * torch.rsqrt(wide_TGV.square().mean(-1, keepdim=True) + eps)
    return (normed_TGV * weight_V.to(dtype) * torch.sigmoid(gate_TGV.to(dtype))).to(x_TGV.dtype)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
