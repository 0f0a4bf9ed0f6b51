"""The host of a prefill group: an actor that owns the ranks, their pools and every conversation with them.

`PrefillHost` is a plain class (its group needs Ray); `PrefillHostActor` is the same as a Ray actor. Commands that use
the ranks wait for each other; `state` never waits. `supervisor.py` starts the group, watches it and rebuilds it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.groups import PrefillGroup
from longprefill.orchestrator.handoff import Handoff
from longprefill.orchestrator.hosts.checks import check_room, check_snapshot, checked_prompt, checked_step
from longprefill.orchestrator.hosts.contract import (
    ExportOutcome,
    HandoffFailed,
    HandoffOutcome,
    HandoffRequest,
    HostJob,
    HostSettings,
    HostState,
    NoLink,
    NoRoom,
    OpenOutcome,
    StepOutcome,
    UnknownHostJob,
)
from longprefill.orchestrator.hosts.fence import Fence, rss_bytes
from longprefill.orchestrator.hosts.once import Once
from longprefill.orchestrator.hosts.remote_decode import RemoteDecode
from longprefill.orchestrator.hosts.supervisor import Supervisor
from longprefill.orchestrator.hosts.threads import served_by
from longprefill.orchestrator.outputs import check_writable
from longprefill.orchestrator.plan import NUM_SLOTS
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.spec import Whereabouts

MAX_KEPT_STEPS = 64
STEP_TIMEOUT_S = 3600.0
"""For a repeated call to hear of a step that still runs: the first one's caller has no deadline but the watch."""
CONCURRENCY = {"control": 4, "waiting": 4, "commands": 24}


@dataclass(kw_only=True, eq=False)
class _Transfer:
    """A hand-off under way."""

    request: HandoffRequest
    transfer_id: str
    handoff: Handoff | None = None
    """None until it is open."""
    side: RemoteDecode | None = None

    def release(self) -> None:
        """Gives back what the transfer has reserved, if the decode host still answers."""
        if self.side is not None:
            with contextlib.suppress(RunFailed, UserError):
                self.side.release(self.request.job, self.transfer_id)


