"""Mixture of experts by its formulas, token by token. Runs in fp64 when the inputs are fp64.

Legend: T tokens, D hidden, E experts, A experts a token, F intermediate, J = 2F.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from longprefill.kernels.contracts import Routing


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, *, topk: int, scoring: str, num_groups: int, topk_groups: int,
    normalize: bool, scale: float,
) -> Routing:  # fmt: skip
    """Experts and weights of every token, best first, ties to the lower expert."""
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    scores_TE = logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(dim=-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    num_tokens, num_experts = logits_TE.shape
    size = num_experts // num_groups
    experts_TA = torch.empty(num_tokens, topk, dtype=torch.int64)
    for t, choice in enumerate(choice_TE.tolist()):
        groups = [range(group * size, (group + 1) * size) for group in range(num_groups)]
        best_two = {group: _sum_of_best(choice_TE[t, group.start : group.stop], 2) for group in groups}
        open_groups = sorted(groups, key=lambda group: (-best_two[group], group.start))[:topk_groups]
        candidates = [e for group in open_groups for e in group]
        experts_TA[t] = torch.tensor(sorted(candidates, key=lambda e: (-choice[e], e))[:topk])
    experts_TA = experts_TA.to(logits_TE.device)
    weights_TA = scores_TE.gather(1, experts_TA)
    if normalize:
        weights_TA = weights_TA / (weights_TA.sum(dim=1, keepdim=True) + 1e-20)
    return Routing(experts_TA, weights_TA * scale)


def experts(
    x_TD: torch.Tensor, routing: Routing, gate_up_EJD: torch.Tensor, down_EDF: torch.Tensor, *, activation: str,
    clamp: float | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """[T, D] in `out_dtype` (x's if left out): each token's weighted sum in ascending expert order; -1 adds none."""
    out_dtype = out_dtype or x_TD.dtype
    precision = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    act = {"silu": functional.silu, "gelu": functional.gelu}[activation]
    sum_TD = torch.zeros_like(x_TD, dtype=precision)
    for t, (chosen_A, weights_A) in enumerate(zip(*routing, strict=True)):
        for expert, weight in sorted(zip(chosen_A.tolist(), weights_A.tolist(), strict=True)):
            if expert >= 0:
                gate_F, up_F = (gate_up_EJD[expert].to(precision) @ x_TD[t].to(precision)).chunk(2)
                if clamp is not None:
                    gate_F, up_F = gate_F.clamp(max=clamp), up_F.clamp(-clamp, clamp)
                sum_TD[t] += weight * (down_EDF[expert].to(precision) @ (act(gate_F) * up_F))
    return sum_TD.to(out_dtype)


def _sum_of_best(scores_E: torch.Tensor, count: int) -> float:
    # in the scores' own precision: summed in fp64, groups that tie in fp32 would not
    return float(scores_E.sort(descending=True).values[:count].sum())
