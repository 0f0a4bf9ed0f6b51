"""Muon for matrices (Jordan et al. 2024: momentum whose update is orthogonalised by Newton-Schulz), AdamW for the rest.

On this task AdamW alone needs two to three times the steps until the first digit of an answer is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.98)
ADAM_EPS = 1e-8
SMALLEST_SIDE = 16
"""Narrower matrices (one row a head) go to AdamW."""
VECTOR_LIKE = ("embed", "head", "kda.conv")


class Optimizer:
    """Steps named parameters in place from their gradients; `state` is all that a resumed run needs."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.matrices = [
            name for name, p in parameters.items()
            if p.dim() == 2 and min(p.shape) >= SMALLEST_SIDE and not name.endswith(VECTOR_LIKE)
        ]  # fmt: skip
        self.others = [name for name in parameters if name not in set(self.matrices)]
        self.state: dict[str, torch.Tensor] = {"steps": torch.zeros((), dtype=torch.int64)}
        for name in self.matrices:
            self.state[f"momentum.{name}"] = torch.zeros_like(parameters[name], requires_grad=False)
        for name in self.others:
            self.state[f"mean.{name}"] = torch.zeros_like(parameters[name], requires_grad=False)
            self.state[f"square.{name}"] = torch.zeros_like(parameters[name], requires_grad=False)

    @torch.no_grad()
    def step(self, *, muon_rate: float, adam_rate: float, clip: float) -> float:
        """One update; clears the gradients. Returns the gradients' norm before clipping."""
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = float(torch.sqrt(sum((grad.square().sum() for grad in grads.values()), torch.zeros(()))))
        factor = min(1.0, clip / (norm + 1e-6))
        self._step_matrices((name for name in self.matrices if name in grads), grads, muon_rate, factor)
        self._step_others((name for name in self.others if name in grads), grads, adam_rate, factor)
        for p in self.parameters.values():
            p.grad = None
        return norm

    def _step_matrices(self, names: Iterable[str], grads: dict[str, torch.Tensor], rate: float, factor: float) -> None:
        by_shape: dict[torch.Size, list[str]] = defaultdict(list)
        for name in names:
            by_shape[grads[name].shape].append(name)
        for shape, group in by_shape.items():
            updates = []
            for name in group:
                momentum = self.state[f"momentum.{name}"]
                momentum.mul_(MOMENTUM).add_(grads[name], alpha=factor)
                updates.append(grads[name].mul(factor).add(momentum, alpha=MOMENTUM))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(group, orthogonalized(torch.stack(updates)), strict=True):
                self.parameters[name].add_(update, alpha=-rate * scale)

    def _step_others(self, names: Iterable[str], grads: dict[str, torch.Tensor], rate: float, factor: float) -> None:
        self.state["steps"] += 1
        count = int(self.state["steps"])
        corrections = [1 - beta**count for beta in ADAM_BETAS]
        for name in names:
            grad, mean, square = grads[name] * factor, self.state[f"mean.{name}"], self.state[f"square.{name}"]
            mean.lerp_(grad, 1 - ADAM_BETAS[0])
            square.lerp_(grad.square(), 1 - ADAM_BETAS[1])
            spread = (square / corrections[1]).sqrt_().add_(ADAM_EPS)
            self.parameters[name].addcdiv_(mean, spread, value=-rate / corrections[0])


def orthogonalized(matrices_GRC: torch.Tensor) -> torch.Tensor:
    """The nearest matrices with singular values of about 1 (0.7 to 1.2), fp32; G matrices of one shape."""
    a, b, c = NEWTON_SCHULZ
    x = matrices_GRC.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return (x.transpose(1, 2) if is_tall else x).float()
