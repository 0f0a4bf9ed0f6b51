"""How long a step takes by one formula for a whole prompt; `costs.quick` counts instead. Anything with `step_seconds`
(see `scheduler.jobs.StepCosts`) fits a replay."""

from __future__ import annotations

from collections.abc import Sequence

from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.partition.errors import UserError
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice


class QuadraticCosts:
    """A prompt of T tokens is T (1 + T / scale_tokens) units of work; devices share it evenly."""

    def __init__(self, *, work_per_s: float, scale_tokens: int = 131_072) -> None:
        if work_per_s <= 0 or scale_tokens <= 0:
            raise UserError(f"work_per_s={work_per_s}, scale_tokens={scale_tokens}: use positive numbers")
        self._scale = 1.0 / scale_tokens
        self._per_s = work_per_s

    def work(self, num_tokens: int) -> float:
        """Units of the first `num_tokens` tokens of a prompt."""
        return num_tokens * (1.0 + num_tokens * self._scale)

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        work = 0.0
        for piece in slices:
            work += self.work(piece.end) - self.work(piece.start)
        return work / (self._per_s * mesh.num_devices)
