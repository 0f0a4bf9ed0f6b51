"""Seeded traces of long documents: heavy-tailed lengths, prefixes that are shared, arrivals in bursts or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS, Request, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecipe:
    """What a generated trace looks like. Equal recipes give equal traces."""

    num_requests: int = 2000
    seed: int = 0
    requests_per_s: float = 1.0
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps: 1 is Poisson, more comes in bursts (gamma)."""
    least_tokens: int = 32_768
    most_tokens: int = 1_048_576
    tail: float = 1.2
    """Exponent of the bounded Pareto distribution of document lengths: the smaller, the heavier."""
    short_share: float = 0.0
    """Share of requests that are not documents: lognormal around `short_tokens`."""
    short_tokens: int = 8192
    shared_share: float = 0.5
    """Share of documents that begin with what an earlier one began with."""
    output_tokens: int = 500
    """Mean of a geometric distribution."""

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise TraceError(f"num_requests={self.num_requests}: need 1 or more")
        for name in ("requests_per_s", "burstiness", "tail"):
            if not 0 < getattr(self, name) < float("inf"):
                raise TraceError(f"{name}={getattr(self, name)}: use a positive number")
        if not 1 <= self.least_tokens <= self.most_tokens:
            raise TraceError(
                f"least_tokens={self.least_tokens}, most_tokens={self.most_tokens}: need 1 <= least <= most"
            )
        for name in ("short_share", "shared_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise TraceError(f"{name}={getattr(self, name)}: use a share from 0 to 1")
        for name in ("short_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise TraceError(f"{name}={getattr(self, name)}: need 1 or more")


def generate_trace(recipe: TraceRecipe) -> tuple[Request, ...]:
    """The trace of a recipe, in order of arrival; times in whole milliseconds, as the file form has them."""
    random = np.random.default_rng(recipe.seed)
    shape = 1.0 / recipe.burstiness
    gaps_s = random.gamma(shape, 1.0 / (shape * recipe.requests_per_s), recipe.num_requests)
    arrivals_s = np.round(np.cumsum(gaps_s), 3)
    requests: list[Request] = []
    next_block = 0
    for arrival_s in arrivals_s:
        num_tokens = _length(recipe, random)
        shared: tuple[int, ...] = ()
        if requests and random.random() < recipe.shared_share:
            # recent documents are more likely to be asked about again
            back = min(int(random.geometric(0.05)), len(requests))
            earlier = requests[-back]
            most = min(len(earlier.full_blocks), (num_tokens - 1) // BLOCK_TOKENS)
            shared = earlier.blocks[: int(random.random() * (most + 1))]
        num_new = -(-num_tokens // BLOCK_TOKENS) - len(shared)
        blocks = (*shared, *range(next_block, next_block + num_new))
        next_block += num_new
        requests.append(Request(float(arrival_s), num_tokens, int(random.geometric(1 / recipe.output_tokens)), blocks))
    return tuple(requests)


def _length(recipe: TraceRecipe, random: np.random.Generator) -> int:
    if random.random() < recipe.short_share:
        return int(np.clip(random.lognormal(np.log(recipe.short_tokens), 1.0), 16, recipe.most_tokens))
    least, most, tail = recipe.least_tokens, recipe.most_tokens, recipe.tail
    below = 1.0 - (least / most) ** tail * 1.0 if most > least else 0.0
    return min(int(least * (1.0 - random.random() * below) ** (-1.0 / tail)), most)
