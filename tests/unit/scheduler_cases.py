"""A small driver for schedulers: jobs in, steps run as estimated, everything that happened out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longprefill.orchestrator.scheduler.decisions import Admitted, Refused, StepDecision
from longprefill.orchestrator.scheduler.jobs import Job, Mesh
from longprefill.orchestrator.scheduler.scheduler import Scheduler
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice


class LinearCosts:
    """A microsecond a token and device, a little more for every device beyond the first."""

    def __init__(self, loss: float = 0.0) -> None:
        self.loss = loss

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        tokens = sum(piece.num_tokens for piece in slices)
        return tokens * 1e-6 / mesh.num_devices * (1 + self.loss * (mesh.num_devices - 1))


@dataclass
class Run:
    answers: dict[int, Admitted | Refused] = field(default_factory=dict)
    steps: list[StepDecision] = field(default_factory=list)
    finish_s: dict[int, float] = field(default_factory=dict)


def drive(scheduler: Scheduler, jobs: Sequence[Job]) -> Run:
    """Submits jobs (by arrival) and runs every step as long as it was estimated to take."""
    run, running, waiting = Run(), [], sorted(jobs, key=lambda job: (job.arrival_s, job.id))
    while waiting or running:
        running.sort(key=lambda step: (step.start_s + step.estimate_s, step.id))
        next_end = running[0].start_s + running[0].estimate_s if running else float("inf")
        if waiting and waiting[0].arrival_s < next_end:
            job = waiting.pop(0)
            now = job.arrival_s
            run.answers[job.id] = scheduler.submit(job, now)
            if waiting and waiting[0].arrival_s == now:
                continue
        else:
            step = running.pop(0)
            now = next_end
            for number in scheduler.step_done(step.id, now, step.estimate_s).finished:
                assert number not in run.finish_s
                run.finish_s[number] = now
        started = scheduler.decide(now)
        run.steps += started
        running += started
    return run
