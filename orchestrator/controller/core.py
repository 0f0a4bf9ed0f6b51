"""What all parts of the controller share: unfinished jobs, hosts, the scheduler, the journal, and the few changes that
touch several of them at once: a job is queued, queued again, ended; a host is lost.

Nothing here waits: every method changes books and starts tasks. A task that fails in a way nobody foresaw ends the
controller (`fatal`), which comes back from its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller.estimates import service_costs
from longprefill.orchestrator.controller.links import HostDirectory
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.controller.metrics import Metrics
from longprefill.orchestrator.controller.news import News
from longprefill.orchestrator.controller.setup import make_hosts, make_scheduler
from longprefill.orchestrator.controller.traces import TraceFiles
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.contract import HostState, NotReady, UnknownHostJob
from longprefill.orchestrator.job import JobState
from longprefill.orchestrator.journal.journal import Journal
from longprefill.orchestrator.journal.schema import JobRow
from longprefill.orchestrator.scheduler.decisions import Refused, StepDecision
from longprefill.orchestrator.scheduler.jobs import Job
from longprefill.orchestrator.scheduler.live import Outlook
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""A job that its group or decode worker failed with so often is failed itself."""
MAX_ATTEMPTS = 50
"""Openings of a job, whatever ended them: also what kills whole controllers ends some time."""
COMMAND_DEADLINE_S = 60.0
OUTLOOK_S = 0.2
LOST = (RunFailed, NotReady, UnknownHostJob)
"""What commands raise when a host is not what it was: dead, silent, rebuilt."""


