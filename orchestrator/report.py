"""What a run reports: finished steps, the hand-off, and (`run_report.py`) the JSON of `run --json`."""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.partition.layout import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One finished step, as progress callbacks see it."""

    number: int
    num_steps: int
    slices: tuple[Slice, ...]
    seconds: float
    """Wall time at the controller."""
    rank_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    num_bytes: int
    seconds: float
    """From the first reservation to the acknowledgement."""
    exposed_s: float
    """From the end of the last step to the acknowledgement: what prefill did not hide."""
