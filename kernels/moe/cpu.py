"""Experts by the compiled kernel (cpu_src/experts.cpp), bf16 on AMX. Other dtypes, processors and activations go to
`plain`, whose matrix products torch runs as fast as they go. Routing (cpu_src/route.cpp) takes fp32 logits everywhere.

Legend: T tokens, D hidden, E experts, A experts a token, F inner, J = 2F.
"""

from __future__ import annotations

import math

import torch

from longprefill.kernels.contracts import Routing
from longprefill.kernels.linear import cpu as linear
from longprefill.kernels.native.library import ops

from . import plain


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, *, topk: int, scoring: str, num_groups: int, topk_groups: int,
    normalize: bool, scale: float,
) -> Routing:  # fmt: skip
    """Experts and weights of every token, best first, ties to the lower expert (see `plain.route`).

    Raises:
        ValueError: unknown scoring, groups that do not divide the experts, or fewer competing experts than topk.
    """
    if logits_TE.dtype == torch.float64:
        return plain.route(
            logits_TE, bias_E, topk=topk, scoring=scoring, num_groups=num_groups, topk_groups=topk_groups,
            normalize=normalize, scale=scale,
        )  # fmt: skip
    plain.check_routing(logits_TE.shape[1], topk=topk, scoring=scoring, num_groups=num_groups, topk_groups=topk_groups)
    return Routing(
        *ops().moe_route(
            logits_TE.float().contiguous(),
            None if bias_E is None else bias_E.float().contiguous(),
            topk,
            scoring == "softmax",
            num_groups,
            topk_groups,
            normalize,
            scale,
        )
    )


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
        return plain.experts_by(
            linear, x_TD, routing, gate_up_EJD, down_EDF, activation=activation, clamp=clamp, out_dtype=out_dtype
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
