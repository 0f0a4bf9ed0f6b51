"""What a replay writes down of every job and every step, for metrics, tables and time lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class JobRecord:
    """One request's life. Times are absolute seconds; NaN until they happen."""

    id: int
    num_tokens: int
    arrival_s: float
    alone_s: float
    """What it takes on one idle unit without any cache."""
    first_step_s: float = float("nan")
    prefilled_s: float = float("nan")
    first_token_s: float = float("nan")
    hit_tokens: int = 0
    page_hit_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    sent_s: float = 0.0
    """When all pages of its finished steps have reached the decode side."""
    ended_s: float = float("nan")
    """Its last token, or its end without one."""
    num_restarts: int = 0
    """How often finished steps were lost and its prompt was computed again."""
    num_handed_again: int = 0
    """How often its caches had to be sent to another decode worker."""
    num_losses: int = 0
    """Steps, generations and hand-offs that a failure ended."""
    refusal: str = ""
    failure: str = ""
    """Why it was given up."""

    @property
    def is_served(self) -> bool:
        return not (self.refusal or self.failure)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def slowdown(self) -> float:
        return self.ttft_s / self.alone_s


class StepRecord(NamedTuple):
    """One step as it ran."""

    id: int
    jobs: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    unit: int
    num_units: int
    start_s: float
    end_s: float
    estimate_s: float
    is_lost: bool
    reason: str


class FailureRecord(NamedTuple):
    """Something failed, and what that cost."""

    kind: str
    """unit, node or decode."""
    number: int
    units: tuple[int, ...]
    workers: tuple[int, ...]
    at_s: float
    until_s: float
    num_lost_steps: int
    num_restarted: int
    """Jobs whose prompts are computed again."""
    num_handed_again: int