class Core:
    """See the module's text."""

    def __init__(
        self,
        config: ServiceConfig,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        journal: Journal,
        directory: HostDirectory,
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.journal = journal
        self.directory = directory
        self.news = News()
        self.traces = TraceFiles(journal.directory / "traces")
        self.metrics = Metrics(journal.epoch, config.model.served_name)
        self.jobs: dict[int, LiveJob] = {}
        self.prefill, self.decode = make_hosts(config)
        self.running: dict[int, StepDecision] = {}
        """Steps that run, by the scheduler's number."""
        self.scheduler = make_scheduler(config, model, service_costs(config, model))
        self.wake_drive = asyncio.Event()
        self.decode_room_changed = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outlook: tuple[float, dict[int, Outlook]] = (-1.0, {})
        self._leaving: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._started_at = time.time()

    # ---- time, tasks ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.journal.epoch

    @property
    def started_at(self) -> float:
        return self._started_at

    def clock(self) -> float:
        """The scheduler's time: seconds since this controller began."""
        return time.time() - self._started_at

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs beside everything else; an unforeseen failure ends the controller."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fatal(error)

    def fatal(self, error: BaseException) -> None:
        """The controller cannot go on: another one, from the journal, must."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def refresh(self, job: LiveJob, row: JobRow) -> None:
        """The journal's row has changed: whoever waits for news of the job looks again."""
        job.row = row
        self.news.tell(row.number)

    def enqueue(self, job: LiveJob) -> None:
        """A job without any place waits for a group, from its snapshot's position on."""
        self.jobs[job.number] = job
        answer = self.scheduler.resume(self._scheduled(job.row), job.row.snapshot_position, self.clock())
        if isinstance(answer, Refused):
            self.end(job, JobState.FAILED, answer.reason)
        self.wake_drive.set()

    def adopt(self, job: LiveJob, group: Host, position: int) -> None:
        """A job that was found open on a group, in the middle of its prompt."""
        self.jobs[job.number] = job
        job.group = group
        answer = self.scheduler.adopt(self._scheduled(job.row), group.unit, position, self.clock())
        if isinstance(answer, Refused):
            self.end(job, JobState.FAILED, answer.reason)

    def requeue(self, job: LiveJob, reason: str, *, is_failure: bool = False) -> None:
        """A job has lost its place: it begins again where its snapshot is, with the tokens that it has; or fails, when
        this has happened too often."""
        if job.is_ended:
            return
        num_failures = job.row.num_failures + int(is_failure)
        self._stop_task(job)
        self._leave_hosts(job)
        if num_failures >= MAX_FAILURES:
            self.journal.update(job.number, num_failures=num_failures)
            self.end(job, JobState.FAILED, f"failed {num_failures} times, the last time: {reason}")
            return
        self.metrics.restarts.inc()
        columns: dict[str, Any] = {
            "position": job.row.snapshot_position,
            "num_failures": num_failures,
            "group_name": None,
            "decode_worker": None,
        }
        if job.row.state is JobState.QUEUED:
            row = self.journal.update(job.number, reason=reason, **columns)
        else:
            row = self.journal.change(job.number, JobState.QUEUED, reason=reason, **columns)
        logger.info("job %s: queued again: %s", row.id, reason)
        self.refresh(job, row)
        job.waits_for, job.texts, job.stepped_s, job.snapshot_at_s = reason, {}, 0.0, 0.0
        self.enqueue(job)

    def end(self, job: LiveJob, state: JobState, reason: str | None = None, **columns: Any) -> None:
        """A job's only end; what it holds anywhere is given back."""
        snapshot = job.row.snapshot
        if snapshot is not None and not (state is JobState.DONE and job.row.request.keep_snapshot):
            columns |= {"snapshot": None, "snapshot_position": 0}
            with contextlib.suppress(OSError):
                Path(snapshot).unlink()
        row = self.journal.change(job.number, state, reason=reason, **columns)
        logger.info("job %s: %s%s", row.id, state, f": {reason}" if reason else "")
        self._stop_task(job)
        self.refresh(job, row)
        self.jobs.pop(job.number, None)
        self._leave_hosts(job)
        self.journal.prompts.remove(row.id)
        self.metrics.ended(row)
        self.wake_drive.set()

    def is_in_step(self, job: LiveJob) -> bool:
        return any(piece.job == job.number for step in self.running.values() for piece in step.slices)

    def leave_group(self, job: LiveJob) -> None:
        """A job's pages at its prefill group are given back: at once in the scheduler's books when its group is gone,
        else when the group says so. A job in a step leaves when the step has ended."""
        group = job.group
        if group is None or self.is_in_step(job):
            return
        self.scheduler.drop(job.number)
        job.group, job.is_streaming = None, False
        if group.link is not None and group.is_ready:
            self.scheduler.keep(job.number, group.unit, job.row.prompt_tokens)
            self._leave(job, group, self._close(job.number, group))

    def _leave_hosts(self, job: LiveJob) -> None:
        if job.group is None:
            self.scheduler.drop(job.number)
        else:
            self.leave_group(job)
        decode, job.decode = job.decode, None
        if decode is not None and decode.link is not None:
            self._leave(job, decode, self._release(job.number, decode))

    async def _close(self, number: int, group: Host) -> None:
        await self.tell(group, "close_job", number, deadline_s=600.0)
        self.scheduler.release(number)
        self.wake_drive.set()

    async def _release(self, number: int, decode: Host) -> None:
        await self.tell(decode, "release", number)
        self.decode_room_changed.set()

    async def has_left(self, job: LiveJob, host: Host) -> None:
        """Until an earlier stay of the job on the host is over: commands may overtake each other."""
        task = self._leaving.get((job.number, host.name))
        if task is not None:
            await asyncio.wait([task])

    def _leave(self, job: LiveJob, host: Host, work: Coroutine[Any, Any, None]) -> None:
        self._remember((job.number, host.name), self.spawn(work, f"job {job.row.id} leaves {host.name}"))

    def _remember(self, key: tuple[int, str], task: asyncio.Task[None]) -> None:
        self._leaving[key] = task

        def forget(_: object) -> None:
            if self._leaving.get(key) is task:
                del self._leaving[key]

        task.add_done_callback(forget)

    def evict(self, number: int, host: Host) -> None:
        """A job that a host holds and that is not there for us."""
        key = (number, host.name)
        if key not in self._leaving:
            is_prefill = host.role == "prefill"
            work = self.tell(host, "close_job", number) if is_prefill else self._release(number, host)
            self._remember(key, self.spawn(work, f"evict {number} from {host.name}"))

    async def tell(self, host: Host, method: str, *arguments: Any, deadline_s: float = COMMAND_DEADLINE_S) -> None:
        """A command whose failure only means that the host is in trouble, which its keeper notices, or that there is
        nothing left to do."""
        if host.link is None:
            return
        try:
            await host.link.call(method, *arguments, deadline_s=deadline_s)
        except LOST as error:
            logger.info("%s: %s: %s", host.name, method, error)

    def _stop_task(self, job: LiveJob) -> None:
        task, job.task = job.task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _scheduled(self, row: JobRow) -> Job:
        arrival_s = row.created_at - self._started_at
        deadline_s = row.request.deadline_s
        return Job(
            id=row.number,
            num_tokens=row.prompt_tokens,
            arrival_s=arrival_s,
            deadline_s=float("inf") if deadline_s is None else arrival_s + deadline_s,
            priority=row.request.priority,
            tenant=row.tenant,
        )

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def host_is_ready(self, host: Host, state: HostState) -> None:
        """A host works, and is empty unless its jobs were adopted."""
        host.status, host.reason, host.state = "ready", None, state
        host.generation = state.generation
        host.next_step = max(host.next_step, state.last_step + 1)
        self.metrics.group_up.labels(host.name, host.role).set(1)
        if host.role == "prefill":
            self.scheduler.unit_back(host.unit)
            self.wake_drive.set()
        else:
            self.decode_room_changed.set()
        logger.info("%s is ready", host.name)

    def host_is_lost(self, host: Host, status: str, reason: str) -> None:
        """All that a host held is gone; its jobs are queued again. A second call finds nothing more."""
        was_ready = host.is_ready
        host.status, host.reason = status, reason
        self.metrics.group_up.labels(host.name, host.role).set(0)
        if was_ready:
            logger.warning("%s is lost: %s", host.name, reason)
            self.metrics.failures.labels(host.role).inc()
        if host.role == "decode":
            for job in [job for job in self.jobs.values() if job.decode is host]:
                job.decode, job.is_streaming = None, False
                if job.row.state is JobState.GENERATING:
                    self.requeue(job, f"{host.name} was lost: {reason}", is_failure=True)
            return
        stepping = {
            piece.job
            for number in [n for n, step in self.running.items() if step.block.start == host.unit]
            for piece in self.running.pop(number).slices
        }
        self.scheduler.forget_unit(host.unit, self.clock())
        for number in stepping - self.jobs.keys():
            self.scheduler.drop(number)  # it ended while its step ran
        for job in [job for job in self.jobs.values() if job.group is host]:
            job.group, job.is_streaming = None, False
            self.requeue(job, f"{host.name} was lost: {reason}", is_failure=job.number in stepping)
        self.wake_drive.set()

    def all_hosts(self) -> tuple[Host, ...]:
        return (*self.prefill, *self.decode)

    def outlook(self) -> dict[int, Outlook]:
        """Of waiting jobs, at most OUTLOOK_S old: a list asks for it once a job."""
        now = self.clock()
        if now - self._outlook[0] > OUTLOOK_S:
            self._outlook = (now, self.scheduler.outlook(now))
        return self._outlook[1]

    def num_queued(self, tenant: str | None = None) -> int:
        """Jobs that wait and have not begun."""
        return sum(job.row.state is JobState.QUEUED and tenant in (None, job.row.tenant) for job in self.jobs.values())
