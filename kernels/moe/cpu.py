"""Experts by the compiled kernel (cpu_src/experts.cpp), bf16 on AMX. Other dtypes, processors and activations go to
`plain`, whose matrix products torch runs as fast as they go; so does routing.

Legend: T tokens, D hidden, E experts, A experts a token, F inner, J = 2F.
"""

from __future__ import annotations

import math

import torch

from longprefill.kernels.contracts import Routing
from longprefill.kernels.native.library import ops

from . import plain
from .plain import route

__all__ = ["experts", "route"]


def experts(
    x_TD: torch.Tensor, routing: Routing, gate_up_EJD: torch.Tensor, down_EDF: torch.Tensor, *, activation: str,
    clamp: float | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """sum over a token's experts of weight * down(act(gate) * up), in ascending expert order (see `plain.experts`).

    Gate, up and down are kept in fp32; only what the down projection reads is rounded to bf16.

    Raises:
        ValueError: unknown activation, or an expert number outside [-1, E).
    """
    is_bf16 = all(tensor.dtype == torch.bfloat16 for tensor in (x_TD, gate_up_EJD, down_EDF))
    if not is_bf16 or activation != "silu" or routing.expert_TA.numel() == 0 or not ops().moe_is_compiled():
        return plain.experts(
            x_TD, routing, gate_up_EJD, down_EDF, activation=activation, clamp=clamp, out_dtype=out_dtype
        )
    plain.check_experts(routing, num_experts=len(gate_up_EJD))
    sum_TD = ops().moe_experts(
        x_TD.contiguous(),
        routing.expert_TA.contiguous(),
        routing.weight_TA.float().contiguous(),
        gate_up_EJD.contiguous(),
        down_EDF.contiguous(),
        math.inf if clamp is None else clamp,
    )
    return sum_TD.to(out_dtype or x_TD.dtype)
