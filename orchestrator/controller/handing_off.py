"""From a group to a decode worker: room is found, pages stream while steps run, the rest follows, generation begins.

Rooms are given first come, first served to jobs whose prompts are done; a job that has just begun gets one in advance
only while nobody waits. A hand-off that fails goes to another worker, then the job begins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from pathlib import Path

from longprefill.orchestrator.controller.core import LOST, Core
from longprefill.orchestrator.controller.generating import Generating
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.controller.reports import final_report
from longprefill.orchestrator.hosts.contract import (
    ExportOutcome,
    HandoffFailed,
    HandoffOutcome,
    HandoffRequest,
    NoLink,
    NoRoom,
)
from longprefill.orchestrator.job import JobState
from longprefill.partition.errors import UserError

logger = logging.getLogger(__name__)

HANDOFF_ATTEMPTS = 3
HANDOFF_DEADLINE_S = 600.0
START_DEADLINE_S = 180.0
EXPORT_DEADLINE_S = 600.0
ROOM_POLL_S = 1.0


class HandingOff:
    """`begin` when a prompt is done."""

    def __init__(self, core: Core, generating: Generating) -> None:
        self._core = core
        self._generating = generating
        self._room = asyncio.Lock()

    def begin(self, job: LiveJob) -> None:
        """Everything that follows the last step, as a task of the job."""
        job.task = self._core.spawn(self._run(job), f"hand-off of {job.row.id}")

    async def start_early(self, job: LiveJob) -> None:
        """Lets the pages of a job that begins stream from its first step on, if a worker has room now."""
        is_wanted = job.row.request.max_new_tokens and not job.is_ended and not job.is_streaming
        if is_wanted and job.group is not None and not self._room.locked():
            await self._start(job)

    async def snapshot(self, job: LiveJob, group: Host) -> bool:
        """The job as it stands, as a file that survives the group; False when it could not be written."""
        core = self._core
        assert group.link is not None
        path = core.journal.snapshots / f"{job.row.id}-{secrets.token_hex(4)}.safetensors"
        try:
            done: ExportOutcome = await group.link.call(
                "export_job", job.number, str(path), deadline_s=EXPORT_DEADLINE_S
            )
        except BaseException as error:  # an answer that is lost or not waited for leaves a file that no job names
            self._discard(path)
            if not isinstance(error, UserError) or isinstance(error, LOST):
                raise
            core.metrics.failures.labels("snapshot").inc()
            logger.warning("job %s: no snapshot: %s", job.row.id, error)
            return False
        if job.is_ended or job.group is not group:
            self._discard(path)
            return False
        before = job.row.snapshot
        columns = {"snapshot": str(path), "snapshot_position": done.position}
        core.refresh(job, core.journal.update(job.number, **columns))
        if before is not None and before != str(path):
            self._discard(Path(before))
        return True

    @staticmethod
    def _discard(path: Path) -> None:
        with contextlib.suppress(OSError):  # the journal's sweep comes again
            path.unlink()

    async def _run(self, job: LiveJob) -> None:
        core = self._core
        group = job.group
        assert group is not None
        try:
            is_wanted = job.row.request.keep_snapshot and job.row.snapshot_position < job.row.prompt_tokens
            if is_wanted and not await self.snapshot(job, group):
                if not job.is_ended:
                    core.end(job, JobState.FAILED, "its snapshot could not be written: the disk is full or not ours")
                return
            if job.row.request.max_new_tokens == 0:
                report = await final_report(core, job, None)
                core.end(job, JobState.DONE, report=report)
                return
            await self._hand_over(job, group)
        except LOST as error:
            if job.group is group:
                core.host_is_lost(group, "rebuilding", str(error))

    async def _hand_over(self, job: LiveJob, group: Host) -> None:
        core = self._core
        assert group.link is not None
        if job.row.state is JobState.PREFILLING:
            core.refresh(job, core.journal.change(job.number, JobState.HANDING_OFF))
        reason = ""
        for _ in range(HANDOFF_ATTEMPTS):
            if not job.is_streaming:
                await self._find_room(job)
            if job.is_ended:
                return
            decode = job.decode
            try:
                done: HandoffOutcome = await group.link.call(
                    "finish_handoff", job.number, deadline_s=HANDOFF_DEADLINE_S
                )
            except HandoffFailed as error:
                reason = str(error)
                core.metrics.failures.labels("handoff").inc()
                logger.info("job %s: hand-off to %s: %s", job.row.id, decode and decode.name, reason)
            else:
                report = await final_report(core, job, done)
                if decode is not None and job.decode is decode:  # nothing is waited for until generation begins
                    core.metrics.handoff_bytes.inc(done.num_bytes)
                    core.metrics.handoff_exposed.observe(done.exposed_s)
                    await self._generating.begin(job, report)
                    return
                reason = "the decode worker was lost"
            job.decode, job.is_streaming = None, False
            await core.tell(group, "cancel_handoff", job.number)
        core.requeue(job, f"the hand-off failed {HANDOFF_ATTEMPTS} times: {reason}", is_failure=True)

    async def _find_room(self, job: LiveJob) -> None:
        """Until a decode worker has reserved room for the job; or the job can have none anywhere, and ends."""
        core = self._core
        async with self._room:
            while not job.is_ended:
                core.decode_room_changed.clear()
                reason = await self._start(job)
                if reason is None:
                    return
                job.waits_for = reason
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROOM_POLL_S):
                        await core.decode_room_changed.wait()

    async def _start(self, job: LiveJob) -> str | None:
        """Reserves room at the decode worker that has most; why there is none, or None."""
        core = self._core
        group, request = job.group, job.row.request
        link = None if group is None else group.link
        if group is None or link is None:
            return "its group was lost"
        ready = [decode for decode in core.decode if decode.is_ready and group.links.get(decode.name) is None]
        reason, num_never = "no decode worker is ready", 0
        for decode in sorted(ready, key=_free_tokens, reverse=True):
            await core.has_left(job, decode)
            wanted = HandoffRequest(
                job=job.number,
                decode=decode.name,
                max_new_tokens=request.max_new_tokens,
                num_samples=request.num_samples,
            )
            try:
                await link.call("start_handoff", wanted, deadline_s=START_DEADLINE_S)
            except NoRoom as error:
                reason = str(error)
                num_never += error.needed_tokens > error.max_tokens
            except NoLink as error:
                reason = group.links[decode.name] = str(error)
            except HandoffFailed as error:
                reason = str(error)
            else:
                if job.is_ended or not decode.is_ready or job.group is not group:
                    await core.tell(group, "cancel_handoff", job.number)
                    return f"{decode.name if job.group is group else group.name} was lost"
                job.decode, job.is_streaming = decode, True
                core.refresh(job, core.journal.update(job.number, decode_worker=decode.name))
                return None
        if num_never == len(core.decode) and not job.is_ended:
            core.end(job, JobState.FAILED, f"no decode worker can ever hold it: {reason}")
        return reason


def _free_tokens(decode: Host) -> int:
    return 0 if decode.state is None else decode.state.max_tokens - decode.state.used_tokens
