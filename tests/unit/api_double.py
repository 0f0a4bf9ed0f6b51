"""A controller in memory that keeps the contract: jobs go through their states by themselves, tokens are a function of
prompt, seed, sample and index, and it can be away for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from longprefill.orchestrator.api.link import ControllerAway
from longprefill.orchestrator.controller.contract import (
    Busy,
    ClusterView,
    Conflict,
    GroupView,
    Infeasible,
    NotReady,
    Readiness,
    Submission,
    UnknownJob,
)
from longprefill.orchestrator.job import (
    JobEvent,
    JobRequest,
    JobState,
    JobTimings,
    JobView,
    SampleView,
    TokenBatch,
    TokenRecord,
)
from longprefill.orchestrator.stop_text import StopText
from longprefill.workers.model.tokenizer import Tokenizer


@dataclass
class DoubleJob:
    view: JobView
    tokens_T: np.ndarray
    records: list[TokenRecord] = field(default_factory=list)
    events: list[JobEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def token_at(tokens_T: np.ndarray, seed: int, sample: int, index: int, vocab_size: int) -> int:
    return 2 + (int(tokens_T.sum()) * 7 + seed * 13 + sample * 101 + index * 31) % (vocab_size - 2)


class ControllerDouble:
    """`pace` is awaited before every token: tests hold the job there. `away` calls fail next."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_jobs: int = 1_000_000, max_tokens: int = 100_000, keep: int = 1000
    ) -> None:
        self._tokenizer = tokenizer
        self.jobs: dict[str, DoubleJob] = {}
        self.keys: dict[tuple[str, str], tuple[str, JobRequest, bytes]] = {}
        self.max_jobs = max_jobs
        self.max_tokens = max_tokens
        self.keep = keep
        """Ended jobs; the oldest go first."""
        self._num_accepted = 0
        self.away = 0
        self.lose_answers = 0
        """So many calls happen, and their answers are lost."""
        self.calls: list[str] = []
        self.is_draining = False
        self.fails_with: str | None = None
        self.pace: asyncio.Semaphore | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        self._called("submit")
        if self.is_draining:
            raise Busy("the service drains", 7.0, is_draining=True)
        key = request.idempotency_key
        if key is not None and (request.tenant, key) in self.keys:
            job, before, prompt = self.keys[request.tenant, key]
            if before != request or prompt != tokens_T.tobytes():
                raise Conflict(f"idempotency key {key!r} was used with another request")
            self._answered()
            return Submission(job=job, is_new=False, num_queued=len(self.jobs))
        if sum(not job.view.state.is_final for job in self.jobs.values()) >= self.max_jobs:
            raise Busy(f"{self.max_jobs} jobs wait", 3.0)
        if tokens_T.size + request.max_new_tokens > self.max_tokens:
            raise Infeasible(f"no group holds {tokens_T.size} tokens")
        if len(self.jobs) > 2 * self.keep:
            self._forget()
        name = f"job-{self._num_accepted:06d}"
        self._num_accepted += 1
        view = JobView(
            id=name, tenant=request.tenant, state=JobState.QUEUED, reason=None, created_at=time.time(),
            started_at=None, finished_at=None, prompt_tokens=tokens_T.size, cached_tokens=0, position=0, num_steps=0,
            num_preemptions=0, num_attempts=1, group=None, decode_worker=None, estimate=None, timings=JobTimings(),
            samples=(), request=request,
        )  # fmt: skip
        job = self.jobs[name] = DoubleJob(view, tokens_T)
        if key is not None:
            self.keys[request.tenant, key] = (name, request, tokens_T.tobytes())
        self._add_event(job, "state", {"state": "queued", "reason": None})
        task = asyncio.get_running_loop().create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._answered()
        return Submission(job=name, is_new=True, num_queued=len(self.jobs))

    def _forget(self) -> None:
        """Drops the oldest ended jobs, and the keys that named them."""
        ended = [name for name, job in self.jobs.items() if job.view.state.is_final]
        for name in ended[: max(0, len(ended) - self.keep)]:
            del self.jobs[name]
        self.keys = {key: value for key, value in self.keys.items() if value[0] in self.jobs}

    async def inspect(self, job: str, tenant: str | None) -> JobView:
        self._called("inspect")
        return self._job(job, tenant).view

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        self._called("list_jobs")
        if before is not None:
            self._job(before, tenant)
        views = [job.view for job in reversed(self.jobs.values()) if tenant in (None, job.view.tenant)]
        if before is not None:
            views = [view for view in views if view.id < before]
        return [view for view in views if not states or view.state in states][:limit]

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        self._called("cancel")
        found = self._job(job, tenant)
        if not found.view.state.is_final:
            self._change(found, JobState.CANCELLED, "by its owner")
        return found.view

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        self._called("events")
        found = self._job(job, tenant)
        await self._news(found, lambda: len(found.events) > after, timeout_s)
        return found.events[after:]

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        self._called("tokens")
        found = self._job(job, tenant)
        await self._news(found, lambda: len(found.records) > after, timeout_s)
        records = tuple(found.records[after:])
        return TokenBatch(
            records=records, cursor=after + len(records), state=found.view.state, reason=found.view.reason
        )

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        self._called("trace")
        self._job(job, tenant)
        raise Conflict("tracing is off: set [service] trace = true")

    async def cluster(self) -> ClusterView:
        self._called("cluster")
        group = GroupView(
            name="prefill-0", role="prefill", state="ready", reason=None, mesh="cp 1 x tp 1", nodes=("here",), jobs=(),
            used_tokens=0, max_tokens=self.max_tokens, rss_bytes=0, heartbeat_age_s=0.0, num_restarts=0,
        )  # fmt: skip
        return ClusterView(
            epoch=1, started_at=0.0, is_draining=False, model="tiny", num_queued=0, num_running=0, estimate_error=0.0,
            groups=(group,), nodes=({"name": "here"},),
        )  # fmt: skip

    async def readiness(self) -> Readiness:
        self._called("readiness")
        return Readiness(is_ready=not self.is_draining, reasons=("the service drains",) if self.is_draining else ())

    async def metrics(self) -> str:
        self._called("metrics")
        return "longprefill_epoch 1\n"

    async def drain(self, timeout_s: float) -> bool:
        self.is_draining = True
        return True

    def fail(self, job: DoubleJob, reason: str) -> None:
        self._change(job, JobState.FAILED, reason)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) > 10_000:
            del self.calls[:5_000]
        if self.away:
            self.away -= 1
            if self.away % 2:
                raise NotReady("the controller takes nothing now: it starts", 1.0, is_draining=True)
            raise ControllerAway(name)

    def _answered(self) -> None:
        if self.lose_answers:
            self.lose_answers -= 1
            raise ControllerAway("the answer was lost")

    def _job(self, job: str, tenant: str | None) -> DoubleJob:
        found = self.jobs.get(job)
        if found is None or tenant not in (None, found.view.tenant):
            raise UnknownJob(f"there is no job {job!r}")
        return found

    async def _news(self, job: DoubleJob, is_there: Any, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not is_there() and not job.view.state.is_final:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            job.changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await job.changed.wait()
            except TimeoutError:
                return

    async def _run(self, job: DoubleJob) -> None:
        request = job.view.request
        self._change(job, JobState.PREFILLING)
        step = {"number": 1, "start": 0, "end": job.tokens_T.size, "seconds": 0.1, "num_steps_left": 0}
        self._add_event(job, "step", step)
        job.view = replace(job.view, position=job.tokens_T.size, num_steps=1)
        if self.fails_with is not None:
            self._change(job, JobState.FAILED, self.fails_with)
            return
        if request.max_new_tokens == 0:
            self._change(job, JobState.DONE)
            return
        self._change(job, JobState.HANDING_OFF)
        self._change(job, JobState.GENERATING)
        await self._generate(job, request)

    async def _generate(self, job: DoubleJob, request: JobRequest) -> None:
        decoders = [self._tokenizer.stream() for _ in range(request.num_samples)]
        stops = [StopText(request.stop) for _ in range(request.num_samples)]
        open_samples = set(range(request.num_samples))
        for index in range(request.max_new_tokens):
            if self.pace is not None:
                await self.pace.acquire()
            if job.view.state.is_final:
                return
            for sample in sorted(open_samples):
                token = token_at(job.tokens_T, request.seed, sample, index, self._tokenizer.vocab_size)
                text = stops[sample].push(decoders[sample].push(token))
                finish = "stop" if stops[sample].is_reached or token in request.stop_token_ids else None
                if finish is None and index == request.max_new_tokens - 1:
                    text += stops[sample].push(decoders[sample].finish()) + stops[sample].finish()
                    finish = "length"
                logprob = None if request.num_logprobs is None else -0.5 - index
                top = tuple((token + k, -0.5 - index - k) for k in range(request.num_logprobs or 0))
                job.records.append(
                    TokenRecord(
                        sample=sample, index=index, token=token, text=text, logprob=logprob, top_logprobs=top,
                        finish_reason=finish,
                    )
                )  # fmt: skip
                if finish is not None:
                    open_samples.discard(sample)
            job.changed.set()
            if not open_samples:
                break
        job.view = replace(job.view, samples=self._samples(job))
        self._change(job, JobState.DONE)

    def _samples(self, job: DoubleJob) -> tuple[SampleView, ...]:
        own = [[r for r in job.records if r.sample == number] for number in range(job.view.request.num_samples)]
        return tuple(
            SampleView(text="".join(r.text for r in rs), num_tokens=len(rs), finish_reason=rs[-1].finish_reason)
            for rs in own
        )

    def _change(self, job: DoubleJob, state: JobState, reason: str | None = None) -> None:
        if job.view.state.is_final:
            return
        finished = time.time() if state.is_final else None
        job.view = replace(job.view, state=state, reason=reason, finished_at=finished)
        self._add_event(job, "state", {"state": state.value, "reason": reason})

    def _add_event(self, job: DoubleJob, kind: str, data: dict[str, Any]) -> None:
        job.events.append(JobEvent(job=job.view.id, number=len(job.events) + 1, at=time.time(), kind=kind, data=data))
        job.changed.set()
