"""What a new controller finds: jobs in the journal, hosts that outlived its predecessor. Jobs go on where they are; all
others are queued from their snapshots or beginnings. What a host holds for nobody, its keeper evicts.
"""

from __future__ import annotations

import asyncio
import logging
import time

from longprefill.orchestrator.controller.core import LOST, Core
from longprefill.orchestrator.controller.generating import Generating
from longprefill.orchestrator.controller.handing_off import HandingOff
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.controller.stepping import STEP_DEADLINE_S
from longprefill.orchestrator.hosts.contract import HostJob, HostState
from longprefill.orchestrator.job import JobState
from longprefill.orchestrator.journal.schema import JobRow

logger = logging.getLogger(__name__)

ATTACH_DEADLINE_S = 20.0
RESTARTED = "the controller was restarted"


class Recovery:
    """`run` once, before anything else moves."""

    def __init__(self, core: Core, handing_off: HandingOff, generating: Generating) -> None:
        self._core = core
        self._handing_off = handing_off
        self._generating = generating

    async def run(self) -> None:
        """Attaches to living hosts and gives every unfinished job its place."""
        core = self._core
        rows = core.journal.unfinished()
        await asyncio.gather(*(self._attach(host) for host in core.all_hosts()))
        held = {role: _held_jobs(hosts) for role, hosts in (("prefill", core.prefill), ("decode", core.decode))}
        for row in rows:
            self._place(row, held["prefill"].get(row.number), held["decode"].get(row.number))
        if rows:
            logger.info("epoch %d: %d unfinished jobs", core.epoch, len(rows))

    async def _attach(self, host: Host) -> None:
        """Finds a host that lives, takes it over, and lets its running step end. A host that does not answer is left to
        its keeper."""
        core = self._core
        try:
            link = await core.directory.find(host.name)
            if link is None:
                return
            state: HostState = await link.call("state", deadline_s=ATTACH_DEADLINE_S)
            if state.running is not None:
                number, slices = state.running
                await link.call("run_step", number, slices, deadline_s=STEP_DEADLINE_S)
                state = await link.call("state", deadline_s=ATTACH_DEADLINE_S)
        except LOST as error:
            logger.warning("%s was not taken over: %s", host.name, error)
            return
        host.link, host.state, host.heard_at = link, state, time.monotonic()
        host.status, host.reason = "starting", state.reason
        host.generation, host.cursor = state.generation, state.first_cursor
        host.next_step = state.last_step + 1

    def _place(self, row: JobRow, prefill: tuple[Host, HostJob] | None, decode: tuple[Host, HostJob] | None) -> None:
        core = self._core
        job = LiveJob(row=row)
        core.jobs[row.number] = job
        if decode is not None and decode[1].stage != "reserved" and row.state is not JobState.QUEUED:
            self._go_on_generating(job, decode[0])  # the worker has the whole job
            return
        if prefill is not None and row.state is not JobState.GENERATING:
            group, held = prefill
            job.row = self._position(row, held.position)
            if held.position == row.prompt_tokens and row.state is not JobState.QUEUED:
                job.group = group
                core.scheduler.keep(row.number, group.unit, row.prompt_tokens)
                self._stream_on(job, held)
                self._handing_off.begin(job)
                return
            if held.position < row.prompt_tokens:
                core.adopt(job, group, held.position)
                self._stream_on(job, held)
                return
        if row.state is JobState.QUEUED:
            job.row = self._position(row, row.snapshot_position)
            core.enqueue(job)
            return
        core.requeue(job, RESTARTED)

    def _go_on_generating(self, job: LiveJob, decode: Host) -> None:
        core = self._core
        if job.row.state is JobState.PREFILLING:
            job.row = core.journal.change(job.number, JobState.HANDING_OFF)
        if job.row.state is JobState.HANDING_OFF:
            columns = {"decode_worker": decode.name, "position": job.row.prompt_tokens}
            job.row = core.journal.change(job.number, JobState.GENERATING, **columns)
        job.decode = decode
        job.task = core.spawn(self._generating.resume(job), f"generation of {job.row.id}")

    def _stream_on(self, job: LiveJob, held: HostJob) -> None:
        """A hand-off that was under way goes on."""
        decode = next((host for host in self._core.decode if host.name == held.decode), None)
        if decode is not None and decode.link is not None:
            job.decode, job.is_streaming = decode, True

    def _position(self, row: JobRow, position: int) -> JobRow:
        """The journal follows the group, which may have ended a step that nobody was told of."""
        core = self._core
        if position == row.position:
            return row
        if position < row.position:
            return core.journal.update(row.number, position=position)
        event = {
            "number": row.num_steps,
            "start": row.position,
            "end": position,
            "seconds": None,
            "rank_seconds": [],
            "estimate_s": None,
            "num_steps_left": None,
            "group": row.group_name,
            "reason": RESTARTED,
        }
        return core.journal.record_step(row.number, end=position, event=event)


def _held_jobs(hosts: list[Host]) -> dict[int, tuple[Host, HostJob]]:
    """By job: the host that holds it, and how."""
    return {
        held.job: (host, held)
        for host in hosts
        if host.link is not None and host.state is not None and host.state.state == "ready"
        for held in host.state.jobs
    }
