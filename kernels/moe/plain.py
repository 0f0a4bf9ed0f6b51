"""Mixture of experts in torch operators: tokens sorted by expert, one pair of products an expert.

Legend: T tokens, D hidden, E experts, A experts a token, F intermediate, J = 2F, G groups, M rows of one expert.
"""

from __future__ import annotations

import torch

from longprefill.kernels.contracts import LinearKernels, Routing
from longprefill.kernels.linear import plain as linear_plain
from longprefill.kernels.linear.plain import check_activation

SCORINGS = ("sigmoid", "softmax")


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, *, topk: int, scoring: str, num_groups: int, topk_groups: int,
    normalize: bool, scale: float,
) -> Routing:  # fmt: skip
    """Experts and weights of every token (DeepSeek-V3 routing; scores in fp32, fp64 from fp64).

    Args:
        logits_TE: router logits.
        bias_E: added to the scores for the choice only, or None.
        topk: experts a token, A.
        scoring: "sigmoid" or "softmax" over all experts.
        num_groups: equal groups of neighbouring experts; 1: no grouping.
        topk_groups: groups that compete, best first by the sum of their two best experts.
        normalize: whether the chosen weights are divided by their sum plus 1e-20.
        scale: factor of the weights.

    Returns:
        Experts (int64) and weights [T, A], best first; equal scores: the lower expert (or group) first.

    Raises:
        ValueError: unknown scoring, groups that do not divide the experts, or fewer competing experts than topk.
    """
    num_experts = logits_TE.shape[1]
    check_routing(num_experts, topk=topk, scoring=scoring, num_groups=num_groups, topk_groups=topk_groups)
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    scores_TE = logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(dim=-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    if topk_groups < num_groups:
        choice_TGE = choice_TE.unflatten(1, (num_groups, num_experts // num_groups))
        group_scores_TG = choice_TGE.topk(min(2, choice_TGE.shape[2]), dim=2).values.sum(2)
        closed_TG = _best_first(group_scores_TG)[:, topk_groups:]
        is_closed_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, closed_TG, True)
        choice_TE = choice_TGE.masked_fill(is_closed_TG[..., None], -torch.inf).flatten(1)
    expert_TA = _best_first(choice_TE)[:, :topk].contiguous()
    weight_TA = scores_TE.gather(1, expert_TA)
    if normalize:
        weight_TA = weight_TA / (weight_TA.sum(dim=1, keepdim=True) + 1e-20)
    return Routing(expert_TA, weight_TA * scale)


def experts(
    x_TD: torch.Tensor, routing: Routing, gate_up_EJD: torch.Tensor, down_EDF: torch.Tensor, *, activation: str,
    clamp: float | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """sum over a token's experts of weight * down(act(gate) * up).

    Args:
        x_TD: tokens; products run in this dtype, activations and the sum in fp32 (fp64 from fp64).
        routing: experts of each token without duplicates; -1 stands for an expert that is elsewhere and adds nothing.
        gate_up_EJD: rows 0..F-1 of an expert are its gate, F..2F-1 its up projection.
        down_EDF: the experts' down projections.
        activation: "silu" or "gelu".
        clamp: gate is cut above it and up beyond it on both sides, before the activation; None: neither.

    Returns:
        [T, D] in `out_dtype` (x's if left out). The sum runs in ascending expert order whatever the order of the slots.

    Raises:
        ValueError: unknown activation, or an expert number outside [-1, E).
    """
    return experts_by(
        linear_plain, x_TD, routing, gate_up_EJD, down_EDF, activation=activation, clamp=clamp, out_dtype=out_dtype
    )


def experts_by(
    kernels: LinearKernels, x_TD: torch.Tensor, routing: Routing, gate_up_EJD: torch.Tensor, down_EDF: torch.Tensor, *,
    activation: str, clamp: float | None, out_dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    """`experts` with the products and activations of `kernels`."""
    check_activation(activation)
    out_dtype = out_dtype or x_TD.dtype
    precision = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    sum_TD = torch.zeros_like(x_TD, dtype=precision)
    num_slots = routing.expert_TA.shape[1]
    chosen = routing.expert_TA.reshape(-1)
    if chosen.numel() == 0:
        return sum_TD.to(out_dtype)
    check_experts(routing, num_experts=len(gate_up_EJD))
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen + 1, minlength=len(gate_up_EJD) + 1).tolist()
    weights = routing.weight_TA.reshape(-1).to(precision)
    end = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        slots_M = order[end : end + count]
        end += count
        tokens_M = slots_M // num_slots
        wide_MJ = kernels.linear(x_TD[tokens_M], gate_up_EJD[expert])
        hidden_MF = kernels.gated(wide_MJ, activation=activation, clamp=clamp)
        out_MD = kernels.linear(hidden_MF, down_EDF[expert]).to(precision)
        # A token comes once per expert at most: a call adds one summand to a row, and calls follow the experts' order.
        sum_TD.index_add_(0, tokens_M, out_MD.mul_(weights[slots_M, None]))
    return sum_TD.to(out_dtype)


def check_routing(num_experts: int, *, topk: int, scoring: str, num_groups: int, topk_groups: int) -> None:
    """ValueError unless scoring, groups and topk are possible with so many experts."""
    if scoring not in SCORINGS:
        raise ValueError(f"scoring={scoring!r}: routers score by {' or '.join(SCORINGS)}")
    if num_groups < 1 or num_experts % num_groups or not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"num_groups={num_groups}, topk_groups={topk_groups} of {num_experts} experts: groups divide the experts "
            "evenly, and 1 to num_groups of them compete"
        )
    if not 1 <= topk <= num_experts // num_groups * topk_groups:
        raise ValueError(f"topk={topk}: {topk_groups} groups offer {num_experts // num_groups * topk_groups} experts")


def check_experts(routing: Routing, *, num_experts: int) -> None:
    """ValueError unless every expert number (there is one at least) is in [-1, num_experts)."""
    lowest, highest = int(routing.expert_TA.min()), int(routing.expert_TA.max())
    if lowest < -1 or highest >= num_experts:
        raise ValueError(
            f"experts {lowest} to {highest} are routed: this call holds 0 to {num_experts - 1}, and -1 stands for none"
        )


def _best_first(scores_TE: torch.Tensor) -> torch.Tensor:
    return scores_TE.sort(dim=1, descending=True, stable=True).indices
