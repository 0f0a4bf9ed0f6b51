"""Normalisations by the compiled kernels (cpu_src/norm.cpp); fp64 and fp16 go to `plain`.

Legend: T tokens, D hidden, G value heads, V value dim; x is [..., D].
"""

from __future__ import annotations

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops

from . import plain


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) in fp32, cast to x's dtype, then times weight in that dtype (Hugging Face's order)."""
    if x.dtype not in COMPILED_DTYPES:
        return plain.rms_norm(x, weight, eps)
    return ops().rms_norm(x.contiguous(), weight.to(x.dtype).contiguous(), eps)


def add_rms_norm(sum_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `sum_TD`, in place, and returns `rms_norm` of it: one pass over memory."""
    if x_TD.dtype not in COMPILED_DTYPES or sum_TD.dtype != x_TD.dtype or not sum_TD.is_contiguous():
        return plain.add_rms_norm(sum_TD, x_TD, weight_D, eps)
    return ops().add_rms_norm(sum_TD, x_TD.contiguous(), weight_D.to(x_TD.dtype).contiguous(), eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, all in fp32; result in x's dtype."""
    if x.dtype not in COMPILED_DTYPES:
        return plain.layer_norm(x, weight, bias, eps)
    return ops().layer_norm(x.contiguous(), weight.float().contiguous(), bias.float().contiguous(), eps)


def gated_rms_norm(x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """KDA's output norm: x / rms(x) * weight * sigmoid(gate) over V, in fp32 with one cast to x's dtype at the end."""
    if x_TGV.dtype not in COMPILED_DTYPES or gate_TGV.dtype != x_TGV.dtype:
        return plain.gated_rms_norm(x_TGV, gate_TGV, weight_V, eps)
    return ops().gated_rms_norm(x_TGV.contiguous(), gate_TGV.contiguous(), weight_V.float().contiguous(), eps)
