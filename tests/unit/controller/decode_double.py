"""A decode host in memory: it samples a function of prompt, seed, sample and index."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from longprefill.orchestrator.hosts.contract import (
    DecodeFailure,
    DecodeToken,
    DecodeTokens,
    GenerateRequest,
    HandoffFailed,
    HandoffRequest,
    HostJob,
    HostSample,
    HostSettings,
    HostState,
    NoRoom,
    UnknownHostJob,
)

from .host_double import HostDouble, host_state, whole_pages

if TYPE_CHECKING:
    from .cluster_double import ClusterDouble


def token_at(tokens_T: np.ndarray, seed: int, sample: int, index: int) -> int:
    """What the fakes sample."""
    return 10 + (int(tokens_T.sum()) * 7 + len(tokens_T) + seed * 13 + sample * 101 + index * 31) % 256


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
