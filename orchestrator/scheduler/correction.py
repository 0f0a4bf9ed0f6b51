"""Step costs that learn: what the costs say, corrected by what steps really take, and how wrong they still are.

A step takes `overhead + factor * counted seconds`. Both are fitted to the last steps by least squares of relative
errors, so that a small model's steps, which are mostly overhead, and a large one's are estimated alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isclose

from longprefill.orchestrator.scheduler.jobs import Mesh, StepCosts
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice

HISTORY = 256
"""Steps that count: earlier ones fade."""
PRIOR_WEIGHT = 0.02
"""Of the overhead's starting value, in steps: what the first few steps cannot tell stays near it."""
EXACT = 1e-9


class LearnedCosts:
    """`base` is what is counted; `overhead_s` what a step is taken to need beside it before anything is learned."""

    def __init__(self, base: StepCosts, *, overhead_s: float = 0.0) -> None:
        self._base = base
        self._prior_s = overhead_s
        self._errors: deque[float] = deque(maxlen=HISTORY)
        self._sums = (0.0,) * 6
        """Over the last steps, of counted x and measured y: 1, 1/y^2, x/y^2, x^2/y^2, 1/y, x/y."""
        self.overhead_s = overhead_s
        self.factor = 1.0
        """Measured over counted seconds."""

    @property
    def error(self) -> float:
        """Mean of |actual / expected - 1| over the last HISTORY steps, 0 before the first."""
        return sum(self._errors) / len(self._errors) if self._errors else 0.0

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        return self.overhead_s + self.factor * self._base.step_seconds(slices, layout, mesh)

    def correction(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        """Expected over counted seconds of a step."""
        counted_s = self._base.step_seconds(slices, layout, mesh)
        return self.overhead_s / counted_s + self.factor if counted_s > 0 else self.factor

    def observe(
        self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh, *, expected_s: float, actual_s: float
    ) -> bool:
        """A step that was expected to take `expected_s` took `actual_s`; True when what is expected of it now is a
        quarter away, so that other estimates made before are off too."""
        x = self._base.step_seconds(slices, layout, mesh)
        if actual_s <= 0 or expected_s <= 0 or x <= 0:
            return False
        self._errors.append(abs(actual_s / expected_s - 1.0))
        before_s, y = self.overhead_s + self.factor * x, actual_s
        new = (1.0, 1 / y**2, x / y**2, (x / y) ** 2, 1 / y, x / y)
        self._sums = tuple((1 - 1 / HISTORY) * old + more for old, more in zip(self._sums, new, strict=True))
        if isclose(actual_s, before_s, rel_tol=EXACT):
            return False  # exact estimates stay exact, bit for bit
        self._fit()
        return not 0.8 < (self.overhead_s + self.factor * x) / before_s < 1.25

    def _fit(self) -> None:
        """Minimises the sum of ((overhead + factor * x) / y - 1)^2 with both 0 or more."""
        number, sum_aa, sum_ab, sum_bb, sum_a, sum_b = self._sums
        # the prior: an overhead near the starting value, which also keeps equal steps from being ambiguous
        scale = sum_aa / number
        weight = PRIOR_WEIGHT * (min(scale, 1.0 / self._prior_s**2) if self._prior_s else scale)
        sum_aa, sum_a = sum_aa + weight, sum_a + weight * self._prior_s
        determinant = sum_aa * sum_bb - sum_ab * sum_ab
        overhead_s = (sum_a * sum_bb - sum_b * sum_ab) / determinant
        factor = (sum_aa * sum_b - sum_ab * sum_a) / determinant
        if overhead_s < 0:
            overhead_s, factor = 0.0, sum_b / sum_bb
        elif factor <= 0:
            factor = 1e-3 * sum_b / sum_bb
            overhead_s = max((sum_a - factor * sum_ab) / sum_aa, 0.0)
        self.overhead_s, self.factor = overhead_s, factor
