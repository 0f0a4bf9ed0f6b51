"""The controller as a Ray actor: named, detached, started again by Ray whenever its process ends.

Its process is the unit of failure. What it cannot go on after (a bug, a disk that takes nothing more) ends the process,
and the next one comes back from the journal. Only a controller that a newer one has replaced stays down: it would take
the newer one's place again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller.contract import ClusterView, Readiness, Submission
from longprefill.orchestrator.controller.ray_links import RayHosts
from longprefill.orchestrator.controller.service import ControllerService
from longprefill.orchestrator.hosts.contract import NAMESPACE, StaleEpoch
from longprefill.orchestrator.job import JobEvent, JobRequest, JobState, JobView, TokenBatch
from longprefill.orchestrator.journal.journal import StaleJournal
from longprefill.orchestrator.logs import log_to_file
from longprefill.partition.errors import UserError

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
MAX_CALLS = 20_000
"""Calls at once: most of them wait for news of a job."""


class ControllerActor:
    """`contract.ControllerApi`, and what `longprefill serve` needs beside it."""

    def __init__(self, config: ServiceConfig) -> None:
        names = [name for name, _ in (*config.prefill_groups, *config.decode_workers)]
        log_to_file(Path(config.service.state_dir) / "logs" / "controller.log", config.service.log_format, names)
        self._service = ControllerService(config, RayHosts)
        self._verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def verdict(self) -> str:
        """Why this controller will never work: waits for it. As long as all is well there is no answer."""
        return await asyncio.shield(self._verdict)

    async def pid(self) -> int:
        """Of the process."""
        return os.getpid()

    async def end(self, end_hosts: bool) -> None:
        """Stops working; jobs stay in the journal."""
        self._task.cancel()
        await self._service.stop(end_hosts=end_hosts)

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        return await self._service.submit(request, tokens_T)

    async def inspect(self, job: str, tenant: str | None) -> JobView:
        return await self._service.inspect(job, tenant)

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        return await self._service.list_jobs(tenant, states=states, limit=limit, before=before)

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        return await self._service.cancel(job, tenant)

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        return await self._service.events(job, tenant, after=after, timeout_s=timeout_s)

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        return await self._service.tokens(job, tenant, after=after, timeout_s=timeout_s)

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        return await self._service.trace(job, tenant)

    async def cluster(self) -> ClusterView:
        return await self._service.cluster()

    async def readiness(self) -> Readiness:
        return await self._service.readiness()

    async def metrics(self) -> str:
        return await self._service.metrics()

    async def drain(self, timeout_s: float) -> bool:
        return await self._service.drain(timeout_s)

    async def _live(self) -> None:
        """The process edge: whatever ends the work ends here."""
        try:
            await self._service.start()
            await self._service.run()
        except (StaleEpoch, StaleJournal) as error:
            await self._service.stop(end_hosts=False)
            self._give_verdict(f"a newer controller has taken over: {error}")
        except UserError as error:
            if self._service.is_running:  # a disk that takes nothing more: the next start waits for it
                self._end_process()
            self._give_verdict(str(error))
        except asyncio.CancelledError:
            raise
        except BaseException:
            logger.exception("the controller ends and comes back from its journal")
            self._end_process()

    def _give_verdict(self, reason: str) -> None:
        logger.error("%s", reason)
        if not self._verdict.done():
            self._verdict.set_result(reason)

    def _end_process(self) -> None:
        sys.stderr.flush()
        logging.shutdown()
        os._exit(1)


def create_controller(config: ServiceConfig, *, node_id: str) -> Any:
    """The controller's handle, at once. It stays on a node, where its journal is.

    Raises:
        ValueError: there is one already.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(ControllerActor)
    return actor.options(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(config)
