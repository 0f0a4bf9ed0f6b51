"""Seconds of all steps of a prompt, and of handing its caches over while the next steps run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longprefill.orchestrator.costs.step import StepCosts, StepTime
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.steps import Step, plan_steps

MOST_STEPS = 5
"""Up to so many steps each is counted; of more, NODES stand for all full ones (Simpson's rule: a step's time is near
quadratic in where it starts)."""
NODES = 3
SIMPSON = (1, 4, 1)


class Weighted(NamedTuple):
    """A step that stands for `weight` steps."""

    step: Step
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTime:
    """All steps of one prompt, or of several that share their steps."""

    seconds: float
    num_steps: int
    parts: Mapping[str, float]
    """Seconds by part, which sum to `seconds`."""
    max_work_s: float
    mean_work_s: float
    waiting_s: float
    exposed_s: float
    host_s: float
    first_step_s: float
    last_step_s: float


def prompt_time(
    costs: StepCosts, num_tokens: int, step_tokens: int, kind: LayoutKind, *, start: int = 0, num_jobs: int = 1
) -> PromptTime:
    """Seconds of a prompt from position `start` on. `num_jobs` > 1: so many equal prompts, each shorter than a step,
    go through their one step together.

    Raises:
        ProfileError: a rate that a step needs is not known.
        StepError: a step size that cuts pages.
    """
    steps = plan_steps(num_tokens, step_tokens, start)
    if num_jobs > 1:
        slices = [Slice(job=job, start=start, end=num_tokens) for job in range(num_jobs)]
        return _sum([(costs.step(slices, kind, num_ending=num_jobs), 1.0)], 1)
    found: list[tuple[StepTime, float]] = []
    for step, weight in weighted_steps(steps):
        piece = Slice(job=0, start=step.start, end=step.end)
        found.append((costs.step([piece], kind, num_ending=int(step.end == num_tokens)), weight))
    return _sum(found, len(steps))


def weighted_steps(steps: Sequence[Step]) -> Iterator[Weighted]:
    """The steps to count and how many each stands for."""
    if len(steps) <= MOST_STEPS:
        yield from (Weighted(step, 1.0) for step in steps)
        return
    first, *full, last = steps
    yield Weighted(first, 1.0)
    length = full[0].end - full[0].start
    reach = full[-1].start - full[0].start
    for node, share in enumerate(SIMPSON):
        begin = full[0].start + reach * node // (NODES - 1) // PAGE_TOKENS * PAGE_TOKENS
        yield Weighted(Step(begin, begin + length), len(full) * share / sum(SIMPSON))
    yield Weighted(last, 1.0)


def _sum(found: Sequence[tuple[StepTime, float]], num_steps: int) -> PromptTime:
    parts: defaultdict[str, float] = defaultdict(float)
    for time, weight in found:
        for name, seconds in time.parts.items():
            parts[name] += weight * seconds

    def total(name: str) -> float:
        return sum(weight * getattr(time, name) for time, weight in found)

    return PromptTime(
        seconds=total("seconds"),
        num_steps=num_steps,
        parts=dict(parts),
        max_work_s=total("max_work_s"),
        mean_work_s=total("mean_work_s"),
        waiting_s=total("waiting_s"),
        exposed_s=total("exposed_s"),
        host_s=total("host_s"),
        first_step_s=found[0][0].seconds,
        last_step_s=found[-1][0].seconds,
    )
