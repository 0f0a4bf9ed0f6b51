"""The way to the controller: a call that fails because the controller is away, or has just come back and does not have
its books yet, is made again, for a while.

Every call may be repeated: reads have cursors, cancelling twice is cancelling once, and a submission carries a key by
which the controller knows it again (`submit` sees to that). So a stream survives a controller's restart, and nothing
is repeated or skipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from longprefill.orchestrator.api.errors import unavailable
from longprefill.orchestrator.controller.contract import ClusterView, ControllerApi, NotReady, Readiness, Submission
from longprefill.orchestrator.job import JobEvent, JobRequest, JobState, JobView, TokenBatch

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
CALL_S = 30.0
"""For an answer, beyond the time that a call asks the controller to wait for news."""
OWN_KEY = "auto-"
"""How the keys begin that the service gives to submissions without one."""

Result = TypeVar("Result")


class ControllerAway(Exception):
    """The controller cannot be reached now, or died before it answered: the call may or may not have happened."""


class PatientController:
    """A `ControllerApi` over one that raises ControllerAway.

    Raises of all methods: ApiError (503) when the controller stays away for `patience_s`.
    """

    def __init__(self, controller: ControllerApi, *, patience_s: float = 60.0) -> None:
        self._controller = controller
        self._patience_s = patience_s

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        if request.idempotency_key is None:
            request = dataclasses.replace(request, idempotency_key=f"{OWN_KEY}{uuid.uuid4().hex}")
        return await self._call(lambda: self._controller.submit(request, tokens_T))

    async def inspect(self, job: str, tenant: str | None) -> JobView:
        return await self._call(lambda: self._controller.inspect(job, tenant))

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        return await self._call(lambda: self._controller.list_jobs(tenant, states=states, limit=limit, before=before))

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        return await self._call(lambda: self._controller.cancel(job, tenant))

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        return await self._call(
            lambda: self._controller.events(job, tenant, after=after, timeout_s=timeout_s), timeout_s
        )

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        return await self._call(
            lambda: self._controller.tokens(job, tenant, after=after, timeout_s=timeout_s), timeout_s
        )

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        return await self._call(lambda: self._controller.trace(job, tenant))

    async def cluster(self) -> ClusterView:
        return await self._call(lambda: self._controller.cluster())

    async def readiness(self) -> Readiness:
        """Asked once: a controller that is away is an answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return await self._controller.readiness()
        except NotReady as error:
            return Readiness(is_ready=False, reasons=(str(error),))
        except (ControllerAway, TimeoutError):
            return Readiness(is_ready=False, reasons=("the controller cannot be reached",))

    async def metrics(self) -> str:
        return await self._call(lambda: self._controller.metrics())

    async def drain(self, timeout_s: float) -> bool:
        return await self._call(lambda: self._controller.drain(timeout_s), timeout_s)

    async def _call(self, ask: Callable[[], Awaitable[Result]], wait_s: float = 0.0) -> Result:
        """The answer, asked for again after every ControllerAway, less and less often."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(wait_s + CALL_S):  # wait_for of Python 3.11 may swallow a cancellation
                    return await ask()
            except (ControllerAway, NotReady, TimeoutError) as error:
                left_s = deadline - loop.time()
                if left_s <= 0:
                    if isinstance(error, NotReady):
                        raise  # it says why
                    raise unavailable(
                        f"the controller could not be reached for {self._patience_s:g} s", retry_after_s=5
                    ) from None
            await asyncio.sleep(min(pause_s * random.uniform(0.5, 1.0), left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
