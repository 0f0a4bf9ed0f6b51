"""Prefill: the scheduler's decisions become steps of groups, one at a time on each, and steps become progress.

A step's end is journaled before anything follows from it. What goes wrong with a group is the group's end, what goes
wrong with a job the job's.
"""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from longprefill.orchestrator.controller.core import LOST, MAX_ATTEMPTS, Core
from longprefill.orchestrator.controller.handing_off import HandingOff
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.controller.reports import step_report
from longprefill.orchestrator.hosts.contract import NoRoom, OpenOutcome, StepOutcome
from longprefill.orchestrator.job import JobState
from longprefill.orchestrator.scheduler.decisions import StepDecision
from longprefill.partition.errors import UserError
from longprefill.partition.layout import Slice

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S = 300.0
STEP_DEADLINE_S = 600.0
"""At least; hosts notice hanging ranks themselves, far earlier."""
STEP_DEADLINE_FACTOR = 20.0
ROOM_RETRIES = 20
ROOM_RETRY_S = 0.25


class _JobRefused(Exception):
    """A job that its group cannot open."""

    def __init__(self, job: LiveJob, reason: str) -> None:
        super().__init__(reason)
        self.job = job


class Stepping:
    """Runs as one task (`run`) that starts a task for every step."""

    def __init__(self, core: Core, handing_off: HandingOff) -> None:
        self._core = core
        self._handing_off = handing_off

    async def run(self) -> None:
        """Decides whenever something has changed."""
        core = self._core
        while True:
            await core.wake_drive.wait()
            core.wake_drive.clear()
            for decision in core.scheduler.decide(core.clock()):
                core.running[decision.id] = decision
                core.spawn(self._step(decision, self._begin(decision)), f"step {decision.id}")
            if core.scheduler.num_outdated:
                core.wake_drive.set()
                await asyncio.sleep(0)  # others have their turn between two parts of a long queue's new estimates

    def _begin(self, decision: StepDecision) -> list[LiveJob]:
        """The step's jobs: those that have ended when its task runs for the first time are in no book any more."""
        core = self._core
        group = core.prefill[decision.block.start]
        preempted = None if decision.preempted is None else core.jobs.get(decision.preempted)
        if preempted is not None and preempted.row.state is JobState.PREFILLING:
            core.metrics.preemptions.inc()
            reason = f"gave way to another job: {decision.reason}"
            num = preempted.row.num_preemptions + 1
            row = core.journal.change(preempted.number, JobState.QUEUED, reason=reason, num_preemptions=num)
            preempted.waits_for = reason
            core.refresh(preempted, row)
        jobs = [core.jobs[piece.job] for piece in decision.slices]
        for job in jobs:
            job.waits_for = decision.reason
            if job.row.state is JobState.QUEUED:
                core.refresh(job, core.journal.change(job.number, JobState.PREFILLING, group_name=group.name))
        return jobs

    async def _step(self, decision: StepDecision, jobs: list[LiveJob]) -> None:
        core = self._core
        group = core.prefill[decision.block.start]
        started = time.perf_counter()
        try:
            for job, piece in zip(jobs, decision.slices, strict=True):
                if not job.is_ended and decision.id in core.running:
                    await self._open(job, group, piece.start, decision.id)
            if any(job.is_ended for job in jobs) or decision.id not in core.running:
                self._give_up(decision, jobs)
                return
            outcome = await self._run(decision, group)
            await self._snapshot_if_due(decision, jobs, group, outcome)
        except _JobRefused as refused:
            if decision.id in core.running:
                self._give_up(decision, jobs)
                core.requeue(refused.job, str(refused), is_failure=True)
            return
        except LOST as error:
            if decision.id in core.running:
                core.host_is_lost(group, "rebuilding", str(error))
            return
        if decision.id in core.running:  # else the group was given up meanwhile
            self._finish(decision, jobs, outcome, time.perf_counter() - started)

    async def _open(self, job: LiveJob, group: Host, position: int, step: int) -> None:
        """Gives a job its pages unless it has them. While it waits the step may be given up, its group lost and the job
        begun elsewhere: nothing is touched then.

        Raises:
            _JobRefused: the group cannot take it.
        """
        core = self._core
        if job.group is group:
            return
        await core.has_left(job, group)
        if job.is_ended or step not in core.running:
            return
        assert group.link is not None
        attempts = job.row.num_attempts + 1
        if attempts > MAX_ATTEMPTS:
            core.end(job, JobState.FAILED, f"it was started {MAX_ATTEMPTS} times and never ended")
            return
        job.group = group
        core.refresh(job, core.journal.update(job.number, num_attempts=attempts, group_name=group.name))
        try:
            tokens_T = await asyncio.to_thread(core.journal.prompts.read, job.row.id)
        except (OSError, ValueError) as error:
            core.end(job, JobState.FAILED, f"its prompt cannot be read any more: {error}")
            return
        if step not in core.running:
            return
        opened = await self._call_open(job, group, tokens_T, step)
        if step not in core.running:
            if job.group is not group:
                core.evict(job.number, group)  # its pages there are nobody's
            return
        if opened.position != position and not job.is_ended:
            raise _JobRefused(job, f"{group.name} opened it at {opened.position}, not at {position}")
        await self._handing_off.start_early(job)

    async def _call_open(self, job: LiveJob, group: Host, tokens_T: np.ndarray, step: int) -> OpenOutcome:
        core = self._core
        snapshot = job.row.snapshot if job.row.snapshot_position else None
        num_tries = 0
        while True:
            assert group.link is not None
            try:
                return await group.link.call("open_job", job.number, tokens_T, snapshot, deadline_s=OPEN_DEADLINE_S)
            except NoRoom as error:
                num_tries += 1
                if num_tries < ROOM_RETRIES:
                    await asyncio.sleep(ROOM_RETRY_S)  # what is being closed there frees it
                if num_tries == ROOM_RETRIES or job.is_ended or step not in core.running:
                    raise _JobRefused(job, str(error)) from error
            except LOST:
                raise
            except UserError as error:
                if snapshot is not None and step in core.running:  # damaged or gone: the prompt is still there
                    job.row = core.journal.update(job.number, snapshot=None, snapshot_position=0)
                raise _JobRefused(job, str(error)) from error

    async def _run(self, decision: StepDecision, group: Host) -> StepOutcome:
        assert group.link is not None
        number, group.next_step = group.next_step, group.next_step + 1
        deadline_s = max(STEP_DEADLINE_S, STEP_DEADLINE_FACTOR * decision.estimate_s)
        slices = tuple(Slice(job=piece.job, start=piece.start, end=piece.end) for piece in decision.slices)
        return await group.link.call("run_step", number, slices, deadline_s=deadline_s)

    async def _snapshot_if_due(
        self, decision: StepDecision, jobs: list[LiveJob], group: Host, outcome: StepOutcome
    ) -> None:
        every_s = self._core.config.scheduler.snapshot_every_s
        for job in jobs:
            if decision.id not in self._core.running:
                return  # the group was given up meanwhile, and its jobs with it
            job.stepped_s += outcome.seconds
            if every_s is not None and job.stepped_s - job.snapshot_at_s >= every_s and not job.is_ended:
                job.snapshot_at_s = job.stepped_s
                await self._handing_off.snapshot(job, group)

    def _finish(self, decision: StepDecision, jobs: list[LiveJob], outcome: StepOutcome, seconds: float) -> None:
        """Journal first, then books, then what follows."""
        core = self._core
        group = core.prefill[decision.block.start]
        del core.running[decision.id]
        with core.journal.transaction():
            for job, piece in zip(jobs, decision.slices, strict=True):
                if not job.is_ended:
                    self._record(job, piece, decision, outcome, seconds)
        core.scheduler.step_done(decision.id, core.clock(), outcome.seconds)
        self._count(decision, outcome, seconds)
        for job, piece in zip(jobs, decision.slices, strict=True):
            if job.is_ended:
                core.leave_group(job)
            elif piece.end == job.row.prompt_tokens:
                core.scheduler.keep(job.number, group.unit, job.row.prompt_tokens)
                self._handing_off.begin(job)
            else:
                job.waits_for = None
        core.wake_drive.set()

    def _record(self, job: LiveJob, piece: Slice, decision: StepDecision, outcome: StepOutcome, seconds: float) -> None:
        core = self._core
        left = job.row.prompt_tokens - piece.end
        event = {
            "number": job.row.num_steps,
            "start": piece.start,
            "end": piece.end,
            "seconds": seconds,
            "rank_seconds": list(outcome.rank_seconds),
            "estimate_s": decision.estimate_s,
            "num_steps_left": -(-left // piece.num_tokens),
            "group": core.prefill[decision.block.start].name,
            "reason": decision.reason,
        }
        core.journal.record_step(job.number, end=piece.end, event=event)
        report = step_report(job.row.report, outcome.stats)
        core.refresh(job, core.journal.update(job.number, report=report))
        if core.config.service.trace:
            core.traces.add_step(job.row.id, event["group"], outcome.stats)

    def _count(self, decision: StepDecision, outcome: StepOutcome, seconds: float) -> None:
        metrics = self._core.metrics
        metrics.step.observe(outcome.seconds)
        metrics.overhead.observe(max(seconds - max(outcome.rank_seconds, default=seconds), 0.0))
        metrics.tokens.labels("prefilled").inc(sum(piece.num_tokens for piece in decision.slices))
        if outcome.seconds > 0:
            metrics.estimate.observe(decision.estimate_s / outcome.seconds)
            metrics.estimate_error.set(self._core.scheduler.costs.error)
        for rank in outcome.stats:
            for operation, (_, num_bytes, _) in rank.comm.items():
                metrics.comm_bytes.labels(operation).inc(num_bytes)

    def _give_up(self, decision: StepDecision, jobs: list[LiveJob]) -> None:
        """A step that was never run: its jobs go back, or leave when they have ended."""
        core = self._core
        if core.running.pop(decision.id, None) is None:
            return
        core.scheduler.give_up(decision.id)
        for job in jobs:
            if job.is_ended:
                core.leave_group(job)
                core.scheduler.drop(job.number)
        core.wake_drive.set()
