"""The host of a decode worker: an actor that holds the model and decodes all its jobs together in one thread.

`DecodeHost` is a plain class; `DecodeHostActor` is the same as a Ray actor whose `state` answers while it decodes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray

from longprefill.comms.transport.base import PoolAddress, TransportError
from longprefill.comms.transport.holder import CHANNELS
from longprefill.comms.transport.socket_server import PoolServer
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.contract import (
    DecodeTokens,
    GenerateRequest,
    HostJob,
    HostSample,
    HostSettings,
    HostState,
    NoRoom,
    NotReady,
    Reservation,
    UnknownHostJob,
)
from longprefill.orchestrator.hosts.fence import MAX_WAIT_S, Condition, Fence, rss_bytes
from longprefill.orchestrator.hosts.threads import served_by
from longprefill.orchestrator.launch import Holder
from longprefill.orchestrator.plan import NUM_SLOTS, check_fits
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers import device as devices
from longprefill.workers.cache.pages import PageAllocator
from longprefill.workers.decode import continuation_pages
from longprefill.workers.decode_batch import CommittedJob, DecodeBatch
from longprefill.workers.decode_loop import DecodeLoop, LoopEnded
from longprefill.workers.decode_worker import DecodeWorker
from longprefill.workers.handoff.parts import HandoffTarget
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.sharding import ALONE
from longprefill.workers.sampling import DecodeFailure, DecodeToken
from longprefill.workers.spec import Whereabouts

CALL_TIMEOUT_S = 60.0
"""For what runs between two iterations."""
COMMIT_TIMEOUT_S = 110.0
"""Below the sender's deadline (orchestrator/handoff.py), so that it hears the reason."""
LINK_CHANNEL = CHANNELS - 1
"""Of no slot: only tried out."""
CONCURRENCY = {"control": 4, "waiting": 4, "polling": 4, "commands": 16}
T = TypeVar("T")


@dataclass(kw_only=True)
class _Job:
    reservation: Reservation
    pages: tuple[int, ...]
    target: HandoffTarget | None = None
    is_committed: bool = False
    request: GenerateRequest | None = None


