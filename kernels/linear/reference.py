"""Gated activation and fp32 products by their formulas. Runs in fp64 when the inputs are fp64.

Legend: T tokens, D hidden, E outputs, F intermediate, J = 2F.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def gated(gate_up_TJ: torch.Tensor, *, activation: str, clamp: float | None = None) -> torch.Tensor:
    """act(gate) * up, [T, F] in the operand's dtype."""
    act = {"silu": functional.silu, "gelu": functional.gelu}[activation]
    gate_TF, up_TF = gate_up_TJ.to(_precision(gate_up_TJ)).chunk(2, dim=1)
    if clamp is not None:
        gate_TF, up_TF = gate_TF.clamp(max=clamp), up_TF.clamp(-clamp, clamp)
    return (act(gate_TF) * up_TF).to(gate_up_TJ.dtype)


def linear(x_TD: torch.Tensor, weight_ED: torch.Tensor, *, out_TE: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T, [T, E] in x's dtype, by products and sums in fp32 (fp64 for fp64 x)."""
    result_TE = linear_fp32(x_TD, weight_ED).to(x_TD.dtype)
    return result_TE if out_TE is None else out_TE.copy_(result_TE)


def linear_fp32(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """x weight^T in fp32 (fp64 for fp64 x), [T, E]."""
    precision = _precision(x_TD)
    return x_TD.to(precision) @ weight_ED.to(precision).T


def _precision(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
