"""Estimates against what happened: one slowly moving factor, and how wrong the corrected estimates still are."""

from __future__ import annotations

from math import exp, log

from longprefill.orchestrator.scheduler.jobs import SchedulerError


class Correction:
    """A factor on estimated seconds, moved by actual over expected (in logarithms, so that 2x and 0.5x are alike)."""

    def __init__(self, gain: float = 0.05) -> None:
        if not 0 < gain <= 1:
            raise SchedulerError(f"gain={gain}: use a number in (0, 1]")
        self._gain = gain
        self._log_factor = 0.0
        self._num = 0
        self._error = 0.0

    @property
    def factor(self) -> float:
        return exp(self._log_factor)

    @property
    def error(self) -> float:
        """Mean of |corrected estimate / actual - 1| over all steps so far, 0 before the first."""
        return self._error / self._num if self._num else 0.0

    def observe(self, expected_s: float, actual_s: float) -> None:
        """One finished step: its uncorrected estimate and its measured time, both positive."""
        self._error += abs(expected_s * self.factor / actual_s - 1.0)
        self._num += 1
        ratio = log(actual_s / expected_s)
        if ratio != self._log_factor:  # exact estimates stay exact, bit for bit
            self._log_factor += self._gain * (ratio - self._log_factor)
