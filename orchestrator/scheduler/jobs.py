"""What a scheduler knows of a job and of the costs of running it. Torch-free, as everything in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from longprefill.partition.errors import UserError
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice


class SchedulerError(UserError):
    """A job or a setting that the scheduler cannot take: one line that says what would be possible."""


class Mesh(NamedTuple):
    """Devices that run a step together: context-parallel times tensor-parallel ranks."""

    cp: int
    tp: int = 1

    @property
    def num_devices(self) -> int:
        return self.cp * self.tp


class StepCosts(Protocol):
    """The only thing the scheduler needs to know about a model on a machine."""

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        """Estimated seconds of one step over `slices` on `mesh`; the slices may be as long as whole prompts.

        Raises:
            UserError: a rate that this step needs is not known.
        """
        ...


class HeldPrefix(NamedTuple):
    """A prefix of a job that some unit holds: pages of all its tokens and the boundary state behind them."""

    unit: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt to prefill, as its owner asked for it."""

    id: int
    num_tokens: int
    arrival_s: float
    deadline_s: float = inf
    """Absolute time by which the owner wants the first token."""
    priority: float = 1.0
    """Factor on the job's claim: a job of priority 2 is ordered as if half as long were left of it."""
    tenant: str = ""
    held: HeldPrefix | None = None
    """The longest prefix that can be resumed from; None: nothing is cached."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise SchedulerError(f"job {self.id}: num_tokens={self.num_tokens}: a prompt has 1 token or more")
        if not 0 < self.priority < inf:
            raise SchedulerError(f"job {self.id}: priority={self.priority}: use a positive number")
        if self.held is not None and not 0 < self.held.num_tokens < self.num_tokens:
            raise SchedulerError(
                f"job {self.id}: held prefix of {self.held.num_tokens} tokens: need 1 to {self.num_tokens - 1}, "
                "the last token is always computed"
            )
