"""Inputs of the KDA tests: gates of every kind, collinear keys, per-head differences, K != V.

Legend: T tokens, H q/k heads, G value heads, K key dim, V value dim, N segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from longprefill.kernels.kda import reference

LOWER_BOUND = -5.0
REGIMES = ("zero", "tiny", "bound", "uniform", "spikes", "infinite", "all_infinite")
"""Kinds of gates: no decay, slow decay, the bounded gate saturated, spread, 5 % at -1000, 5 % and 100 % at -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call's inputs in fp32 (`v` may be bf16), the segments and the incoming states."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial: torch.Tensor
    offsets: tuple[int, ...]
    scale: float

    def changed(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def doubled(self) -> Case:
        """The same numbers in fp64."""
        names = ("q", "k", "v", "g", "beta", "initial")
        return replace(self, **{name: getattr(self, name).double() for name in names})

    def prepare(self, backend: Any) -> Any:
        return backend.prepare(self.q, self.k, self.v, self.g, self.beta, offsets=self.offsets, scale=self.scale)

    def scan(self, backend: Any) -> Any:
        return backend.scan(self.prepare(backend), self.initial)


def make_case(
    *, tokens: int = 0, offsets: tuple[int, ...] | None = None, heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (24, 40), regime: str = "uniform", collinear: float | None = None,
    beta: float | None = None, seed: int = 0,
) -> Case:  # fmt: skip
    """`collinear` is the noise on one shared key direction; `beta` None draws from [0, 1]."""
    offsets = (0, tokens) if offsets is None else offsets
    num_tokens, (num_heads, value_heads), (num_keys, num_values) = offsets[-1], heads, dims
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    k = normal(num_tokens, num_heads, num_keys)
    if collinear is not None:
        k = normal(1, num_heads, num_keys) + collinear * k
    uniform = torch.rand(num_tokens, value_heads, num_keys, generator=generator)
    beta_TG = torch.rand(num_tokens, value_heads, generator=generator)
    return Case(
        q=reference.l2_normalize(normal(num_tokens, num_heads, num_keys) + 0.3),
        k=reference.l2_normalize(k),
        v=normal(num_tokens, value_heads, num_values) + torch.arange(value_heads).unsqueeze(-1),
        g=gates(regime, uniform),
        beta=beta_TG if beta is None else torch.full_like(beta_TG, beta),
        initial=normal(len(offsets) - 1, value_heads, num_keys, num_values),
        offsets=offsets,
        scale=num_keys**-0.5,
    )


def gates(regime: str, uniform: torch.Tensor) -> torch.Tensor:
    """Log decays of one kind, made from uniform numbers of [0, 1)."""
    match regime:
        case "zero":
            return torch.zeros_like(uniform)
        case "tiny":
            return torch.full_like(uniform, -1e-3)
        case "bound":
            return torch.full_like(uniform, LOWER_BOUND)
        case "uniform":
            return LOWER_BOUND * uniform
        case "spikes":
            return torch.where(uniform < 0.05, torch.full_like(uniform, -1000.0), -0.1 * uniform)
        case "infinite":
            return torch.where(uniform < 0.05, torch.full_like(uniform, -torch.inf), -0.1 * uniform)
        case "all_infinite":
            return torch.full_like(uniform, -torch.inf)
    raise ValueError(f"regime={regime!r}: one of {REGIMES}")
