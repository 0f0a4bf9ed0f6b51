"""The scheduler as a real controller needs it: jobs found running after a restart, caches that outlive their steps, and
what to tell the owners of waiting jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from longprefill.orchestrator.scheduler.decisions import Admitted, Block, Refused
from longprefill.orchestrator.scheduler.jobs import HeldPrefix, Job
from longprefill.orchestrator.scheduler.scheduler import Scheduler


class Outlook(NamedTuple):
    """Seconds from now, if nothing else comes."""

    start_s: float
    finish_s: float
    num_before: int


class LiveScheduler(Scheduler):
    """Decisions are those of `Scheduler`, on units of one group each."""

    def resume(self, job: Job, position: int, now: float) -> Admitted | Refused:
        """As `submit`, for a job whose first `position` tokens can be brought to any unit: from a snapshot."""
        held = HeldPrefix(unit=0, num_tokens=position) if position else None
        return self.submit(replace(job, held=held), now)

    def adopt(self, job: Job, unit: int, position: int, now: float) -> Admitted | Refused:
        """As `submit`, for a job that is open on a unit already, with `position` tokens done."""
        admitted = self.submit(job, now)
        if isinstance(admitted, Refused):
            return admitted
        slot = self._table.slot(job.id)
        self._fleet.hold(job.id, Block(unit, 1), self._fleet.settings.job_bytes(job.num_tokens))
        self._table.need_bytes[slot] = 0.0
        self._progress[job.id].position = position
        self._estimate_again(slot)
        return admitted

    def keep(self, job: int, unit: int, num_tokens: int) -> None:
        """The caches of a job that has left the queue stay on a unit until `release`: while they are handed over. The
        job may be queued anew meanwhile."""
        self._fleet.hold(_kept(job), Block(unit, 1), self._fleet.settings.job_bytes(num_tokens))

    def release(self, job: int) -> None:
        """What was kept of a job is gone; nothing when nothing was kept."""
        self._fleet.release(_kept(job))

    def forget_unit(self, unit: int, now: float) -> None:
        """A unit is gone with all its caches. Its jobs are queued from their beginnings; kept caches are dropped."""
        for job, _ in self._fleet.homed_on((unit,)):
            if job not in self._table:
                self._fleet.release(job)
        self.unit_lost(unit, now)

    def _forget_prefixes(self, units: Sequence[int]) -> None:
        """Nothing: what jobs hold here are snapshots (`resume`), which no unit takes with it."""

    def give_up(self, step: int) -> None:
        """A step that was decided and not run: its jobs are where they were."""
        decision = self._steps.pop(step)
        self._fleet.vacate(decision.block)
        for piece in decision.slices:
            self._queue_again(self._table.slot(piece.job))

    def drop(self, job: int) -> bool:
        """Takes a job out of the queue; False when it runs (drop it when its step has ended) or is not there."""
        return self.cancel(job)

    def knows(self, job: int) -> bool:
        return job in self._table

    def rest_seconds(self, job: int, position: int) -> float:
        """Estimated seconds of what follows `position`; 0 for a job that is not here."""
        if job not in self._table:
            return 0.0
        num_tokens = self._table.job_at(self._table.slot(job)).num_tokens
        return self._alone_s(job, position, num_tokens) if position < num_tokens else 0.0

    def outlook(self, now: float) -> dict[int, Outlook]:
        """When waiting jobs would start and finish: in the policy's order, shared by the units that live."""
        table = self._table
        slots = table.is_ready[: table.end].nonzero()[0]
        if not len(slots):
            return {}
        keys = self._policy.keys(table, now, slots)
        order = slots[np.lexsort((table.numbers[slots], table.arrival_s[slots], keys))]
        num_units = max(self._fleet.num_alive, 1)
        busy_s = sum(max(step.start_s + step.estimate_s - now, 0.0) for step in self._steps.values()) / num_units
        ends_s = busy_s + np.cumsum(table.remaining_s[order]) / num_units
        found: dict[int, Outlook] = {}
        for place, slot in enumerate(order):
            own_s = float(table.remaining_s[slot])
            start_s = max(float(ends_s[place]) - own_s / num_units, 0.0)
            found[int(table.numbers[slot])] = Outlook(start_s, start_s + own_s, place)
        return found


def _kept(job: int) -> int:
    """Books of kept caches beside those of queued jobs, whose numbers are 0 or more."""
    return -1 - job
