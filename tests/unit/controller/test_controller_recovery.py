"""Controllers, groups and workers that die: every accepted job ends once, with the tokens it would have had anyway."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.config import SchedulerSection, ServiceConfig
from longprefill.orchestrator.controller import core
from longprefill.orchestrator.controller.contract import Busy
from longprefill.orchestrator.hosts.contract import StaleEpoch
from longprefill.orchestrator.job import JobState
from longprefill.orchestrator.journal.journal import Journal, JournalError, StaleJournal

from .cases import (
    controller,
    ended,
    expected,
    ids_of,
    make_config,
    prompt,
    request,
    run,
    stream,
    until,
)
from .cluster_double import ClusterDouble
from .prefill_double import PrefillDouble


@pytest.mark.parametrize("moment", ["queued", "prefilling", "generating"])
def test_a_new_controller_goes_on_where_the_old_one_died(
    config: ServiceConfig, cluster: ClusterDouble, moment: str
) -> None:
    """Hosts live on: nothing is prefilled twice, the stream goes on at its cursor."""
    tokens_T = prompt(300)
    gate = asyncio.Event()
    if moment == "queued":
        cluster.starts = False
    elif moment == "prefilling":
        cluster.step_gate = gate

    async def work() -> None:
        cursor, early = 0, []
        async with controller(config, cluster) as service:
            job = (await service.submit(request(40, idempotency_key="k"), tokens_T)).job
            while (await service.inspect(job, None)).state != moment:
                await asyncio.sleep(0.001)
            if moment == "prefilling":
                await until(lambda: cluster.steps)
            if moment == "generating":
                batch = await service.tokens(job, None)
                cursor, early = batch.cursor, list(batch.records)
                assert early
                cluster.token_gate = gate
        gate.set()
        cluster.starts = True
        async with controller(config, cluster) as service:
            assert (await service.cluster()).epoch == 2
            assert (await service.submit(request(40, idempotency_key="k"), tokens_T)).job == job
            records = early + await stream(service, job, cursor)
            assert ids_of(records) == expected(tokens_T, 40)
            view = await ended(service, job)
            assert (view.state, view.num_attempts) == (JobState.DONE, 1)
            assert cluster.prefilled == {1: 300}
            events = await service.events(job, None)
            assert [event.number for event in events] == list(range(1, len(events) + 1))
            await until(lambda: all(not host.state().jobs for host in cluster.hosts.values()))

    run(work())


def test_a_step_that_ended_while_nobody_listened_counts(config: ServiceConfig, cluster: ClusterDouble) -> None:
    cluster.step_gate = gate = asyncio.Event()

    async def work() -> None:
        async with controller(config, cluster) as service:
            job = (await service.submit(request(2), prompt(64))).job
            await until(lambda: cluster.steps)
        gate.set()
        host = next(h for h in cluster.hosts.values() if isinstance(h, PrefillDouble) and h.last_step)
        await until(lambda: host.running is None)
        async with controller(config, cluster) as service:
            assert (await ended(service, job)).state is JobState.DONE
            steps = [event.data for event in await service.events(job, None) if event.kind == "step"]
            assert [(step["start"], step["end"], step["seconds"]) for step in steps] == [(0, 64, None)]
            assert cluster.prefilled == {1: 64}

    run(work())


def test_a_whole_cluster_that_died_comes_back(config: ServiceConfig, cluster: ClusterDouble) -> None:
    tokens_T = prompt(150)

    async def work() -> None:
        async with controller(config, cluster) as service:
            jobs = [(await service.submit(request(30, num_samples=2, seed=n), tokens_T)).job for n in range(5)]
            early = {job: await service.tokens(job, None) for job in jobs[:2]}
            early |= {job: await service.tokens(job, None, timeout_s=0) for job in jobs[2:]}
        for name in list(cluster.hosts):
            cluster.kill(name)
        async with controller(config, cluster) as service:
            for seed, job in enumerate(jobs):
                records = list(early[job].records) + await stream(service, job, early[job].cursor)
                for sample in range(2):
                    assert ids_of(records, sample) == expected(tokens_T, 30, seed=seed, sample=sample)
                assert (await ended(service, job)).state is JobState.DONE

    run(work())


@pytest.mark.parametrize("how", ["kill", "lose", "silence", "error"])
def test_a_lost_group_is_replaced_and_its_jobs_begin_again(
    config: ServiceConfig, cluster: ClusterDouble, how: str
) -> None:
    cluster.step_gate = gate = asyncio.Event()
    lone = replace(config, prefill=(replace(config.prefill[0], count=1),))
    tokens_T = prompt(200)

    async def work() -> None:
        async with controller(lone, cluster) as service:
            jobs = [(await service.submit(request(3), tokens_T)).job for _ in range(2)]
            await until(lambda: cluster.steps)
            host = cluster.hosts["prefill-0"]
            assert isinstance(host, PrefillDouble)
            if how == "kill":
                cluster.kill("prefill-0")
            elif how == "lose":
                host.lose()
            elif how == "silence":
                host.is_silent = True
            else:
                host.fails_next_step = "rank 1 died"
            gate.set()
            for job in jobs:
                view = await ended(service, job)
                assert view.state is JobState.DONE
                assert ids_of(await stream(service, job)) == expected(tokens_T, 3)
            first = await service.inspect(jobs[0], None)
            assert first.num_attempts == 2
            states = [e.data for e in await service.events(jobs[0], None) if e.kind == "state"]
            assert "prefill-0 was lost" in states[2]["reason"]

    run(work())


def test_a_job_that_its_group_never_survives_fails_alone(config: ServiceConfig, cluster: ClusterDouble) -> None:
    lone = replace(config, prefill=(replace(config.prefill[0], count=1),))

    async def work() -> None:
        async with controller(lone, cluster) as service:
            poison = (await service.submit(request(3), prompt(60))).job
            while not (view := await service.inspect(poison, None)).state.is_final:
                host = cluster.hosts.get("prefill-0")
                if isinstance(host, PrefillDouble):
                    host.fails_next_step = "SIGSEGV" if view.state is not JobState.DONE else None
                await asyncio.sleep(0)
            assert view.state is JobState.FAILED
            assert "failed 3 times, the last time: prefill-0 was lost: SIGSEGV" in (view.reason or "")
            host = cluster.hosts["prefill-0"]
            assert isinstance(host, PrefillDouble)
            host.fails_next_step = None
            assert (await ended(service, (await service.submit(request(3), prompt(60))).job)).state is JobState.DONE

    run(work())


def test_a_lost_decode_worker_loses_no_token(config: ServiceConfig, cluster: ClusterDouble) -> None:
    tokens_T = prompt(100)

    async def work() -> None:
        async with controller(config, cluster) as service:
            job = (await service.submit(request(60, num_samples=2, seed=4), tokens_T)).job
            records, cursor = [], 0
            while len(records) < 20:
                batch = await service.tokens(job, None, after=cursor)
                records, cursor = records + list(batch.records), batch.cursor
            cluster.kill("decode-0")
            records += await stream(service, job, cursor)
            for sample in range(2):
                assert ids_of(records, sample) == expected(tokens_T, 60, seed=4, sample=sample)
            view = await ended(service, job)
            assert (view.state, view.num_attempts) == (JobState.DONE, 2)

    run(work())


def test_snapshots_save_the_steps_before_them(config: ServiceConfig, cluster: ClusterDouble) -> None:
    saving = replace(config, scheduler=SchedulerSection(snapshot_every_s=0.1))
    saving = replace(saving, prefill=(replace(config.prefill[0], count=1, max_tokens=4096),))

    async def work() -> None:
        async with controller(saving, cluster) as service:
            job = (await service.submit(request(2), prompt(1600))).job
            await until(lambda: len(cluster.steps) > 20)
            cluster.kill("prefill-0")
            view = await ended(service, job)
            assert view.state is JobState.DONE
            resumed = cluster.opened[-1][2]
            assert resumed >= 640
            assert cluster.prefilled[1] < 1600 + 1000
            assert view.snapshot is None
            assert list((Path(saving.service.state_dir) / "snapshots").iterdir()) == []

    run(work())


def test_a_snapshot_whose_answer_was_lost_is_not_used_and_not_left(
    config: ServiceConfig, cluster: ClusterDouble
) -> None:
    """Also where its job has an earlier one."""
    saving = replace(config, scheduler=SchedulerSection(snapshot_every_s=0.1))
    saving = replace(saving, prefill=(replace(config.prefill[0], count=1, max_tokens=4096),))
    folder = Path(saving.service.state_dir) / "snapshots"

    async def work() -> None:
        async with controller(saving, cluster) as service:
            job = (await service.submit(request(2), prompt(1600))).job
            await until(lambda: any(folder.iterdir()))
            host = cluster.hosts["prefill-0"]
            assert isinstance(host, PrefillDouble)
            host.dies_after_export = True
            view = await ended(service, job)
            assert (view.state, view.num_attempts) == (JobState.DONE, 2)
            assert cluster.opened[-1][2] in (640, 704)  # the first: the lost one is twice as far
            assert list(folder.iterdir()) == []

    run(work())


def test_an_older_controller_is_shut_out_and_ends(config: ServiceConfig, cluster: ClusterDouble) -> None:
    async def work() -> None:
        with contextlib.suppress(StaleEpoch, StaleJournal):
            async with controller(config, cluster) as old:
                while not (await old.readiness()).is_ready:
                    await asyncio.sleep(0.001)
                async with controller(config, cluster) as new:
                    job = (await new.submit(request(3), prompt(100))).job
                    with pytest.raises((StaleEpoch, StaleJournal)):
                        await asyncio.wait_for(old.run(), 10)
                    with pytest.raises(StaleJournal):
                        await old.submit(request(3), prompt(100))
                    assert (await ended(new, job)).state is JobState.DONE

    run(work())


def test_a_disk_that_is_full_refuses_and_recovers(
    config: ServiceConfig, cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            with monkeypatch.context() as patch:
                patch.setattr(Journal, "accept", _refuse)
                with pytest.raises(Busy, match="could not be written to state_dir: database or disk is full") as busy:
                    await service.submit(request(), prompt(64))
                assert busy.value.is_draining
                assert not list((Path(config.service.state_dir) / "prompts").iterdir())
            assert (await ended(service, (await service.submit(request(), prompt(64))).job)).state is JobState.DONE

    run(work())


def _refuse(*_: object) -> None:
    raise JournalError("database or disk is full")


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["controller", "prefill-0", "prefill-1", "decode-0", "lose", "all", "cancel", "handoff"]),
        st.integers(0, 40),
    ),
    max_size=6,
)


@settings(max_examples=25)
@given(faults=FAULTS, seed=st.integers(0, 1000))
def test_whatever_dies_every_job_ends_once_with_its_own_tokens(
    model: Path, tmp_path_factory: pytest.TempPathFactory, faults: list[tuple[str, int]], seed: int
) -> None:
    config = make_config(model, tmp_path_factory.mktemp("state"))
    cluster = ClusterDouble()
    prompts = {n: prompt(40 + 70 * n, seed + n) for n in range(5)}

    async def work() -> None:
        jobs: dict[int, str] = {}
        streams: dict[int, list] = {n: [] for n in prompts}
        cursors = dict.fromkeys(prompts, 0)
        cancelled: set[int] = set()
        remaining = list(faults)
        while True:
            async with controller(config, cluster) as service:
                for number, tokens_T in prompts.items():
                    wanted = request(12, num_samples=1 + number % 2, seed=number, idempotency_key=f"k{number}")
                    submission = await service.submit(wanted, tokens_T)
                    assert jobs.setdefault(number, submission.job) == submission.job
                dies = False
                while remaining and not dies:
                    what, pause = remaining.pop(0)
                    for _ in range(pause):
                        await asyncio.sleep(0.001)
                    dies = what in ("controller", "all")
                    _break(what, cluster)
                    if what == "cancel":
                        victim = pause % len(prompts)
                        if (await service.cancel(jobs[victim], None)).state is JobState.CANCELLED:
                            cancelled.add(victim)
                    for number, job in jobs.items():
                        batch = await service.tokens(job, None, after=cursors[number], timeout_s=0)
                        streams[number] += batch.records
                        cursors[number] = batch.cursor
                if dies:
                    continue
                for number, job in jobs.items():
                    streams[number] += await stream(service, job, cursors[number])
                    view = await ended(service, job)
                    if number in cancelled:
                        assert view.state is JobState.CANCELLED
                    else:
                        assert view.state is JobState.DONE, view.reason
                    for sample in range(1 + number % 2):
                        whole = expected(prompts[number], 12, seed=number, sample=sample)
                        own = ids_of(streams[number], sample)
                        assert own == whole[: len(own)]
                        assert view.state is JobState.CANCELLED or own == whole
                    finals = [
                        event
                        for event in await service.events(job, None)
                        if event.kind == "state" and JobState(event.data["state"]).is_final
                    ]
                    assert len(finals) == 1
                await until(lambda: all(not host.state().jobs for host in cluster.hosts.values()), "nothing is held")
                return

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "MAX_FAILURES", 1 + len(faults))  # all of them may hit the same job
        run(work())


def _break(what: str, cluster: ClusterDouble) -> None:
    if what in cluster.hosts:
        cluster.kill(what)
    elif what == "lose":
        for host in cluster.hosts.values():
            if isinstance(host, PrefillDouble):
                host.lose()
    elif what == "handoff":
        cluster.failing_handoffs = 1
    elif what == "all":
        for name in list(cluster.hosts):
            cluster.kill(name)
