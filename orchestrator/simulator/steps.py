"""Jobs arrive, steps start and end."""

from __future__ import annotations

from collections.abc import Iterable

from longprefill.orchestrator.simulator.engine import Event, Timed
from longprefill.orchestrator.simulator.handing import prefilled, stream_pages
from longprefill.orchestrator.simulator.world import World


class Arrives(Event[World]):
    order = 1  # ends of steps at the same time come first: what they free can be given away

    def __init__(self, number: int) -> None:
        self.number = number

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        world.submit(self.number, now)
        following: list[Timed[World]] = []
        if self.number + 1 < len(world.requests):
            following.append(Timed(world.requests[self.number + 1].arrival_s, Arrives(self.number + 1)))
            if following[0].at_s == now:
                return following  # who comes at the same time is compared before anyone starts
        return [*following, *start_steps(world, now)]


class StepEnds(Event[World]):
    def __init__(self, step: int, seconds: float) -> None:
        self.step = step
        self.seconds = seconds

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        decision = world.running.pop(self.step, None)
        if decision is None:
            return []  # a failure ended it before
        end = world.scheduler.step_done(self.step, now, self.seconds)
        world.record_step(decision, now, is_lost=False)
        for piece in decision.slices:
            stream_pages(world, piece.job, piece.num_tokens, now)
        events: list[Timed[World]] = []
        for job in end.finished:
            events += prefilled(world, job, decision.block, now)
        return [*events, *start_steps(world, now)]


def start_steps(world: World, now: float) -> list[Timed[World]]:
    """The ends of the steps that the scheduler starts now."""
    events: list[Timed[World]] = []
    for decision in world.decide(now):
        seconds = world.actual_seconds(decision)
        events.append(Timed(now + seconds, StepEnds(decision.id, seconds)))
    return events
