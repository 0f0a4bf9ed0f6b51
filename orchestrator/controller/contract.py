"""What the HTTP side and the command line may ask of the controller, and how it refuses.

The controller is a Ray actor; these are its methods in the order in which a client needs them: `submit`, `tokens` or
`events` (both wait for news, at most `timeout_s`), `inspect`, `cancel`. All are cheap and none blocks another. A
caller whose call fails because the controller died asks again: it comes back from its journal, and cursors and event
numbers stay valid. `tenant` is who asks: another tenant's job is an unknown job; None is the operator, who sees all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from longprefill.orchestrator.job import JobEvent, JobRequest, JobState, JobView, TokenBatch
from longprefill.partition.errors import UserError


class UnknownJob(UserError):
    """There is no job of this id for this tenant. HTTP 404."""


class Conflict(UserError):
    """The idempotency key was used with another request, or the job's state does not allow it. HTTP 409."""


class Infeasible(UserError):
    """No group of this service can ever run the job, or a placement cannot be met: the reason and what would help.
    HTTP 409."""


class Busy(UserError):
    """The queue or the tenant's share of it is full, or the service drains: ask again. HTTP 429 (503 when draining),
    Retry-After: `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0, *, is_draining: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_draining = is_draining

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_busy, (type(self), str(self), self.retry_after_s, self.is_draining)


class NotReady(Busy):
    """The controller has just started and does not have its books yet: any method may raise it, and every call may be
    made again."""


def _make_busy(kind: type[Busy], message: str, retry_after_s: float, is_draining: bool) -> Busy:
    return kind(message, retry_after_s, is_draining=is_draining)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The job is on disk. `is_new` is False when the idempotency key named a job that was here already."""

    job: str
    is_new: bool
    num_queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    name: str
    """"prefill-0", "decode-0", ..."""
    role: str
    """"prefill" or "decode"."""
    state: str
    """"starting", "ready", "failed" (and why), "waiting" (for resources)."""
    reason: str | None
    mesh: str
    """"cp 2 x tp 1"."""
    nodes: tuple[str, ...]
    jobs: tuple[str, ...]
    """Jobs it holds caches of; the running one first."""
    used_tokens: int
    max_tokens: int
    rss_bytes: int
    heartbeat_age_s: float
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    epoch: int
    started_at: float
    is_draining: bool
    model: str
    num_queued: int
    num_running: int
    estimate_error: float
    """Mean of |measured / estimated - 1| over the last steps; 0 before the first."""
    groups: tuple[GroupView, ...]
    nodes: tuple[dict[str, Any], ...]
    """What Ray says of each: name, is_alive, resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Ready: at least one prefill group and, if generation is configured, one decode worker are ready, and a link
    between them works."""

    is_ready: bool
    reasons: tuple[str, ...]
    """Why not."""


class ControllerApi(Protocol):
    """Raises of all methods that name a job: UnknownJob."""

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        """Takes a job: prompt (int32 token ids) and request are on disk when this returns.

        Raises:
            Busy: too many jobs wait, or the service drains.
            Infeasible: no group can ever hold it.
            Conflict: the idempotency key came with another prompt or request.
            PromptError, UserError: the model cannot take this prompt.
        """
        ...

    async def inspect(self, job: str, tenant: str | None) -> JobView: ...

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        """Newest first; `before` is the id of the last one of the page before."""
        ...

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        """Ends a job as cancelled, now or at the next step border; an ended job stays as it is."""
        ...

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        """Events with numbers above `after`; waits for one at most `timeout_s`. None and a final state: all are out."""
        ...

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        """Tokens after a cursor (0: from the beginning); waits for one at most `timeout_s`."""
        ...

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        """The job's Chrome trace as far as it has run: queue, steps by rank, transfer, decode.

        Raises:
            Conflict: tracing is off in the configuration.
        """
        ...

    async def cluster(self) -> ClusterView: ...

    async def readiness(self) -> Readiness: ...

    async def metrics(self) -> str:
        """Prometheus text."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new jobs from now on and waits until all have ended; False: some had not at `timeout_s`. They stay
        in the journal and go on at the next start."""
        ...
