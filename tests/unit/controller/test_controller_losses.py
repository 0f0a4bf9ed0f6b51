"""Losses at awkward moments: while a controller waits for something else than the host that is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller import handing_off
from longprefill.orchestrator.controller.core import Core
from longprefill.orchestrator.controller.live import LiveJob
from longprefill.orchestrator.controller.reports import final_report
from longprefill.orchestrator.hosts.contract import HandoffOutcome, OpenOutcome
from longprefill.orchestrator.job import JobState

from .cases import (
    controller,
    ended,
    expected,
    ids_of,
    prompt,
    request,
    run,
    stream,
    until,
)
from .cluster_double import ClusterDouble
from .prefill_double import PrefillDouble


def test_a_decode_worker_that_is_lost_between_hand_off_and_generation_is_replaced(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_T, kills = prompt(100), list[str]()

    async def slow_report(core: Core, job: LiveJob, done: HandoffOutcome | None) -> dict[str, Any]:
        if not kills:
            kills.append("decode-0")
            cluster.kill("decode-0")
            await until(lambda: job.decode is None)
        return await final_report(core, job, done)

    monkeypatch.setattr(handing_off, "final_report", slow_report)

    async def work() -> None:
        async with controller(config, cluster) as service:
            job = (await service.submit(request(5), tokens_T)).job
            view = await ended(service, job)
            assert (view.state, view.num_attempts, kills) == (JobState.DONE, 1, ["decode-0"])
            assert ids_of(await stream(service, job)) == expected(tokens_T, 5)
            assert cluster.prefilled == {1: 100}

    run(work())


def test_a_group_that_opens_a_job_for_nobody_closes_it(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, gate = list[PrefillDouble](), asyncio.Event()

    async def late(host: PrefillDouble, job: int, tokens_T: np.ndarray, snapshot: str | None = None) -> OpenOutcome:
        if not slow:
            slow.append(host)
            await gate.wait()
        return await open_job(host, job, tokens_T, snapshot)

    open_job = PrefillDouble.open_job
    monkeypatch.setattr(PrefillDouble, "open_job", late)

    async def work() -> None:
        async with controller(config, cluster) as service:
            job = (await service.submit(request(3), prompt(60))).job
            await until(lambda: slow)
            slow[0].lose()
            assert (await ended(service, job)).state is JobState.DONE
            gate.set()
            await until(lambda: len(cluster.opened) == 2 and "close_job" in slow[0].calls)
            await until(lambda: all(not host.state().jobs for host in cluster.hosts.values()))

    run(work())
