"""A prefill host in memory: it only counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longprefill.orchestrator.hosts.contract import (
    ExportOutcome,
    GroupLost,
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
from longprefill.partition.errors import UserError
from longprefill.partition.layout import Slice
from longprefill.workers.spec import WorkerStats

from .decode_double import DecodeDouble
from .host_double import HostDouble, host_state, whole_pages

if TYPE_CHECKING:
    from .cluster_double import ClusterDouble


@dataclass
class Opened:
    tokens_T: np.ndarray
    position: int
    handoff: HandoffRequest | None = None


class PrefillDouble(HostDouble):
    role = "prefill"

    def __init__(self, settings: HostSettings, cluster: ClusterDouble) -> None:
        super().__init__(settings, cluster)
        self.jobs: dict[int, Opened] = {}
        self.outcomes: dict[int, StepOutcome] = {}
        self.running: tuple[int, tuple[Slice, ...]] | None = None
        self.fails_next_step: str | None = None
        self.dies_after_export = False
        self.last_step = 0
        self.lock = asyncio.Lock()

    def used(self) -> int:
        return sum(whole_pages(len(job.tokens_T)) for job in self.jobs.values())

    def state(self) -> HostState:
        jobs = tuple(
            HostJob(
                job=number,
                stage="handing_off" if job.handoff else "open",
                position=job.position,
                num_tokens=len(job.tokens_T),
                decode=job.handoff.decode if job.handoff else None,
            )
            for number, job in self.jobs.items()
        )
        return host_state(self, jobs, self.used(), last_step=self.last_step, running=self.running)

    def lose(self) -> None:
        """The group dies and is rebuilt."""
        self.jobs.clear()
        self.outcomes.clear()
        self.running = None
        self.generation += 1

    async def open_job(self, job: int, tokens_T: np.ndarray, snapshot: str | None = None) -> OpenOutcome:
        self.check_ready()
        if job in self.jobs:
            return OpenOutcome(position=self.jobs[job].position, generation=self.generation)
        most = whole_pages(self.settings.cluster.max_tokens)
        if self.used() + whole_pages(len(tokens_T)) > most:
            raise NoRoom("no room", whole_pages(len(tokens_T)), most - self.used(), most)
        position = 0
        if snapshot is not None:
            try:
                position = json.loads(Path(snapshot).read_text())["position"]
            except (OSError, ValueError) as error:
                raise UserError(f"snapshot {snapshot} cannot be used: {error}") from error
        self.cluster.opened.append((job, self.name, position))
        self.jobs[job] = Opened(tokens_T, position)
        return OpenOutcome(position=position, generation=self.generation)

    async def run_step(self, number: int, slices: Sequence[Slice]) -> StepOutcome:
        async with self.lock:
            self.check_ready()
            if number in self.outcomes:
                return self.outcomes[number]
            assert number > self.last_step or self.last_step == number
            generation = self.generation
            self.last_step, self.running = number, (number, tuple(slices))
            for piece in slices:
                if piece.job not in self.jobs:
                    raise UnknownHostJob(f"job {piece.job} is not open on {self.name}")
                assert self.jobs[piece.job].position == piece.start, (self.jobs[piece.job].position, piece)
            await self.cluster.pass_step(self, slices)
            if generation != self.generation or self.fails_next_step is not None:
                reason, self.fails_next_step = self.fails_next_step, None
                self.lose()
                raise GroupLost(reason or "a rank died")
            for piece in slices:
                if piece.job in self.jobs:
                    self.jobs[piece.job].position = piece.end
                self.cluster.prefilled[piece.job] = self.cluster.prefilled.get(piece.job, 0) + piece.num_tokens
            self.running = None
            stats = (WorkerStats(peak_rss_bytes=7, comm={"rows": (1, 64, 0.0)}, spans=()),)
            self.outcomes[number] = StepOutcome(
                number=number, seconds=0.01, rank_seconds=(0.009,), generation=self.generation, stats=stats
            )
            return self.outcomes[number]

    async def start_handoff(self, request: HandoffRequest) -> None:
        self.check_ready()
        opened = self._opened(request.job)
        if opened.handoff is not None and opened.handoff.decode != request.decode:
            await self.cancel_handoff(request.job)
        decode = self.cluster.hosts.get(request.decode)
        if not isinstance(decode, DecodeDouble) or decode.condition != "ready":
            raise HandoffFailed(f"{request.decode} does not answer")
        if request.decode in self.cluster.unreachable:
            raise NoLink("they share no memory")
        decode.reserve(request, opened.tokens_T)
        opened.handoff = request

    async def finish_handoff(self, job: int) -> HandoffOutcome:
        self.check_ready()
        opened = self._opened(job)
        assert opened.position == len(opened.tokens_T), "finished too early"
        if self.cluster.failing_handoffs:
            self.cluster.failing_handoffs -= 1
            raise HandoffFailed("damaged twice")
        decode = self.cluster.hosts.get(opened.handoff.decode) if opened.handoff else None
        if not isinstance(decode, DecodeDouble) or decode.condition != "ready" or job not in decode.jobs:
            raise HandoffFailed("the decode worker is gone")
        if decode.jobs[job].stage == "reserved":
            decode.jobs[job].stage = "committed"
        return HandoffOutcome(num_bytes=1000, seconds=0.1, exposed_s=0.02, num_attempts=1)

    async def cancel_handoff(self, job: int) -> None:
        opened = self.jobs.get(job)
        if opened is not None and opened.handoff is not None:
            decode = self.cluster.hosts.get(opened.handoff.decode)
            if isinstance(decode, DecodeDouble) and job in decode.jobs and decode.jobs[job].stage == "reserved":
                decode.release(job)
            opened.handoff = None

    async def export_job(self, job: int, path: str) -> ExportOutcome:
        self.check_ready()
        if self.cluster.is_disk_full:
            raise UserError("no room")
        Path(path).write_text(json.dumps({"position": self._opened(job).position}))
        if self.dies_after_export:
            self.cluster.kill(self.name)
        return ExportOutcome(path=path, position=self._opened(job).position, num_bytes=1, seconds=0.0)

    async def close_job(self, job: int) -> None:
        async with self.lock:
            self.jobs.pop(job, None)

    def check_link(self, decode: str) -> None:
        if decode in self.cluster.unreachable:
            raise NoLink("they share no memory")

    def _opened(self, job: int) -> Opened:
        if job not in self.jobs:
            raise UnknownHostJob(f"job {job} is not open on {self.name}")
        return self.jobs[job]
