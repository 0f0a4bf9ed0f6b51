"""Gated activation and fp32 products by the compiled kernels (cpu_src/linear.cpp): SiLU of fp32 and bf16 rows, products
of bf16 operands on AMX. What is left goes to `plain`.

Legend: T tokens, D hidden, E outputs, F intermediate, J = 2F.
"""

from __future__ import annotations

import math

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops

from . import plain

FEWEST_ROWS = 64
"""Of x in a compiled `linear_fp32`: packing the weights must pay."""
DEPTH_MULTIPLE = 32
"""Of its depth (cpu_src/linear.cpp)."""


def gated(gate_up_TJ: torch.Tensor, *, activation: str, clamp: float | None = None) -> torch.Tensor:
    """act(gate) * up, [T, F] in the operand's dtype, in one pass (see `plain.gated`).

    Raises:
        ValueError: unknown activation.
    """
    plain.check_activation(activation)
    if gate_up_TJ.dtype not in COMPILED_DTYPES or activation != "silu":
        return plain.gated(gate_up_TJ, activation=activation, clamp=clamp)
    rows_TJ = gate_up_TJ if gate_up_TJ.stride(1) == 1 else gate_up_TJ.contiguous()
    return ops().gated_silu(rows_TJ, math.inf if clamp is None else clamp)


def linear_fp32(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """x weight^T, fp32 [T, E]; the products of bf16 operands are exact (see `plain.linear_fp32`)."""
    is_bf16 = x_TD.dtype == weight_ED.dtype == torch.bfloat16
    suits = len(x_TD) >= FEWEST_ROWS and x_TD.shape[1] % DEPTH_MULTIPLE == 0 and len(weight_ED) > 0
    if not is_bf16 or not suits or not ops().linear_has_fp32():
        return plain.linear_fp32(x_TD, weight_ED)
    rows_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    return ops().linear_fp32(rows_TD, weight_ED.contiguous())
