"""Hosts in memory that keep their contract and outlive any controller: prefill only counts, decode samples a function
of prompt, seed, sample and index. Tests hold steps back, make hosts silent, lose and kill them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longprefill.orchestrator.controller.links import HostGone, HostSilent
from longprefill.orchestrator.hosts.contract import (
    DecodeFailure,
    DecodeToken,
    DecodeTokens,
    ExportOutcome,
    GenerateRequest,
    GroupLost,
    HandoffFailed,
    HandoffOutcome,
    HandoffRequest,
    HostJob,
    HostSample,
    HostSettings,
    HostState,
    NoLink,
    NoRoom,
    NotReady,
    OpenOutcome,
    StaleEpoch,
    StepOutcome,
    UnknownHostJob,
)
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.spec import WorkerStats


def token_at(tokens_T: np.ndarray, seed: int, sample: int, index: int) -> int:
    """What the fakes sample."""
    return 10 + (int(tokens_T.sum()) * 7 + len(tokens_T) + seed * 13 + sample * 101 + index * 31) % 256


def whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


class HostDouble:
    """What both kinds share."""

    role = ""

    def __init__(self, settings: HostSettings, cluster: ClusterDouble) -> None:
        self.settings = settings
        self.name = settings.name
        self.cluster = cluster
        self.epoch = 0
        self.generation = 1
        self.condition = "starting"
        self.reason: str | None = None
        self.is_silent = False
        self.calls: list[str] = []

    def fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} commands {self.name}, {epoch} is older")
        self.epoch = epoch

    def check_ready(self) -> None:
        if self.condition != "ready":
            raise NotReady(f"{self.name} is {self.condition}")

    def start(self) -> None:
        if self.condition == "starting" and self.cluster.starts:
            self.condition = "ready"

    async def await_ready(self, timeout_s: float) -> HostState:
        self.start()
        if self.condition not in ("ready", "failed"):
            await asyncio.sleep(0.01)
        return self.state()

    def state(self) -> HostState:
        raise NotImplementedError

    def close(self) -> None:
        self.condition = "closed"


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
        return ExportOutcome(path=path, position=self._opened(job).position, num_bytes=1, seconds=0.0)

    async def close_job(self, job: int) -> None:
        async with self.lock:
            await self.cancel_handoff(job)
            self.jobs.pop(job, None)

    def check_link(self, decode: str) -> None:
        if decode in self.cluster.unreachable:
            raise NoLink("they share no memory")

    def _opened(self, job: int) -> Opened:
        if job not in self.jobs:
            raise UnknownHostJob(f"job {job} is not open on {self.name}")
        return self.jobs[job]


@dataclass
class Generation:
    tokens_T: np.ndarray
    need: int
    stage: str = "reserved"
    request: GenerateRequest | None = None
    counts: dict[int, int] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)


class DecodeDouble(HostDouble):
    role = "decode"

    def __init__(self, settings: HostSettings, cluster: ClusterDouble) -> None:
        super().__init__(settings, cluster)
        self.jobs: dict[int, Generation] = {}
        self.log: list[DecodeToken | DecodeFailure] = []
        self.first_cursor = 0

    def used(self) -> int:
        return sum(job.need for job in self.jobs.values())

    def state(self) -> HostState:
        jobs = tuple(
            HostJob(
                job=number,
                stage=job.stage,
                position=0 if job.stage == "reserved" else len(job.tokens_T),
                num_tokens=len(job.tokens_T),
                samples=tuple(
                    HostSample(sample=n, num_generated=count, finish_reason=job.ended.get(n))
                    for n, count in job.counts.items()
                ),
            )
            for number, job in self.jobs.items()
        )
        return host_state(self, jobs, self.used(), first_cursor=self.first_cursor)

    def reserve(self, request: HandoffRequest, tokens_T: np.ndarray) -> None:
        if request.job in self.jobs and self.jobs[request.job].stage != "reserved":
            raise HandoffFailed("it has this job already")
        most = whole_pages(self.settings.cluster.max_tokens)
        need = whole_pages(len(tokens_T)) + request.num_samples * whole_pages(request.max_new_tokens)
        free = most - self.used() + (self.jobs[request.job].need if request.job in self.jobs else 0)
        if need > free:
            raise NoRoom(f"{need} tokens needed, {free} are free", need, free, most)
        self.jobs[request.job] = Generation(tokens_T, need)

    def generate(self, request: GenerateRequest) -> None:
        self.check_ready()
        job = self.jobs.get(request.job)
        if job is None:
            raise UnknownHostJob(f"job {request.job} is not here")
        assert job.stage != "reserved", "generated before its commit"
        if job.stage == "committed":
            job.stage, job.request = "generating", request
            for start in request.samples:
                own = [self._token(job, start.sample, n) for n in range(start.num_generated)]
                assert list(start.forced) == own, "a stream that went another way"
                job.counts[start.sample] = start.num_generated

    async def poll(self, cursor: int, timeout_s: float) -> DecodeTokens:
        self.check_ready()
        assert cursor >= self.first_cursor, "asked for what was acknowledged"
        del self.log[: cursor - self.first_cursor]
        self.first_cursor = cursor
        if not self.log:
            await self.cluster.pass_iteration()
            for _ in range(self.cluster.iterations):
                self._iterate()
        news = self.log[: self.cluster.poll_limit]
        await asyncio.sleep(0 if news else 0.005)
        tokens = tuple(item for item in news if isinstance(item, DecodeToken))
        failures = tuple(item for item in news if isinstance(item, DecodeFailure))
        return DecodeTokens(tokens=tokens, failures=failures, cursor=cursor + len(news))

    def _iterate(self) -> None:
        for number, job in self.jobs.items():
            if job.stage != "generating":
                continue
            assert job.request is not None
            for sample, count in list(job.counts.items()):
                if sample in job.ended:
                    continue
                token = self._token(job, sample, count)
                finish = "stop" if token in job.request.stop_token_ids else None
                if finish is None and count + 1 == job.request.max_new_tokens:
                    finish = "length"
                wanted = job.request.num_logprobs
                self.log.append(
                    DecodeToken(
                        job=number,
                        sample=sample,
                        index=count,
                        token=token,
                        finish_reason=finish,
                        logprob=None if wanted is None else -0.5,
                        top_logprobs=tuple((n, -1.0) for n in range(wanted or 0)),
                    )
                )
                job.counts[sample] = count + 1
                if finish is not None:
                    job.ended[sample] = finish

    def end_sample(self, job: int, sample: int) -> None:
        if job in self.jobs:
            self.jobs[job].ended.setdefault(sample, "stop")

    def release(self, job: int) -> None:
        self.jobs.pop(job, None)

    def _token(self, job: Generation, sample: int, index: int) -> int:
        assert job.request is not None
        return token_at(job.tokens_T, job.request.seed, sample, index)


class ClusterDouble:
    """A `HostDirectory` and the knobs of its hosts."""

    def __init__(self) -> None:
        self.hosts: dict[str, PrefillDouble | DecodeDouble] = {}
        self.starts = True
        self.step_gate: asyncio.Event | None = None
        self.token_gate: asyncio.Event | None = None
        self.poll_limit = 4096
        self.iterations = 1
        """Of decode workers between two polls."""
        self.failing_handoffs = 0
        self.unreachable: set[str] = set()
        self.is_disk_full = False
        self.prefilled: dict[int, int] = {}
        """Tokens that were run, by job."""
        self.opened: list[tuple[int, str, int]] = []
        self.steps: list[tuple[str, tuple[Slice, ...]]] = []

    def linked(self, epoch: int) -> DirectoryDouble:
        """The hosts as the controller of an epoch commands them."""
        return DirectoryDouble(self, epoch)

    def kill(self, name: str) -> None:
        """The host's process is gone, with all that it held."""
        self.hosts.pop(name).condition = "dead"

    async def pass_step(self, host: PrefillDouble, slices: Sequence[Slice]) -> None:
        self.steps.append((host.name, tuple(slices)))
        if self.step_gate is None:
            await asyncio.sleep(0.001)
            return
        generation = host.generation
        while not self.step_gate.is_set() and host.condition == "ready" and host.generation == generation:
            await asyncio.sleep(0.001)

    async def pass_iteration(self) -> None:
        while self.token_gate is not None and not self.token_gate.is_set():
            await asyncio.sleep(0.001)


