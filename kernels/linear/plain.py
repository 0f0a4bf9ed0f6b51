"""Gated activation and fp32 products in torch operators, by blocks of rows that stay in cache.

Legend: T tokens, D hidden, E outputs, F intermediate, J = 2F.
"""

from __future__ import annotations

import torch
from torch.nn import functional

ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}
"""Gate activations; "gelu" is the exact one, by erf."""
BLOCK_ELEMENTS = 1 << 18
"""Elements of a block of rows: about 1 MiB in fp32."""


def gated(gate_up_TJ: torch.Tensor, *, activation: str, clamp: float | None = None) -> torch.Tensor:
    """act(gate) * up, [T, F] in the operand's dtype, computed in fp32 (fp64 for fp64).

    Args:
        gate_up_TJ: the gate in the first half of a row, up in the second.
        activation: "silu" or "gelu".
        clamp: gate is cut above it and up beyond it on both sides, before the activation; None: neither.

    Raises:
        ValueError: unknown activation.
    """
    check_activation(activation)
    inner = gate_up_TJ.shape[1] // 2
    out_TF = torch.empty(len(gate_up_TJ), inner, dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    size = max(1, BLOCK_ELEMENTS // max(1, 2 * inner))
    for start in range(0, len(gate_up_TJ), size):
        wide_LJ = gate_up_TJ[start : start + size].to(_precision(gate_up_TJ))
        gate_LF, up_LF = wide_LJ[:, :inner], wide_LJ[:, inner:]
        if clamp is not None:
            gate_LF, up_LF = gate_LF.clamp(max=clamp), up_LF.clamp(-clamp, clamp)
        out_TF[start : start + size] = ACTIVATIONS[activation](gate_LF) * up_LF
    return out_TF


def linear(x_TD: torch.Tensor, weight_ED: torch.Tensor, *, out_TE: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T, [T, E] in x's dtype; written to `out_TE` and that returned where it is given."""
    return functional.linear(x_TD, weight_ED) if out_TE is None else torch.mm(x_TD, weight_ED.T, out=out_TE)


def linear_fp32(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """x weight^T, fp32 [T, E] (fp64 for fp64 x): both operands as they are, products and sums in fp32."""
    precision = _precision(x_TD)
    return functional.linear(x_TD.to(precision), weight_ED.to(precision))


def check_activation(activation: str) -> None:
    """ValueError unless the activation is known."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: feed-forwards use {' or '.join(ACTIVATIONS)}")


def _precision(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
