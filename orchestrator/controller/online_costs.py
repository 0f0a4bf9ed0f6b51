"""Step costs that learn: counted work at a nominal rate, corrected by what steps really take.

A step takes `overhead + factor * counted seconds`. Both are fitted to the last steps by least squares of relative
errors, so that a small model's steps, which are mostly overhead, and a large one's are estimated alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from longprefill.orchestrator.scheduler.jobs import Mesh, StepCosts
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice

HISTORY = 256
PRIOR_WEIGHT = 0.02
"""Of the overhead's starting value, in steps: what the first few steps cannot tell stays near it."""


class OnlineCosts:
    """`layout` is the one that the groups run with: another is never estimated."""

    def __init__(self, base: StepCosts, layout: LayoutKind, *, overhead_s: float = 0.02) -> None:
        self._base = base
        self._layout: LayoutKind = layout
        self._prior_s = overhead_s
        self._overhead_s = overhead_s
        self._factor = 1.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=HISTORY)

    @property
    def overhead_s(self) -> float:
        return self._overhead_s

    @property
    def factor(self) -> float:
        """Measured over counted seconds."""
        return self._factor

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        return self._overhead_s + self._factor * self._base.step_seconds(slices, self._layout, mesh)

    def observe(self, slices: Sequence[Slice], mesh: Mesh, actual_s: float) -> bool:
        """A step took `actual_s`; True when estimates made before are more than a quarter off now."""
        counted_s = self._base.step_seconds(slices, self._layout, mesh)
        if actual_s <= 0 or counted_s <= 0:
            return False
        before_s = self._overhead_s + self._factor * counted_s
        self._seen.append((counted_s, actual_s))
        self._fit()
        after_s = self._overhead_s + self._factor * counted_s
        return not 0.8 < after_s / before_s < 1.25

    def _fit(self) -> None:
        """Minimises the sum of ((overhead + factor * x) / y - 1)^2 with both 0 or more."""
        sum_aa = sum_ab = sum_bb = sum_a = sum_b = 0.0
        for counted_s, actual_s in self._seen:
            one, work = 1.0 / actual_s, counted_s / actual_s
            sum_aa += one * one
            sum_ab += one * work
            sum_bb += work * work
            sum_a += one
            sum_b += work
        # the prior: an overhead near the starting value, which also keeps equal steps from being ambiguous
        weight = PRIOR_WEIGHT * min(sum_aa / len(self._seen), 1.0 / self._prior_s**2)
        sum_aa, sum_a = sum_aa + weight, sum_a + weight * self._prior_s
        determinant = sum_aa * sum_bb - sum_ab * sum_ab
        overhead_s = (sum_a * sum_bb - sum_b * sum_ab) / determinant
        factor = (sum_aa * sum_b - sum_ab * sum_a) / determinant
        if overhead_s < 0:
            overhead_s, factor = 0.0, sum_b / sum_bb
        elif factor <= 0:
            factor = 1e-3 * sum_b / sum_bb
            overhead_s = max((sum_a - factor * sum_ab) / sum_aa, 0.0)
        self._overhead_s, self._factor = overhead_s, factor
