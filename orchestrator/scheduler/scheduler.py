"""The scheduler: jobs come, units become idle, decisions go out. It has no clock, no thread and no random number.

Calls: `submit` a job; `decide` what idle units do; `step_done` when a step has ended; `unit_lost` or `units_lost`, and
`unit_back`, when units fail and return; `cancel`. Every call says what time it is. The real controller and the
simulator make the same calls, so their decisions can be compared line by line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from longprefill.orchestrator.scheduler.admission import refusal
from longprefill.orchestrator.scheduler.base import Pick, make_policy
from longprefill.orchestrator.scheduler.correction import LearnedCosts
from longprefill.orchestrator.scheduler.decisions import Admitted, Block, Refused, StepDecision
from longprefill.orchestrator.scheduler.fleet import Fleet
from longprefill.orchestrator.scheduler.jobs import Job, StepCosts
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.orchestrator.scheduler.sizing import Sized, cheapest_layout, choose_degree, first_grain, size_step
from longprefill.orchestrator.scheduler.table import JobTable
from longprefill.orchestrator.scheduler.tenants import TenantShares
from longprefill.partition.layout import Slice

MOST_SHARED = 32
"""Jobs in a step."""
RENEWED = 32
"""Estimates of waiting jobs that a decision renews after the costs have learned."""


class StepEnd(NamedTuple):
    """What the end of a step means: jobs that are complete, and jobs that go on, in slice order."""

    finished: tuple[int, ...]
    continuing: tuple[int, ...]


class UnitLoss(NamedTuple):
    """What the loss of a unit means: steps that will never end, jobs that have to begin again."""

    lost_steps: tuple[int, ...]
    restarted: tuple[tuple[int, int], ...]
    """(job, tokens of finished steps that are lost)."""


@dataclass(slots=True)
class _Progress:
    """Where a job stands. `away_tokens`: cached tokens that must be brought to whatever block runs it next."""

    position: int
    away_tokens: int = 0


class _Place(NamedTuple):
    block: Block
    position: int
    move_s: float
    reason: str


class Scheduler:
    """Decisions for one fleet. Equal calls give equal decisions."""

    def __init__(
        self, settings: SchedulerSettings, fleet: FleetSettings, costs: StepCosts, *, overhead_s: float = 0.0
    ) -> None:
        self.settings = settings
        self.costs = LearnedCosts(costs, overhead_s=overhead_s)
        """Corrected by the steps that have ended; every estimate here comes from them."""
        self._fleet = Fleet(fleet)
        self._policy = make_policy(settings.policy)
        self._tenants = TenantShares(settings.tenant_weights)
        self._table = JobTable()
        self._progress: dict[int, _Progress] = {}
        self._steps: dict[int, StepDecision] = {}
        self._last_on_unit: dict[int, int] = {}
        self._num_steps = 0
        self._num_ready = 0
        self._outdated: deque[int] = deque()

    @property
    def num_queued(self) -> int:
        """Jobs that wait for a unit."""
        return self._num_ready

    @property
    def num_idle_units(self) -> int:
        return self._fleet.num_free

    @property
    def num_outdated(self) -> int:
        """Waiting jobs whose estimates are older than what the costs have learned; every `decide` renews some."""
        return len(self._outdated)

    def position(self, job: int) -> int:
        """Tokens of the job whose steps have ended; KeyError for an unknown job."""
        return self._progress[job].position

    def submit(self, job: Job, now: float) -> Admitted | Refused:
        """Takes a job into the queue, or says why no unit will ever run it.

        Raises:
            ValueError: a job of this number is already here.
        """
        if job.id in self._table:
            raise ValueError(f"job {job.id} is already queued: numbers are unique among unfinished jobs")
        reason = refusal(job, self._fleet.settings, self.settings, len(self._table))
        if reason is not None:
            return Refused(job=job.id, reason=reason)
        start = 0 if job.held is None else job.held.num_tokens
        own_s = self._alone_s(job.id, start, job.num_tokens)
        slot = self._table.add(
            job,
            isolated_s=own_s,
            step_s=self._next_step_s(job.id, start, job.num_tokens),
            weight=job.priority * self._tenants.claim(job.tenant, now),
            need_bytes=self._fleet.settings.job_bytes(job.num_tokens),
        )
        self._progress[job.id] = _Progress(position=0)
        self._policy.enter(self._table, slot, now, max(self._fleet.num_alive, 1))
        self._num_ready += 1
        return Admitted(
            job=job.id,
            estimate_s=own_s,
            latest_s=float(self._table.latest_s[slot]),
            num_queued=self._num_ready,
        )

    def decide(self, now: float) -> list[StepDecision]:
        """Steps for idle units, as many as can start now."""
        self._renew_estimates()
        decisions: list[StepDecision] = []
        fleet, table = self._fleet, self._table
        while self._num_ready and fleet.num_free:
            end = table.end
            eligible = table.is_ready[:end].copy()
            if fleet.settings.cache_bytes is not None:
                eligible &= table.need_bytes[:end] <= fleet.most_free_bytes()
            decision = self._first_that_fits(now, eligible)
            if decision is None:
                break
            decisions.append(decision)
        return decisions

    def step_done(self, step: int, now: float, actual_s: float) -> StepEnd:
        """A step has ended after `actual_s` seconds; its units are idle and its unfinished jobs queued again.

        Raises:
            KeyError: no such step runs.
        """
        decision = self._steps.pop(step)
        self._fleet.vacate(decision.block)
        if self.costs.observe(
            decision.slices,
            decision.layout,
            decision.mesh,
            expected_s=decision.estimate_s - decision.move_s,
            actual_s=actual_s - decision.move_s,
        ):
            ready = self._table.is_ready[: self._table.end]
            self._outdated = deque(self._table.numbers[: self._table.end][ready].tolist())
        finished: list[int] = []
        continuing: list[int] = []
        for piece in decision.slices:
            slot = self._table.slot(piece.job)
            job = self._table.job_at(slot)
            self._tenants.serve(job.tenant, actual_s * decision.block.size / len(decision.slices), now)
            self._progress[piece.job].position = piece.end
            if piece.end == job.num_tokens:
                finished.append(piece.job)
                self._drop(piece.job)
            else:
                continuing.append(piece.job)
                self._queue_again(slot)
        return StepEnd(tuple(finished), tuple(continuing))

    def cancel(self, job: int) -> bool:
        """Drops a queued job; False when it is unknown or in a step (cancel it when the step has ended)."""
        if job not in self._table or not self._table.is_ready[self._table.slot(job)]:
            return False
        self._num_ready -= 1
        self._drop(job)
        return True

    def unit_lost(self, unit: int, now: float) -> UnitLoss:
        """A unit is gone: its step ends for all its units, and jobs go on elsewhere from where they can."""
        return self.units_lost((unit,), now)

    def units_lost(self, units: Sequence[int], now: float) -> UnitLoss:
        """Units are gone at once, as those of one machine."""
        fleet = self._fleet
        for unit in units:
            fleet.lose(unit)
        lost: list[int] = []
        for step in sorted(self._steps):
            decision = self._steps[step]
            if decision.block.touches(units):
                lost.append(step)
                del self._steps[step]
                fleet.vacate(decision.block)
                for piece in decision.slices:
                    self._queue_again(self._table.slot(piece.job))
        self._forget_prefixes(units)
        restarted: list[tuple[int, int]] = []
        for job, home in fleet.homed_on(units):
            progress = self._progress[job]
            fleet.release(job)
            slot = self._table.slot(job)
            self._table.need_bytes[slot] = fleet.settings.job_bytes(int(self._table.tokens[slot]))
            if self.survives(home, units):
                progress.away_tokens = progress.position
            elif progress.position:
                restarted.append((job, progress.position))
                progress.position = 0
                self._estimate_again(slot)
        return UnitLoss(tuple(lost), tuple(restarted))

    def survives(self, home: Block, units: Sequence[int]) -> bool:
        """Whether what lies on a block is still somewhere when these units fail at once: it is on every unit of the
        block, and on one other of the same machine, in a fleet that can recover."""
        if not home.touches(units):
            return True
        is_one_left = len(units) == 1 or any(unit not in units for unit in range(home.start, home.start + home.size))
        return self._fleet.settings.is_recoverable and is_one_left

    def unit_back(self, unit: int) -> None:
        """A lost unit works again, empty."""
        self._fleet.regain(unit)

    def _forget_prefixes(self, units: Sequence[int]) -> None:
        """Cached prefixes that lay on lost units are computed like everything else."""
        table = self._table
        for slot, job in enumerate(table.jobs):
            if job is not None and job.held is not None and not self.survives(Block(job.held.unit, 1), units):
                table.jobs[slot] = replace(job, held=None)
                if table.is_ready[slot]:
                    self._estimate_again(slot)

    def _first_that_fits(self, now: float, eligible: np.ndarray) -> StepDecision | None:
        """The policy's first job that has a place; behind an urgent one without a place, only started jobs may run."""
        table, num_units = self._table, max(self._fleet.num_alive, 1)
        while (pick := self._policy.pick(table, now, num_units, eligible)) is not None:
            decision = self._start(pick, now)
            if decision is not None:
                return decision
            eligible[pick.slot] = False
            if pick.is_urgent:
                # what has been started holds memory already: running it is what frees some
                eligible &= table.need_bytes[: len(eligible)] == 0
        return None

    def _start(self, pick: Pick, now: float) -> StepDecision | None:
        table, fleet, settings = self._table, self._fleet, self.settings
        job = table.job_at(pick.slot)
        num_free = fleet.num_free
        progress = self._progress[job.id]
        degree, why = 1, "one unit"
        if settings.max_degree > 1:
            most = min(settings.max_degree, 1 << (num_free.bit_length() - 1))
            degree, why = choose_degree(
                self.costs,
                settings,
                fleet.settings,
                slot_span=Slice(job=job.id, start=progress.position, end=job.num_tokens),
                time_left_s=job.deadline_s - now,
                most=most,
                num_ready=self._num_ready,
                num_free=num_free,
            )
        place = None
        while place is None and degree >= 1:
            place = self._place(job, progress, degree)
            degree //= 2
        if place is None:
            return None
        mesh = fleet.settings.mesh(place.block.size)
        sized = size_step(self.costs, settings, mesh, job.id, place.position, job.num_tokens)
        slices = (Slice(job=job.id, start=place.position, end=sized.end),)
        seconds = sized.seconds
        if sized.end == job.num_tokens <= settings.pack_tokens:
            slices, seconds = self._pack(slices[0], sized, place.block, now, pick)
        step = StepDecision(
            id=self._num_steps,
            slices=slices,
            block=place.block,
            mesh=mesh,
            layout=sized.layout,
            start_s=now,
            estimate_s=place.move_s + seconds,
            move_s=place.move_s,
            correction=self.costs.correction(slices, sized.layout, mesh),
            reason=f"{pick.reason}; {place.reason or why}",
            preempted=self._preempted(place.block, slices),
            num_queued=self._num_ready - len(slices),
        )
        self._begin(step)
        return step

    def _place(self, job: Job, progress: _Progress, degree: int) -> _Place | None:
        """Where a job could run on `degree` units now, what must be moved there, and why; None: nowhere."""
        fleet = self._fleet
        need = fleet.settings.job_bytes(job.num_tokens)
        home, held = fleet.home(job.id), job.held
        if home is not None:
            near = Block(home.start // degree * degree, degree)
            if fleet.is_usable(near, job.id, need):
                moved = progress.position if degree > home.size else 0
                return _Place(near, progress.position, self._move_s(moved), "wider, around its home" if moved else "")
            away = fleet.find(degree, need) if fleet.settings.can_move else None
            if away is None:
                return None
            return _Place(away, progress.position, self._move_s(progress.position), "away from its busy home")
        if held is not None and progress.position == 0:
            near = Block(held.unit // degree * degree, degree)
            if fleet.is_usable(near, job.id, need):
                moved = held.num_tokens if degree > 1 else 0
                return _Place(near, held.num_tokens, self._move_s(moved), f"prefix of {held.num_tokens} tokens is here")
        block = fleet.find(degree, need)
        if block is None:
            return None
        if held is not None and progress.position == 0:
            fetch_s, again_s = self._move_s(held.num_tokens), self._alone_s(job.id, 0, held.num_tokens)
            if fetch_s < again_s:
                return _Place(block, held.num_tokens, fetch_s, f"prefix of {held.num_tokens} tokens is fetched")
            return _Place(block, 0, 0.0, f"prefix of {held.num_tokens} tokens is computed again")
        reason = "brought from where it survived" if progress.away_tokens else ""
        return _Place(block, progress.position, self._move_s(progress.away_tokens), reason)

    def _pack(
        self, first: Slice, sized: Sized, block: Block, now: float, pick: Pick
    ) -> tuple[tuple[Slice, ...], float]:
        """More short jobs for a step that ends its first job: as many of those that could join as its size has room
        for, or a quarter of them, or a sixteenth, where time or the promises leave less."""
        table, settings = self._table, self.settings
        mesh, num_units = self._fleet.settings.mesh(block.size), max(self._fleet.num_alive, 1)
        pieces, slots = [first], [table.slot(first.job)]
        room_tokens = (settings.step_tokens or settings.max_step_tokens) - first.num_tokens
        for slot in self._packable(first, block, now):
            job = table.job_at(slot)
            piece = Slice(job=job.id, start=self._progress[job.id].position, end=job.num_tokens)
            room_tokens -= piece.num_tokens
            if room_tokens < 0:
                break
            pieces.append(piece)
            slots.append(slot)
        has_room = None
        while len(pieces) > 1:
            seconds = self.costs.step_seconds(pieces, sized.layout, mesh)
            if settings.step_tokens is not None or seconds <= settings.step_target_s:
                has_room = has_room or self._policy.room(table, now, num_units, slots, pick.promises)
                if has_room(len(pieces), seconds):
                    return tuple(pieces), seconds
            del pieces[len(pieces) // 4 :]
        return (first,), sized.seconds

    def _packable(self, first: Slice, block: Block, now: float) -> list[int]:
        """Slots of short jobs that could join a step on a block, in the policy's order, while memory lasts."""
        table, fleet = self._table, self._fleet
        eligible = table.is_ready[: table.end] & (table.tokens[: table.end] <= self.settings.pack_tokens)
        eligible[table.slot(first.job)] = False
        room = float(fleet.free_bytes[block.start : block.start + block.size].min())
        room -= float(table.need_bytes[table.slot(first.job)])
        found: list[int] = []
        for slot in self._policy.order(table, now, eligible.nonzero()[0], MOST_SHARED - 1):
            job = table.job_at(int(slot))
            room -= float(table.need_bytes[slot])
            if room < 0:
                break
            if fleet.home(job.id) in (None, block) and job.held is None:
                found.append(int(slot))
        return found

    def _begin(self, step: StepDecision) -> None:
        fleet, table = self._fleet, self._table
        slots = [table.slot(piece.job) for piece in step.slices]
        for piece, num_tokens in zip(step.slices, table.tokens[slots].tolist(), strict=True):
            fleet.hold(piece.job, step.block, fleet.settings.job_bytes(num_tokens))
            self._progress[piece.job].away_tokens = 0
        table.need_bytes[slots] = 0.0
        table.is_ready[slots] = False
        table.step_s[slots] = step.estimate_s
        self._num_ready -= len(step.slices)
        fleet.occupy(step.block)
        self._steps[step.id] = step
        self._num_steps += 1

    def _preempted(self, block: Block, slices: tuple[Slice, ...]) -> int | None:
        """The job that last ran on the block, unless it has ended or goes on; the block's units are marked as ours."""
        last = self._last_on_unit.get(block.start)
        for unit in range(block.start, block.start + block.size):
            self._last_on_unit[unit] = slices[-1].job
        if last is None or last not in self._table or any(piece.job == last for piece in slices):
            return None
        return last if self._table.is_ready[self._table.slot(last)] else None

    def _queue_again(self, slot: int) -> None:
        self._table.is_ready[slot] = True
        self._num_ready += 1
        self._estimate_again(slot)

    def _renew_estimates(self) -> None:
        """Of a few waiting jobs: ten thousand at once would hold up every decision and whoever waits for one."""
        for _ in range(min(RENEWED, len(self._outdated))):
            number = self._outdated.popleft()
            slot = self._table.slot(number) if number in self._table else None
            if slot is not None and self._table.is_ready[slot]:
                self._estimate_again(slot)
                self._table.isolated_s[slot] = self._alone_s(number, 0, int(self._table.tokens[slot]))

    def _estimate_again(self, slot: int) -> None:
        job = self._table.job_at(slot)
        start = self._progress[job.id].position
        self._table.remaining_s[slot] = self._alone_s(job.id, start, job.num_tokens)
        self._table.step_s[slot] = self._next_step_s(job.id, start, job.num_tokens)

    def _drop(self, job: int) -> None:
        slot = self._table.slot(job)
        self._policy.leave(self._table, slot)
        self._table.remove(job)
        self._fleet.release(job)
        del self._progress[job]

    def _alone_s(self, job: int, start: int, end: int) -> float:
        """Seconds on one unit."""
        return cheapest_layout(self.costs, self._fleet.settings.mesh(1), job, start, end)[0]

    def _next_step_s(self, job: int, start: int, num_tokens: int) -> float:
        if self.settings.step_tokens is None:
            # an upper bound that needs no search: steps end at the target or after one grain, whatever is left
            grain_s = self._alone_s(job, start, first_grain(start, num_tokens))
            return max(min(self.settings.step_target_s, self._alone_s(job, start, num_tokens)), grain_s)
        end = min((start // self.settings.step_tokens + 1) * self.settings.step_tokens, num_tokens)
        return self._alone_s(job, start, end)

    def _move_s(self, num_tokens: int) -> float:
        if not num_tokens:
            return 0.0
        return self._fleet.settings.job_bytes(num_tokens) / self._fleet.settings.move_bytes_per_s
