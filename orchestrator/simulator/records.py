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
    refusal: str = ""

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
