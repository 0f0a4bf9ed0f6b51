"""The controller as a Ray actor, called from the processes that speak HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from longprefill.orchestrator.api.link import ControllerAway
from longprefill.orchestrator.controller.contract import ClusterView, Readiness, Submission
from longprefill.orchestrator.job import JobEvent, JobRequest, JobState, JobView, TokenBatch

NAMESPACE = "longprefill"
CONTROLLER = "controller"


class RayController:
    """A `ControllerApi`: looks the actor up by name, again whenever it was lost.

    Raises of all methods: ControllerAway when the actor cannot be reached; otherwise what the actor raised.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        return await self._call("submit", request, tokens_T)

    async def inspect(self, job: str, tenant: str | None) -> JobView:
        return await self._call("inspect", job, tenant)

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        return await self._call("list_jobs", tenant, states=states, limit=limit, before=before)

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        return await self._call("cancel", job, tenant)

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        return await self._call("events", job, tenant, after=after, timeout_s=timeout_s)

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        return await self._call("tokens", job, tenant, after=after, timeout_s=timeout_s)

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        return await self._call("trace", job, tenant)

    async def cluster(self) -> ClusterView:
        return await self._call("cluster")

    async def readiness(self) -> Readiness:
        return await self._call("readiness")

    async def metrics(self) -> str:
        return await self._call("metrics")

    async def drain(self, timeout_s: float) -> bool:
        return await self._call("drain", timeout_s)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(ray.get_actor, CONTROLLER, namespace=NAMESPACE)
            return await getattr(self._handle, method).remote(*arguments, **named)
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, ValueError) as error:  # a name that nobody has is a ValueError
            self._handle = None
            raise ControllerAway(f"{method}: {error}") from error