class DecodeHost:
    """See `DecodeHostApi` for what each method promises."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self._fence = Fence()
        self._condition = Condition(settings.name)
        self._place = Whereabouts.here()
        self._jobs: dict[int, _Job] = {}
        self._starting = threading.Lock()
        self._starter: threading.Thread | None = None
        self._num_pages = 0
        self._pages = PageAllocator(0)
        self._holder: Holder | None = None
        self._loop: DecodeLoop | None = None
        self._server: PoolServer | None = None

    # ---- life ---------------------------------------------------------------------------------------------------

    @served_by("commands")
    def start(self, epoch: int) -> None:
        self._check(epoch)
        with self._starting:
            if self._starter is None:
                self._starter = threading.Thread(target=self._start, name="starter", daemon=True)
                self._starter.start()

    @served_by("control")
    def state(self, epoch: int) -> HostState:
        self._check(epoch)
        return self._state()

    def _state(self) -> HostState:
        if self._loop is not None and self._loop.failure is not None:
            self._condition.set("failed", self._loop.failure)
        state, reason = self._condition.state, self._condition.reason
        jobs = tuple(self._described(number, job) for number, job in list(self._jobs.items()))
        return HostState(
            name=self.settings.name,
            role="decode",
            state=state,
            reason=reason,
            epoch=self._fence.epoch,
            generation=1,
            mesh="cp 1 x tp 1",
            pid=self._place.pid,
            machine=self._place.machine,
            nodes=(self._place.node,),
            jobs=jobs,
            used_tokens=(self._num_pages - self._pages.num_free) * PAGE_TOKENS,
            max_tokens=self._num_pages * PAGE_TOKENS,
            rss_bytes=rss_bytes(os.getpid()),
            num_restarts=0,
            last_step=0,
            running=None,
            first_cursor=0 if self._loop is None else self._loop.log.acknowledged,
        )

    @served_by("waiting")
    def await_ready(self, epoch: int, timeout_s: float) -> HostState:
        self._check(epoch)
        self._condition.await_settled(timeout_s)
        return self._state()

    @served_by("commands")
    def close(self, epoch: int) -> None:
        self._check(epoch)
        self._condition.set("closed")
        if self._starter is not None:
            self._starter.join(CALL_TIMEOUT_S)
        if self._loop is not None:
            self._loop.close()
        if self._server is not None:
            self._server.close()
        if self._holder is not None:
            self._holder.close()

    # ---- jobs ---------------------------------------------------------------------------------------------------

    @served_by("control")
    def link(self, epoch: int) -> tuple[PoolAddress, str]:
        self._check(epoch)
        self._condition.check_ready()
        receiver = self._worker.receiver
        return receiver.publish(LINK_CHANNEL), receiver.identity

    @served_by("commands")
    def reserve(self, epoch: int, reservation: Reservation) -> HandoffTarget:
        self._check(epoch)
        return self._call(functools.partial(self._reserve, reservation))

    @served_by("commands")
    def commit(self, epoch: int, manifest: bytes, commit: bytes) -> bytes:
        self._check(epoch)
        loop = self._running
        verification = self._commit(manifest, commit)
        return self._answer(lambda: loop.work(verification, timeout_s=COMMIT_TIMEOUT_S), COMMIT_TIMEOUT_S)

    @served_by("commands")
    def generate(self, epoch: int, request: GenerateRequest) -> None:
        self._check(epoch)
        self._call(functools.partial(self._generate, request))

    @served_by("polling")
    def poll(self, epoch: int, cursor: int, timeout_s: float) -> DecodeTokens:
        self._check(epoch)
        is_stale = functools.partial(self._is_stale, epoch)
        batch = self._running.log.poll(cursor, min(max(timeout_s, 0.0), MAX_WAIT_S), is_stale=is_stale)
        self._check(epoch)
        return DecodeTokens(
            tokens=tuple(entry for entry in batch.entries if isinstance(entry, DecodeToken)),
            failures=tuple(entry for entry in batch.entries if isinstance(entry, DecodeFailure)),
            cursor=batch.cursor,
        )

    @served_by("commands")
    def end_sample(self, epoch: int, job: int, sample: int) -> None:
        self._check(epoch)
        self._call(functools.partial(self._end_sample, job, sample))

    @served_by("commands")
    def release(self, epoch: int, job: int, transfer_id: str | None = None) -> None:
        self._check(epoch)
        self._call(functools.partial(self._release, job, transfer_id))

    # ---- in the starting thread ---------------------------------------------------------------------------------

    def _start(self) -> None:
        settings = self.settings.cluster
        try:
            config = read_config(settings.model_dir)
            check_fits(replace(settings, cp=1, tp=1), config, PAGE_TOKENS, num_decode=0)
            self._holder = Holder(settings, config)
            self._worker = DecodeWorker()
            self._worker.start(self._holder.spec(self._holder.create_pool(self.settings.name), ALONE))
            if self.settings.listen is not None:
                self._server = PoolServer(self._holder.pool(self.settings.name), self.settings.listen)
                self._worker.receiver.publish = self._server.address
        except UserError as error:
            self._condition.set("failed", str(error))
            return
        except BaseException as error:
            lines = str(error).splitlines() or [""]
            self._condition.set("failed", f"it did not start: {type(error).__name__}: {lines[0]}")
            raise
        self._num_pages = self._holder.num_pages
        self._pages = PageAllocator(self._num_pages)
        self._batch = DecodeBatch(self._worker.decode, max_running=self.settings.max_running_samples)
        self._loop = DecodeLoop(self._batch, self.settings.max_kept_tokens, prepare=self._prepare_thread)
        self._condition.set("ready")

    def _prepare_thread(self) -> None:
        # a thread's own: without it this one takes every core
        devices.configure_threads(self.settings.cluster.threads_per_rank)

    # ---- in the decoding thread ---------------------------------------------------------------------------------

    def _reserve(self, reservation: Reservation) -> HandoffTarget:
        number = reservation.job
        known = self._jobs.get(number)
        if known is not None and known.is_committed:
            raise UserError(f"job {number} was handed over already: release it first")
        if known is not None and known.reservation.transfer_id != reservation.transfer_id:
            self._release(number)
            known = None
        if known is not None and known.reservation == reservation and known.target is not None:
            return known.target
        if self._worker.receiver.num_free_slots == 0 and known is None:
            raise self._no_room(reservation, f"{NUM_SLOTS} jobs are on their way to it, it takes no more at once")
        if known is None:
            known = self._jobs[number] = _Job(reservation=reservation, pages=self._allocated(reservation))
        known.reservation = reservation
        table = known.pages[: -(-reservation.num_tokens // PAGE_TOKENS)]
        try:
            known.target = self._worker.receiver.reserve(number, reservation.transfer_id, reservation.attempt, table)
        except TransportError:
            self._release(number)
            raise
        return known.target

    def _allocated(self, reservation: Reservation) -> tuple[int, ...]:
        size = (reservation.num_tokens, reservation.max_new_tokens, max(reservation.num_samples, 1))
        num_pages = continuation_pages(*size)
        if num_pages > self._pages.num_free:
            raise self._no_room(
                reservation,
                f"the prompt's {size[0]} tokens and {size[2]} times {size[1]} new ones need {num_pages} pages of "
                f"{PAGE_TOKENS}, {self._pages.num_free} of {self._num_pages} are free",
            )
        return self._pages.allocate(reservation.job, num_pages * PAGE_TOKENS)

    def _no_room(self, reservation: Reservation, reason: str) -> NoRoom:
        num_pages = continuation_pages(
            reservation.num_tokens, reservation.max_new_tokens, max(reservation.num_samples, 1)
        )
        return NoRoom(
            f"job {reservation.job} finds no room at {self.settings.name}: {reason}",
            num_pages * PAGE_TOKENS,
            self._pages.num_free * PAGE_TOKENS,
            self._num_pages * PAGE_TOKENS,
        )

    def _commit(self, manifest: bytes, commit: bytes) -> Any:
        """A generator for the loop."""
        answer, received = yield from self._worker.receiver.verification(manifest, commit)
        if received is not None:
            job = self._jobs[received.job]
            reservation = job.reservation
            committed = CommittedJob(
                job=received.job,
                pages=job.pages,
                num_tokens=received.state.position,
                max_new_tokens=reservation.max_new_tokens,
                num_samples=max(reservation.num_samples, 1),
                state=received.state,
                logits_V=received.logits_V,
            )
            self._batch.take(committed)
            job.is_committed = True
        return answer

    def _generate(self, request: GenerateRequest) -> None:
        job = self._committed(request.job)
        if job.request is None:
            self._batch.generate(request)
            job.request = request

    def _end_sample(self, number: int, sample: int) -> None:
        self._committed(number)
        self._batch.end_sample(number, sample)

    def _release(self, number: int, transfer_id: str | None = None) -> None:
        job = self._jobs.get(number)
        if job is None or transfer_id not in (None, job.reservation.transfer_id):
            return
        del self._jobs[number]
        if job.is_committed:
            self._batch.drop(number)
        self._worker.receiver.release(number)
        self._pages.release(number)
        self._running.log.drop(number)

    def _committed(self, number: int) -> _Job:
        job = self._jobs.get(number)
        if job is None or not job.is_committed:
            raise UnknownHostJob(f"job {number} was not handed over to {self.settings.name}, or is released")
        return job

    # ---- from any thread ----------------------------------------------------------------------------------------

    @property
    def _running(self) -> DecodeLoop:
        self._condition.check_ready()
        if self._loop is None:
            raise NotReady(f"{self.settings.name} is starting")
        if self._loop.failure is not None:
            raise NotReady(f"{self.settings.name} has failed: {self._loop.failure}")
        return self._loop

    def _call(self, function: Callable[[], T]) -> T:
        loop = self._running
        return self._answer(lambda: loop.call(function, timeout_s=CALL_TIMEOUT_S), CALL_TIMEOUT_S)

    def _answer(self, ask: Callable[[], T], timeout_s: float) -> T:
        try:
            return ask()
        except LoopEnded as error:
            raise NotReady(f"{self.settings.name} has failed: {error}") from None
        except FutureTimeout:
            raise RunFailed(f"{self.settings.name} did not answer within {timeout_s:.0f} s") from None

    def _check(self, epoch: int) -> None:
        if self._fence.check(epoch) and self._loop is not None:
            self._loop.log.wake()  # polls of earlier controllers end

    def _is_stale(self, epoch: int) -> bool:
        return epoch < self._fence.epoch

    def _described(self, number: int, job: _Job) -> HostJob:
        samples = self._batch.progress(number) if job.request is not None else ()
        stage = "reserved"
        if job.is_committed:
            is_ended = bool(samples) and all(reason is not None for *_, reason in samples)
            stage = "committed" if not samples else "ended" if is_ended else "generating"
        num_tokens = job.reservation.num_tokens
        return HostJob(
            job=number,
            stage=stage,
            position=num_tokens if job.is_committed else 0,
            num_tokens=num_tokens,
            samples=tuple(HostSample(sample=s, num_generated=n, finish_reason=r) for s, n, r in samples),
        )


# ray's type stubs know neither concurrency groups nor what they return
DecodeHostActor: Any = ray.remote(concurrency_groups=CONCURRENCY, max_restarts=0)(DecodeHost)  # pyright: ignore[reportCallIssue]
