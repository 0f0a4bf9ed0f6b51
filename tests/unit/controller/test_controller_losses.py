"""Losses at awkward moments: while a controller waits for something else than the host that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import Any

import numpy as np
import pytest

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller import handing_off, keeping
from longprefill.orchestrator.controller.core import Core
from longprefill.orchestrator.controller.handing_off import HandingOff
from longprefill.orchestrator.controller.keeping import Keeping
from longprefill.orchestrator.controller.links import HostSilent
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.controller.recovery import Recovery
from longprefill.orchestrator.controller.reports import final_report
from longprefill.orchestrator.controller.service import ControllerService
from longprefill.orchestrator.controller.setup import make_hosts
from longprefill.orchestrator.controller.stepping import Stepping
from longprefill.orchestrator.hosts.contract import HandoffOutcome, HandoffRequest, OpenOutcome, StaleEpoch
from longprefill.orchestrator.job import JobState
from longprefill.orchestrator.journal.journal import Journal, JournalError
from longprefill.orchestrator.journal.prompts import PromptFiles
from longprefill.orchestrator.journal.schema import JobRow
from longprefill.orchestrator.scheduler.decisions import StepDecision

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
from .host_double import HostDouble
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


def test_a_host_whose_maker_died_before_it_was_started_is_started(
    config: ServiceConfig, cluster: ClusterDouble
) -> None:
    async def work() -> None:
        for host in [host for hosts in make_hosts(config) for host in hosts]:
            await cluster.linked(1).create(host.settings, host.role)
        async with controller(config, cluster) as service:
            job = (await service.submit(request(3), prompt(60))).job
            assert (await ended(service, job)).state is JobState.DONE

    run(work())


def test_a_job_that_ends_between_a_decision_and_its_step(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(stepping: Stepping, decision: StepDecision) -> list[LiveJob]:
        core, number = stepping._core, decision.slices[0].job
        if number == 1:
            cancel = functools.partial(core.end, core.jobs[1], JobState.CANCELLED)
            asyncio.get_running_loop().call_soon(cancel)
        return really_begin(stepping, decision)

    really_begin = Stepping._begin
    monkeypatch.setattr(Stepping, "_begin", begin)

    async def work() -> None:
        async with controller(config, cluster) as service:
            first, second = [(await service.submit(request(3), prompt(60))).job for _ in range(2)]
            assert (await ended(service, first)).state is JobState.CANCELLED
            assert (await ended(service, second)).state is JobState.DONE

    run(work())


def test_room_that_a_job_got_when_it_had_ended_is_given_back(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group has closed it by then, and cannot cancel the hand-off any more."""
    services = list[ControllerService]()

    async def start_handoff(host: PrefillDouble, wanted: HandoffRequest) -> None:
        await really_start(host, wanted)
        (view,) = await services[0].list_jobs(None)
        await services[0].cancel(view.id, None)
        await until(lambda: not host.jobs)

    async def start_later(handing: HandingOff, job: LiveJob) -> None: ...

    really_start = PrefillDouble.start_handoff
    monkeypatch.setattr(PrefillDouble, "start_handoff", start_handoff)
    monkeypatch.setattr(HandingOff, "start_early", start_later)
    monkeypatch.setattr(keeping, "HEARTBEAT_S", 0.01)

    async def work() -> None:
        async with controller(config, cluster) as service:
            services.append(service)
            job = (await service.submit(request(3), prompt(60))).job
            assert (await ended(service, job)).state is JobState.CANCELLED
            await until(lambda: all(not host.state().jobs for host in cluster.hosts.values()))

    run(work())


def test_a_disk_that_takes_no_tokens_is_no_fault_of_their_worker(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [JournalError("the disk is full")]

    def add_tokens(*arguments: Any, **named: Any) -> JobRow:
        if failures:
            raise failures.pop()
        return really_add(*arguments, **named)

    really_add = Journal.add_tokens
    monkeypatch.setattr(Journal, "add_tokens", add_tokens)

    async def work() -> None:
        with contextlib.suppress(JournalError):
            async with controller(config, cluster) as service:
                await service.submit(request(5), prompt(100))
                with pytest.raises(JournalError, match="the disk is full"):
                    await service.run()
        async with controller(config, cluster) as service:
            (view,) = await service.list_jobs(None)
            assert (await ended(service, view.id)).state is JobState.DONE
            assert cluster.prefilled == {1: 100}

    run(work())


def test_a_controller_that_was_replaced_ends_no_host(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for so long that every answer is overdue."""

    async def overdue(_: Keeping, host: Host) -> None:
        if host.role == "prefill":
            raise HostSilent(f"{host.name} did not answer state for 5 s")

    before = dict[str, HostDouble]()

    async def work() -> None:
        with contextlib.suppress(StaleEpoch):
            async with controller(config, cluster) as service:
                while not (await service.readiness()).is_ready:
                    await asyncio.sleep(0.001)
                for host in cluster.hosts.values():
                    host.epoch += host.role == "prefill"
                before.update(cluster.hosts)
                monkeypatch.setattr(Keeping, "_check", overdue)
                with pytest.raises(StaleEpoch):
                    await service.run()
        assert cluster.hosts == before
        assert {host.condition for host in before.values()} == {"ready"}

    run(work())


def test_draining_waits_for_jobs_that_are_being_written(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write = threading.Event(), threading.Event()

    def write(files: PromptFiles, job: str, tokens_T: np.ndarray) -> None:
        is_writing.set()
        assert may_write.wait(20)
        really_write(files, job, tokens_T)

    really_write = PromptFiles.write
    monkeypatch.setattr(PromptFiles, "write", write)

    async def work() -> None:
        async with controller(config, cluster) as service:
            submitting = asyncio.create_task(service.submit(request(3), prompt(60)))
            await until(is_writing.is_set)
            draining = asyncio.create_task(service.drain(20.0))
            await until(lambda: service._is_draining)
            may_write.set()
            job = (await submitting).job
            assert await draining
            assert (await service.inspect(job, None)).state is JobState.DONE

    run(work())


def test_a_controller_that_is_behind_leaves_the_hosts_of_the_newer_one(
    config: ServiceConfig, cluster: ClusterDouble
) -> None:
    async def scenario() -> None:
        service = ControllerService(config, cluster.linked)
        await service.start()
        await until(lambda: {host.condition for host in cluster.hosts.values()} == {"ready"})
        taken, *others = sorted(cluster.hosts)
        cluster.hosts[taken].epoch += 1
        await service.stop(end_hosts=True)
        assert sorted(cluster.hosts) == [taken]
        assert cluster.hosts[taken].condition == "ready"
        assert others

    run(scenario())


def test_a_start_that_fails_leaves_no_open_journal(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(Journal, "close", lambda journal: closed.append(journal.epoch))

    async def behind(self: Recovery) -> None:
        raise StaleEpoch("epoch 9 commands prefill-0, 1 is older")

    monkeypatch.setattr(Recovery, "run", behind)

    async def scenario() -> None:
        service = ControllerService(config, cluster.linked)
        with pytest.raises(StaleEpoch):
            await service.start()
        assert closed == [1]
        assert not service.is_running

    run(scenario())
