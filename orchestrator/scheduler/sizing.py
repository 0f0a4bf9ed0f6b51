"""How long a step is, on how many units it runs, and how it is cut: by estimated time."""

from __future__ import annotations

from typing import NamedTuple

from longprefill.orchestrator.scheduler.jobs import Mesh, StepCosts
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice

GRAIN_TOKENS = 1024
"""Steps that are sized by time end on multiples of this: fine enough, and few different ends to estimate."""


class Sized(NamedTuple):
    end: int
    seconds: float
    layout: LayoutKind


def first_grain(start: int, num_tokens: int) -> int:
    """Where the shortest step from `start` on ends."""
    return min((start // GRAIN_TOKENS + 1) * GRAIN_TOKENS, num_tokens)


def size_step(
    costs: StepCosts, settings: SchedulerSettings, mesh: Mesh, job: int, start: int, num_tokens: int
) -> Sized:
    """The next step of a job from `start`: to the next fixed border, or as far as the target time reaches.

    A step has one grain at least, whatever it costs. Sizing assumes that time grows with the step's end.
    """
    if settings.step_tokens is not None:
        end = min((start // settings.step_tokens + 1) * settings.step_tokens, num_tokens)
        return Sized(end, *cheapest_layout(costs, mesh, job, start, end))
    first, last = start // GRAIN_TOKENS + 1, -(-min(start + settings.max_step_tokens, num_tokens) // GRAIN_TOKENS)
    best = _sized(costs, mesh, job, start, min(last * GRAIN_TOKENS, num_tokens))
    if best.seconds <= settings.step_target_s:
        return best
    best = _sized(costs, mesh, job, start, first_grain(start, num_tokens))
    low, high = first, last
    while high - low > 1:
        middle = (low + high) // 2
        sized = _sized(costs, mesh, job, start, min(middle * GRAIN_TOKENS, num_tokens))
        if sized.seconds <= settings.step_target_s:
            low, best = middle, sized
        else:
            high = middle
    return best


def cheapest_layout(costs: StepCosts, mesh: Mesh, job: int, start: int, end: int) -> tuple[float, LayoutKind]:
    """Seconds of the step and the layout that gives them; zigzag where there is nothing to choose."""
    piece = (Slice(job=job, start=start, end=end),)
    zigzag_s = costs.step_seconds(piece, "zigzag", mesh)
    if mesh.cp == 1 or start == 0:
        return zigzag_s, "zigzag"
    contiguous_s = costs.step_seconds(piece, "contiguous", mesh)
    return (contiguous_s, "contiguous") if contiguous_s < zigzag_s else (zigzag_s, "zigzag")


def choose_degree(
    costs: StepCosts,
    settings: SchedulerSettings,
    fleet: FleetSettings,
    *,
    slot_span: Slice,
    time_left_s: float,
    most: int,
    num_ready: int,
    num_free: int,
) -> tuple[int, str]:
    """Units for a job's next step, at most `most`, and why.

    The smallest that meets the deadline. Without one, twice as many as long as they are used well and no waiting job
    would have had them: `num_free` idle units for `num_ready` jobs.
    """
    if most <= 1:
        return 1, "one unit"
    seconds = _rest_seconds(costs, fleet, slot_span, 1)
    fair = max(num_free // max(num_ready, 1), 1)
    degree, reason = 1, "one unit"
    while degree * 2 <= most:
        wider_s = _rest_seconds(costs, fleet, slot_span, degree * 2)
        efficiency = seconds / (2 * wider_s)
        if seconds > time_left_s and wider_s < seconds:
            reason = f"{degree * 2} units for the deadline"
        elif seconds <= time_left_s < float("inf"):
            return degree, f"{degree} units meet the deadline"
        elif degree * 2 > fair or efficiency < settings.widen_efficiency:
            break
        else:
            reason = f"{degree * 2} units at {efficiency:.2f} of twice the work"
        degree, seconds = degree * 2, wider_s
    return degree, reason


def _rest_seconds(costs: StepCosts, fleet: FleetSettings, span: Slice, degree: int) -> float:
    return costs.step_seconds((span,), "zigzag", fleet.mesh(degree))


def _sized(costs: StepCosts, mesh: Mesh, job: int, start: int, end: int) -> Sized:
    return Sized(end, *cheapest_layout(costs, mesh, job, start, end))
