"""A controller of which every state can be arranged: `longprefill.orchestrator.controller.contract.ControllerApi`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from longprefill.orchestrator.api.link import ControllerAway
from longprefill.orchestrator.controller.contract import (
    Busy,
    ClusterView,
    GroupView,
    Readiness,
    Submission,
    UnknownJob,
)
from longprefill.orchestrator.controller.metrics import Metrics
from longprefill.orchestrator.controller.traces import TraceFiles
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

RANKS = 2
TOKENS_PER_S = 18_600
"""Of a group at work."""


@dataclass
class SceneJob:
    view: JobView
    events: list[JobEvent] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)


class SceneController:
    """What is arranged is seen at once. All of it happens on the loop that serves."""

    def __init__(self, directory: Path) -> None:
        """`directory` takes the traces."""
        self.jobs: dict[str, SceneJob] = {}
        self.groups: list[GroupView] = []
        self.nodes: list[dict[str, Any]] = []
        self.traces = TraceFiles(directory)
        self.metrics_of = Metrics(3, "hybrid-48b")
        self.is_away = False
        self.cancels: list[str] = []
        self._changed: asyncio.Event | None = None
        self._counted_at = time.time()

    # ---- arranging -----------------------------------------------------------------------------------------------

    def add(self, view: JobView) -> SceneJob:
        """A job, newer than all others."""
        job = self.jobs[view.id] = SceneJob(view)
        self.tell(view.id, "state", {"state": "queued", "reason": None}, at=view.created_at)
        return job

    def change(self, name: str, state: JobState, *, at: float | None = None, **fields: Any) -> None:
        """A job's next state."""
        job = self.jobs[name]
        at = time.time() if at is None else at
        if state.is_final:
            fields.setdefault("finished_at", at)
        job.view = replace(job.view, state=state, **{"reason": None, **fields})
        self.tell(name, "state", {"state": state.value, "reason": job.view.reason}, at=at)

    def step(self, name: str, tokens: int, seconds: float, *, at: float | None = None) -> None:
        """A step of a job that has ended now, slower on its first rank."""
        job = self.jobs[name]
        at = time.time() if at is None else at
        start = job.view.position
        end = min(start + tokens, job.view.prompt_tokens)
        number = job.view.num_steps + 1
        data = {
            "number": number,
            "start": start,
            "end": end,
            "seconds": seconds,
            "rank_seconds": [seconds * 0.97, seconds * (0.93 - 0.01 * (number % 3))],
            "estimate_s": seconds * 1.04,
            "num_steps_left": -(-(job.view.prompt_tokens - end) // tokens),
            "group": job.view.group,
            "reason": "deadline nearest",
        }
        job.view = replace(job.view, position=end, num_steps=number)
        self.tell(name, "step", data, at=at)

    def token(self, name: str, text: str) -> None:
        """One more token of the first sample."""
        job = self.jobs[name]
        index = len(job.records)
        job.records.append(TokenRecord(sample=0, index=index, token=7, text=text))
        sample = SampleView(text="", num_tokens=index + 1, finish_reason=None)
        job.view = replace(job.view, samples=(sample,))
        self.tell(name, "tokens", {"num_tokens": index + 1})

    def tell(self, name: str, kind: str, data: dict[str, Any], *, at: float | None = None) -> None:
        job = self.jobs[name]
        at = time.time() if at is None else at
        job.events.append(JobEvent(job=name, number=len(job.events) + 1, at=at, kind=kind, data=data))
        if self._changed is not None:
            self._changed.set()

    def begin(self) -> None:
        """Is served from now on, by the loop that runs."""
        self._changed = asyncio.Event()

    # ---- ControllerApi -------------------------------------------------------------------------------------------

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        raise Busy("a scene takes no jobs")

    async def inspect(self, job: str, tenant: str | None) -> JobView:
        return self._job(job, tenant).view

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        self._hear()
        views = [job.view for job in reversed(self.jobs.values()) if tenant in (None, job.view.tenant)]
        return [view for view in views if not states or view.state in states][:limit]

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        found = self._job(job, tenant)
        self.cancels.append(job)
        if not found.view.state.is_final:
            self.change(job, JobState.CANCELLED, reason="cancelled by its owner", estimate=None)
        return found.view

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        found = self._job(job, tenant)
        await self._wait(lambda: len(found.events) > after or found.view.state.is_final, timeout_s)
        return found.events[after:]

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        found = self._job(job, tenant)
        await self._wait(lambda: len(found.records) > after or found.view.state.is_final, timeout_s)
        records = tuple(found.records[after:])
        return TokenBatch(records=records, cursor=after + len(records), state=found.view.state)

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        found = self._job(job, tenant)
        return self.traces.chrome_trace(job, found.events, time.time())

    async def cluster(self) -> ClusterView:
        self._hear()
        states = [job.view.state for job in self.jobs.values()]
        num_queued = states.count(JobState.QUEUED)
        return ClusterView(
            epoch=3,
            started_at=time.time() - 7260,
            is_draining=False,
            model="hybrid-48b",
            num_queued=num_queued,
            num_running=sum(not state.is_final for state in states) - num_queued,
            estimate_error=0.04,
            groups=tuple(self.groups),
            nodes=tuple(self.nodes),
        )

    async def readiness(self) -> Readiness:
        self._hear()
        return Readiness(is_ready=True, reasons=())

    async def metrics(self) -> str:
        self._hear()
        for stage in ("queued", "prefilling", "handing_off", "generating"):
            number = sum(job.view.state.value == stage for job in self.jobs.values())
            self.metrics_of.stage.labels(stage).set(number)
            if stage == "prefilling" and number:
                self.metrics_of.tokens.labels("prefilled").inc((time.time() - self._counted_at) * TOKENS_PER_S * number)
        self._counted_at = time.time()
        return self.metrics_of.text()

    async def drain(self, timeout_s: float) -> bool:
        return True

    def _hear(self) -> None:
        if self.is_away:
            raise ControllerAway("it is away")

    def _job(self, job: str, tenant: str | None) -> SceneJob:
        self._hear()
        found = self.jobs.get(job)
        if found is None or tenant not in (None, found.view.tenant):
            raise UnknownJob(f"there is no job {job!r}")
        return found

    async def _wait(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        assert self._changed is not None, "it is not served"
        try:
            async with asyncio.timeout(timeout_s):
                while not is_there():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass


def job_view(name: str, prompt_tokens: int, *, tenant: str = "research", **fields: Any) -> JobView:
    """A job that was just accepted."""
    max_new_tokens = fields.pop("max_new_tokens", 256)
    request = fields.pop("request", JobRequest(tenant=tenant, max_new_tokens=max_new_tokens, deadline_s=120.0))
    defaults: dict[str, Any] = {
        "state": JobState.QUEUED,
        "reason": None,
        "created_at": time.time(),
        "started_at": None,
        "finished_at": None,
        "cached_tokens": 0,
        "position": 0,
        "num_steps": 0,
        "num_preemptions": 0,
        "num_attempts": 1,
        "group": None,
        "decode_worker": None,
        "estimate": None,
        "timings": JobTimings(),
        "samples": (),
    }
    return JobView(id=name, tenant=tenant, prompt_tokens=prompt_tokens, request=request, **{**defaults, **fields})
