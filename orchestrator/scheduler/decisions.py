"""Decisions as data: what was decided, on which estimates, and why. Equal inputs give equal decisions, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice


class Block(NamedTuple):
    """Units [start, start + size); sizes are powers of two and blocks are aligned to their size."""

    start: int
    size: int

    def touches(self, units: Iterable[int]) -> bool:
        """Whether one of the units is in the block."""
        return any(self.start <= unit < self.start + self.size for unit in units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The job is queued."""

    job: int
    estimate_s: float
    """Seconds on one unit, alone."""
    latest_s: float
    """By when the policy means to have finished it; infinite for policies without a bound."""
    num_queued: int
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No group of this fleet can ever run the job, or the queue is at its limit."""

    job: int
    reason: str
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """One step to run now."""

    id: int
    slices: tuple[Slice, ...]
    block: Block
    mesh: Mesh
    layout: LayoutKind
    start_s: float
    estimate_s: float
    """Of the step, moving caches included."""
    move_s: float
    """Part of the estimate: bringing pages and states to this block first."""
    correction: float
    """The estimate over what is counted, moving apart: what finished steps have taught."""
    reason: str
    preempted: int | None
    """The unfinished job that ran on this block before and now waits."""
    num_queued: int
    kind: Literal["step"] = "step"


Decision = Admitted | Refused | StepDecision