class DirectoryDouble:
    def __init__(self, cluster: ClusterDouble, epoch: int) -> None:
        self.cluster = cluster
        self.epoch = epoch

    async def find(self, name: str) -> LinkDouble | None:
        return LinkDouble(self, self.cluster.hosts[name]) if name in self.cluster.hosts else None

    async def create(self, settings: HostSettings, role: str) -> LinkDouble:
        assert settings.name not in self.cluster.hosts
        kind = PrefillDouble if role == "prefill" else DecodeDouble
        host = self.cluster.hosts[settings.name] = kind(settings, self.cluster)
        return LinkDouble(self, host)

    async def end(self, name: str, state: HostState | None = None) -> None:
        host = self.cluster.hosts.pop(name, None)
        if host is not None:
            host.condition = "dead"

    async def nodes(self) -> tuple[dict[str, Any], ...]:
        return ({"name": "here", "is_alive": True, "resources": {"CPU": 4.0}},)


class LinkDouble:
    def __init__(self, directory: DirectoryDouble, host: PrefillDouble | DecodeDouble) -> None:
        self._directory = directory
        self.host = host

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        host = self.host
        if host.condition == "dead":
            raise HostGone(f"{host.name} has ended")
        if host.is_silent:
            await asyncio.sleep(0.01)
            raise HostSilent(f"{host.name} did not answer {method}")
        host.fence(self._directory.epoch)
        host.calls.append(method)
        answer = getattr(host, method)(*arguments)
        if asyncio.iscoroutine(answer):
            task = asyncio.ensure_future(answer)
            while not task.done():
                await asyncio.wait([task], timeout=0.005)
                if host.condition == "dead" and not task.done():
                    task.cancel()
                    raise HostGone(f"{host.name} died in the middle of {method}")
            answer = task.result()
        if host.condition == "dead":
            raise HostGone(f"{host.name} died at the end of {method}")
        return answer


def host_state(
    host: HostDouble,
    jobs: tuple[HostJob, ...],
    used_tokens: int,
    *,
    last_step: int = 0,
    running: tuple[int, tuple[Slice, ...]] | None = None,
    first_cursor: int = 0,
) -> HostState:
    return HostState(
        name=host.name,
        role=host.role,
        state=host.condition,
        reason=host.reason,
        epoch=host.epoch,
        generation=host.generation,
        mesh="cp 1 x tp 1",
        pid=1,
        nodes=("here",),
        jobs=jobs,
        used_tokens=used_tokens,
        max_tokens=host.settings.cluster.max_tokens,
        rss_bytes=1000,
        num_restarts=0,
        last_step=last_step,
        running=running,
        first_cursor=first_cursor,
    )