class PrefillHost:
    """See `PrefillHostApi` for what each method promises."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self._fence = Fence()
        self._place = Whereabouts.here()
        self._supervisor = Supervisor(settings, on_loss=self._forget_jobs)
        self._prompts: dict[int, np.ndarray] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._links: set[tuple[str, str]] = set()
        self._transfer_numbers = itertools.count(1)
        self._last_step = 0
        self._running: tuple[int, tuple[Slice, ...]] | None = None
        self._steps: Once[int] = Once(MAX_KEPT_STEPS, timeout_s=STEP_TIMEOUT_S)
        self._finishes: Once[str] = Once(2 * NUM_SLOTS, timeout_s=STEP_TIMEOUT_S)

    # ---- life ---------------------------------------------------------------------------------------------------

    @served_by("commands")
    def start(self, epoch: int) -> None:
        self._fence.check(epoch)
        self._supervisor.start()

    @served_by("control")
    def state(self, epoch: int) -> HostState:
        self._fence.check(epoch)
        return self._state()

    def _state(self) -> HostState:
        supervisor, cluster = self._supervisor, self.settings.cluster
        group = supervisor.group
        ranks = [] if group is None else list(group.ranks)
        pids = [os.getpid(), *(rank.pid for rank in ranks if rank.is_here)]
        num_pages = 0 if group is None else group.holder.num_pages
        num_free = 0 if group is None else group.pages.num_free
        return HostState(
            name=self.settings.name,
            role="prefill",
            state=supervisor.condition.state,
            reason=supervisor.condition.reason,
            epoch=self._fence.epoch,
            generation=supervisor.generation,
            mesh=f"cp {cluster.cp} x tp {cluster.tp}",
            pid=self._place.pid,
            machine=self._place.machine,
            nodes=tuple(dict.fromkeys(rank.place.node for rank in ranks if rank.place is not None)),
            jobs=() if group is None else tuple(self._described(group)),
            used_tokens=(num_pages - num_free) * PAGE_TOKENS,
            max_tokens=num_pages * PAGE_TOKENS,
            rss_bytes=sum(rss_bytes(pid) for pid in pids),
            num_restarts=supervisor.num_restarts,
            last_step=self._last_step,
            running=self._running,
        )

    @served_by("waiting")
    def await_ready(self, epoch: int, timeout_s: float) -> HostState:
        self._fence.check(epoch)
        self._supervisor.condition.await_settled(timeout_s)
        return self._state()

    @served_by("commands")
    def close(self, epoch: int) -> None:
        self._fence.check(epoch)
        self._supervisor.close()

    # ---- jobs and steps -----------------------------------------------------------------------------------------

    @served_by("commands")
    def open_job(self, epoch: int, job: int, tokens_T: np.ndarray, snapshot: str | None = None) -> OpenOutcome:
        with self._using_group(epoch) as group:
            tokens = checked_prompt(tokens_T, group.config.vocab_size)
            if group.is_open(job):
                if not np.array_equal(self._prompts[job], tokens):
                    raise UserError(f"job {job} is open at {self.settings.name} with another prompt: close it first")
                return OpenOutcome(position=group.position(job), generation=self._supervisor.generation)
            check_room(group, job, len(tokens))
            if snapshot is not None:
                check_snapshot(group, snapshot, tokens)
            position = group.open_job(job, tokens, snapshot)
            self._prompts[job] = tokens
            return OpenOutcome(position=position, generation=self._supervisor.generation)

    @served_by("commands")
    def run_step(self, epoch: int, number: int, slices: Sequence[Slice]) -> StepOutcome:
        self._fence.check(epoch)

        def admit() -> None:
            if number <= self._last_step:
                raise UserError(f"step {number} is long over: {self._last_step} was the last; go on with a higher one")
            self._last_step = number

        return self._steps.run(number, lambda: self._run_step(epoch, number, tuple(slices)), admit=admit)

    @served_by("commands")
    def export_job(self, epoch: int, job: int, path: str) -> ExportOutcome:
        started = time.perf_counter()
        target = Path(path).absolute()
        check_writable("the snapshot", target)
        with self._using_group(epoch, job) as group:
            position = group.position(job)
            group.export_job(job, str(target), self._prompts[job])
        try:
            num_bytes = target.stat().st_size
        except OSError as error:
            raise UserError(
                f"the snapshot {target} was written on another machine ({error.strerror} here): use a directory that "
                "all machines share"
            ) from None
        seconds = time.perf_counter() - started
        return ExportOutcome(path=str(target), position=position, num_bytes=num_bytes, seconds=seconds)

    @served_by("commands")
    def close_job(self, epoch: int, job: int) -> None:
        with self._using_group(epoch) as group:
            if group.is_open(job):
                self._drop_transfer(job)
                self._prompts.pop(job, None)
                group.close_job(job)

    # ---- hand-off -----------------------------------------------------------------------------------------------

    @served_by("commands")
    def check_link(self, epoch: int, decode: str) -> None:
        self._ensure_link(epoch, decode)

    @served_by("commands")
    def start_handoff(self, epoch: int, request: HandoffRequest) -> None:
        job = request.job
        with self._using_group(epoch, job) as group:
            known = self._transfers.get(job)
            if known is not None and known.request == request:
                return
            self._cancel_transfer(group, job)
            if len(self._transfers) >= NUM_SLOTS:
                size = group.num_tokens(job)
                raise NoRoom(f"{NUM_SLOTS} jobs of {self.settings.name} are being handed over", size, 0, size)
            number = next(self._transfer_numbers)
            transfer = _Transfer(request=request, transfer_id=f"{self.settings.name}-{self._place.pid}-{number}")
            self._transfers[job] = transfer
            num_tokens = group.num_tokens(job)
        try:
            self._ensure_link(epoch, request.decode)
            transfer.side = RemoteDecode(request.decode, self._epoch, request=request, num_tokens=num_tokens)
            handoff = Handoff(
                group,
                transfer.side,
                job=job,
                transfer_id=transfer.transfer_id,
                exclusive=functools.partial(self._using_transfer, transfer),
            )
            handoff.open()
            transfer.handoff = handoff
        except BaseException:
            self._drop_transfer(job, transfer)
            transfer.release()
            raise

    @served_by("commands")
    def finish_handoff(self, epoch: int, job: int) -> HandoffOutcome:
        with self._using_group(epoch, job) as group:
            transfer = self._transfers.get(job)
            if transfer is None or transfer.handoff is None:
                raise HandoffFailed(f"job {job} is not being handed over: start_handoff first")
            if group.position(job) < group.num_tokens(job):
                raise UserError(f"job {job} stands at {group.position(job)} of {group.num_tokens(job)}: run its steps")
        return self._finishes.run(transfer.transfer_id, functools.partial(self._finish, transfer))

    @served_by("commands")
    def cancel_handoff(self, epoch: int, job: int) -> None:
        with self._using_group(epoch, job) as group:
            transfer = self._cancel_transfer(group, job)
        if transfer is not None:
            transfer.release()

    # ---- what commands do ---------------------------------------------------------------------------------------

    def _run_step(self, epoch: int, number: int, slices: tuple[Slice, ...]) -> StepOutcome:
        with self._using_group(epoch) as group:
            ending = checked_step(group, slices)
            self._running = (number, slices)
            started = time.perf_counter()
            try:
                reports = group.run_step(slices, ending, with_stats=True)
            except UserError as error:  # of one rank, in the middle of it: the others cannot go on
                raise RunFailed(f"a rank refused a step: {error}") from error
            finally:
                self._running = None
            seconds = time.perf_counter() - started
            self._supervisor.worked()
            return StepOutcome(
                number=number,
                seconds=seconds,
                rank_seconds=tuple(report.seconds for report in reports),
                generation=self._supervisor.generation,
                stats=tuple(report.stats for report in reports if report.stats is not None),
            )

    def _ensure_link(self, epoch: int, decode: str) -> None:
        self._fence.check(epoch)
        try:
            address, identity = RemoteDecode(decode, self._epoch).link()
        except HandoffFailed as error:
            raise NoLink(str(error)) from None
        if (decode, address.path) in self._links:
            return
        with self._using_group(epoch) as group:
            refusals = group.check_link(address, identity)
        if refusals:
            label, reason = next(iter(refusals.items()))
            raise NoLink(
                f"{label} of {self.settings.name} cannot send to {decode}: {reason}. Pages travel by shared memory "
                "(one machine, one user, one /dev/shm) or to the address that a decode host listens at"
            )
        self._links.add((decode, address.path))

    def _finish(self, transfer: _Transfer) -> HandoffOutcome:
        assert transfer.handoff is not None
        try:
            report = transfer.handoff.finish()
        except BaseException:
            self._drop_transfer(transfer.request.job, transfer)
            transfer.release()
            raise
        return HandoffOutcome(
            num_bytes=report.num_bytes,
            seconds=report.seconds,
            exposed_s=report.exposed_s,
            num_attempts=transfer.handoff.attempt + 1,
        )

    def _cancel_transfer(self, group: PrefillGroup, job: int) -> _Transfer | None:
        """Nothing of the job's hand-off moves afterwards. The caller uses the group."""
        transfer = self._drop_transfer(job)
        if transfer is not None:
            group.cancel_transfer(job)
        return transfer

    def _drop_transfer(self, job: int, only: _Transfer | None = None) -> _Transfer | None:
        transfer = self._transfers.get(job)
        if transfer is None or (only is not None and transfer is not only):
            return None
        del self._transfers[job]
        self._finishes.forget(transfer.transfer_id)
        return transfer

    def _forget_jobs(self) -> None:
        """The group is lost: so are its jobs."""
        self._prompts.clear()
        self._transfers.clear()
        self._finishes.clear()

    # ---- checks -------------------------------------------------------------------------------------------------

    def _epoch(self) -> int:
        return self._fence.epoch

    @contextmanager
    def _using_group(self, epoch: int, job: int | None = None) -> Iterator[PrefillGroup]:
        """The ranks, for one command at a time; a failure in the block is the group's loss."""
        self._fence.check(epoch)
        with self._supervisor.using() as group:
            self._fence.check(epoch)  # a newer controller may have come while this command waited
            if job is not None and not group.is_open(job):
                raise UnknownHostJob(f"job {job} is not open at {self.settings.name}: closed, or lost with its group")
            yield group

    @contextmanager
    def _using_transfer(self, transfer: _Transfer) -> Iterator[None]:
        with self._supervisor.using():
            if self._transfers.get(transfer.request.job) is not transfer:
                raise HandoffFailed(f"the hand-off of job {transfer.request.job} was cancelled")
            yield

    def _described(self, group: PrefillGroup) -> Iterator[HostJob]:
        for job in group.jobs:
            transfer = self._transfers.get(job)
            try:
                position, num_tokens = group.position(job), group.num_tokens(job)
            except KeyError:
                continue  # closed while we looked
            yield HostJob(
                job=job,
                stage="open" if transfer is None else "handing_off",
                position=position,
                num_tokens=num_tokens,
                decode=None if transfer is None else transfer.request.decode,
            )


# ray's type stubs know neither concurrency groups nor what they return
PrefillHostActor: Any = ray.remote(concurrency_groups=CONCURRENCY, max_restarts=0)(PrefillHost)  # pyright: ignore[reportCallIssue]
