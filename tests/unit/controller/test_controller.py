"""The controller without Ray: jobs from acceptance to their one end, over hosts in memory."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longprefill.orchestrator.config import SchedulerSection, ServiceConfig
from longprefill.orchestrator.controller.contract import Busy, Conflict, Infeasible, UnknownJob
from longprefill.orchestrator.job import JobState
from longprefill.partition.errors import PromptError, UserError
from longprefill.workers.model.tokenizer import Tokenizer

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


def test_a_job_goes_through_its_states(config: ServiceConfig, cluster: ClusterDouble, model: Path) -> None:
    tokens_T = prompt(200)

    async def work() -> None:
        async with controller(config, cluster) as service:
            submission = await service.submit(request(5, num_logprobs=2), tokens_T)
            records = await stream(service, submission.job)
            view = await ended(service, submission.job)
            assert ids_of(records) == expected(tokens_T, 5)
            assert records[-1].finish_reason == "length"
            assert records[0].top_logprobs == ((0, -1.0), (1, -1.0))
            assert "".join(record.text for record in records) == Tokenizer(model).decode(expected(tokens_T, 5))
            assert view.state is JobState.DONE
            assert view.samples[0].text == "".join(record.text for record in records)
            assert (view.position, view.num_steps, view.num_attempts) == (200, 4, 1)
            assert view.report is not None
            assert view.report["comm"] == {"rows": {"calls": 4, "bytes": 256}}
            assert view.report["handoff"]["bytes"] == 1000
            timings = view.timings
            parts = (timings.queue_s, timings.prefill_s, timings.transfer_s, timings.first_decode_s)
            assert timings.ttft_s == pytest.approx(sum(part or 0.0 for part in parts))
            events = await service.events(submission.job, "a")
            states = [event.data["state"] for event in events if event.kind == "state"]
            assert states == ["queued", "prefilling", "handing_off", "generating", "done"]
            assert [event.data["end"] for event in events if event.kind == "step"] == [64, 128, 192, 200]
            assert await service.events(submission.job, "a", after=len(events)) == []
            trace = await service.trace(submission.job, "a")
            assert {span["name"] for span in trace["traceEvents"]} >= {"queued", "prefilling", "step 0", "step 3"}
            await until(lambda: all(not host.state().jobs for host in cluster.hosts.values()), "pages are given back")
            assert not list((Path(config.service.state_dir) / "prompts").iterdir())

    run(work())


def test_samples_prefill_once_and_end_alone(config: ServiceConfig, cluster: ClusterDouble, model: Path) -> None:
    tokens_T = prompt(70)
    stop_id = expected(tokens_T, 6, sample=2)[3]

    async def work() -> None:
        async with controller(config, cluster) as service:
            wanted = request(6, num_samples=3, seed=1, stop_token_ids=(stop_id,), temperature=1.0)
            job = (await service.submit(wanted, tokens_T)).job
            records = await stream(service, job)
            for sample in range(3):
                whole = expected(tokens_T, 6, seed=1, sample=sample)
                cut = whole[: whole.index(stop_id) + 1] if stop_id in whole else whole
                assert ids_of(records, sample) == cut
            number = len(cluster.opened)
            assert number == 1
            assert cluster.prefilled == {1: 70}

    run(work())


def test_a_stop_text_ends_its_sample_and_is_not_shown(
    config: ServiceConfig, cluster: ClusterDouble, model: Path
) -> None:
    tokens_T = prompt(64)
    whole = Tokenizer(model).decode(expected(tokens_T, 30))
    stop = whole[6:10]

    async def work() -> None:
        async with controller(config, cluster) as service:
            view = await ended(service, (await service.submit(request(30, stop=(stop,)), tokens_T)).job)
            assert view.state is JobState.DONE
            assert view.samples[0].text == whole[: whole.index(stop)]
            assert view.samples[0].finish_reason == "stop"
            assert view.samples[0].num_tokens < 30

    run(work())


def test_prefill_only_jobs_end_with_their_snapshot(config: ServiceConfig, cluster: ClusterDouble) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            view = await ended(service, (await service.submit(request(0, keep_snapshot=True), prompt(130))).job)
            assert view.state is JobState.DONE
            assert view.snapshot is not None
            assert Path(view.snapshot).is_file()
            cluster.is_disk_full = True
            view = await ended(service, (await service.submit(request(0, keep_snapshot=True), prompt(130))).job)
            assert view.state is JobState.FAILED
            assert "snapshot could not be written" in (view.reason or "")
            assert view.snapshot is None

    run(work())


def test_idempotency_keys(config: ServiceConfig, cluster: ClusterDouble) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            wanted = request(2, idempotency_key="k")
            both = await asyncio.gather(*(service.submit(wanted, prompt(64)) for _ in range(4)))
            assert len({submission.job for submission in both}) == 1
            assert sum(submission.is_new for submission in both) == 1
            with pytest.raises(Conflict):
                await service.submit(wanted, prompt(65))
            await ended(service, both[0].job)
            assert (await service.submit(wanted, prompt(64))).job == both[0].job
            assert not list((Path(config.service.state_dir) / "prompts").iterdir())

    run(work())


@pytest.mark.parametrize(
    ("fields", "num_tokens", "kind", "said"),
    [
        ({}, 0, PromptError, "is empty"),
        ({}, 1025, Infeasible, "a prefill group of this service holds 1024"),
        ({"num_tokens": 2000, "num_samples": 3}, 64, Infeasible, "exceed the 4096 tokens that a decode worker"),
        ({"num_tokens": 5000}, 64, UserError, "this service generates at most 4096"),
        ({"timeout_s": 7200.0}, 64, UserError, "this service allows at most 3600"),
        ({"stop_token_ids": (99999,)}, 64, UserError, "outside of the vocabulary"),
    ],
)
def test_what_can_never_run_is_refused(
    config: ServiceConfig,
    cluster: ClusterDouble,
    fields: dict[str, object],
    num_tokens: int,
    kind: type[Exception],
    said: str,
) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            with pytest.raises(kind, match=said):
                await service.submit(request(**fields), prompt(num_tokens))  # type: ignore[arg-type]
            assert await service.list_jobs(None) == []

    run(work())


def test_full_queues_and_draining_refuse(config: ServiceConfig, cluster: ClusterDouble) -> None:
    limited = replace(config, service=replace(config.service, max_queued=3, max_queued_per_tenant=2))
    cluster.starts = False

    async def work() -> None:
        async with controller(limited, cluster) as service:
            assert not (await service.readiness()).is_ready
            for tenant in "aab":
                await service.submit(request(tenant=tenant), prompt(64))
            with pytest.raises(Busy, match="3 jobs wait, max_queued=3") as refused:
                await service.submit(request(tenant="c"), prompt(64))
            assert refused.value.retry_after_s >= 1
            job = (await service.list_jobs("b"))[0].id
            assert (await service.cancel(job, "b")).state is JobState.CANCELLED
            with pytest.raises(Busy, match="2 jobs of tenant a wait, the limit is 2"):
                await service.submit(request(), prompt(64))
            cluster.starts = True
            assert await service.drain(20.0)
            with pytest.raises(Busy, match="drains") as draining:
                await service.submit(request(), prompt(64))
            assert draining.value.is_draining
            assert (await service.cluster()).is_draining
            assert {view.state for view in await service.list_jobs(None)} == {JobState.DONE, JobState.CANCELLED}

    run(work())


def test_tenants_do_not_see_each_other(config: ServiceConfig, cluster: ClusterDouble) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            job = (await service.submit(request(), prompt(64))).job
            for call in (service.inspect, service.cancel, service.events, service.tokens, service.trace):
                with pytest.raises(UnknownJob):
                    await call(job, "b")
                with pytest.raises(UnknownJob):
                    await call("job-nothing", None)
            assert await service.list_jobs("b") == []
            await ended(service, job)
            assert [view.id for view in await service.list_jobs(None, states=[JobState.DONE])] == [job]

    run(work())


@pytest.mark.parametrize("moment", ["queued", "prefilling", "generating"])
def test_a_cancelled_job_gives_everything_back(config: ServiceConfig, cluster: ClusterDouble, moment: str) -> None:
    gate = asyncio.Event()
    if moment == "queued":
        cluster.starts = False
    elif moment == "prefilling":
        cluster.step_gate = gate
    else:
        cluster.token_gate = gate

    async def work() -> None:
        async with controller(config, cluster) as service:
            job = (await service.submit(request(50), prompt(200))).job
            while (await service.inspect(job, None)).state != moment:
                await asyncio.sleep(0.002)
            if moment == "prefilling":
                await until(lambda: cluster.steps)
            assert (await service.cancel(job, "a")).state is JobState.CANCELLED
            assert (await service.cancel(job, "a")).state is JobState.CANCELLED
            gate.set()
            cluster.starts = True
            other = await ended(service, (await service.submit(request(2), prompt(1000))).job)
            assert other.state is JobState.DONE
            await until(lambda: all(not host.state().jobs for host in cluster.hosts.values()), "pages are given back")
            batch = await service.tokens(job, "a")
            assert (batch.state, batch.reason) == (JobState.CANCELLED, "cancelled by its owner")

    run(work())


def test_a_job_that_takes_too_long_fails(config: ServiceConfig, cluster: ClusterDouble) -> None:
    cluster.step_gate = asyncio.Event()

    async def work() -> None:
        async with controller(config, cluster) as service:
            view = await ended(service, (await service.submit(request(timeout_s=0.05), prompt(64))).job)
            assert view.state is JobState.FAILED
            assert view.reason == "it had not ended 0.05 s after it was accepted"

    run(work())


def test_two_groups_work_at_once_and_a_document_gives_way(config: ServiceConfig, cluster: ClusterDouble) -> None:
    cluster.step_gate = gate = asyncio.Event()
    shortest_first = replace(config, scheduler=SchedulerSection(policy="srpt"))

    async def work() -> None:
        async with controller(shortest_first, cluster) as service:
            long = [(await service.submit(request(1), prompt(960, seed))).job for seed in range(2)]
            await until(lambda: len(cluster.steps) == 2)
            assert {name for name, _ in cluster.steps} == {"prefill-0", "prefill-1"}
            short = [(await service.submit(request(1), prompt(60, seed))).job for seed in range(2)]
            gate.set()
            for job in short:
                await ended(service, job)
            views = [await ended(service, job) for job in long]
            assert {view.state for view in views} == {JobState.DONE}
            assert sum(view.num_preemptions for view in views) >= 1
            assert [view.num_attempts for view in views] == [1, 1]
            assert sum(cluster.prefilled.values()) == 2 * 960 + 2 * 60

    run(work())


def test_jobs_share_a_groups_memory_and_wait_for_it(config: ServiceConfig, cluster: ClusterDouble) -> None:
    """1024 tokens fit on a group: jobs of 600 one after the other, never two; nothing is refused by the host."""
    lone = replace(config, prefill=(replace(config.prefill[0], count=1),))

    async def work() -> None:
        async with controller(lone, cluster) as service:
            jobs = [(await service.submit(request(3), prompt(600, seed))).job for seed in range(4)]
            views = [await ended(service, job) for job in jobs]
            assert {view.state for view in views} == {JobState.DONE}
            assert [view.num_attempts for view in views] == [1] * 4

    run(work())


def test_decode_room_is_waited_for(config: ServiceConfig, cluster: ClusterDouble) -> None:
    """Each job wants more than half of the decode worker: they generate one after the other."""
    cluster.iterations = 100

    async def work() -> None:
        async with controller(config, cluster) as service:
            jobs = [(await service.submit(request(2200), prompt(64, seed))).job for seed in range(3)]
            views = [await ended(service, job) for job in jobs]
            assert {view.state for view in views} == {JobState.DONE}
            assert [view.samples[0].num_tokens for view in views] == [2200] * 3

    run(work())


def test_failed_handoffs_are_repeated_and_then_reported(config: ServiceConfig, cluster: ClusterDouble) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            cluster.failing_handoffs = 2
            assert (await ended(service, (await service.submit(request(), prompt(64))).job)).state is JobState.DONE
            cluster.failing_handoffs = 100
            view = await ended(service, (await service.submit(request(), prompt(64))).job)
            assert view.state is JobState.FAILED
            assert view.reason is not None
            assert "failed 3 times, the last time: the hand-off failed 3 times: damaged twice" in view.reason

    run(work())


def test_readiness_needs_a_link(config: ServiceConfig, cluster: ClusterDouble) -> None:
    cluster.unreachable = {"decode-0"}

    async def work() -> None:
        async with controller(config, cluster) as service:
            await until(lambda: any("check_link" in host.calls for host in cluster.hosts.values()))
            ready = await service.readiness()
            assert not ready.is_ready
            assert "no link" in ready.reasons[0]
        cluster.unreachable = set()
        async with controller(config, cluster) as service:
            while not (await service.readiness()).is_ready:
                await asyncio.sleep(0.002)
            groups = (await service.cluster()).groups
            assert [(group.name, group.role, group.state) for group in groups] == [
                ("prefill-0", "prefill", "ready"),
                ("prefill-1", "prefill", "ready"),
                ("decode-0", "decode", "ready"),
            ]

    run(work())


def test_metrics_are_text_that_prometheus_reads(config: ServiceConfig, cluster: ClusterDouble) -> None:
    async def work() -> None:
        async with controller(config, cluster) as service:
            with contextlib.suppress(UserError):
                await service.submit(request(), prompt(0))
            await ended(service, (await service.submit(request(3), prompt(100))).job)
            families = {family.name: family for family in text_string_to_metric_families(await service.metrics())}
            samples = {
                (sample.name, *sample.labels.values()): sample.value
                for family in families.values()
                for sample in family.samples
            }
            assert samples["longprefill_tokens_total", "prompt"] == 100
            assert samples["longprefill_tokens_total", "prefilled"] == 100
            assert samples["longprefill_tokens_total", "generated"] == 3
            assert samples["longprefill_jobs_total", "done", "a"] == 1
            assert samples["longprefill_jobs_refused_total", "PromptError"] == 1
            assert samples["longprefill_handoff_bytes_total",] == 1000
            assert samples["longprefill_ttft_seconds_count",] == 1
            phases = [samples["longprefill_ttft_phase_seconds_sum", phase] for phase in
                      ("queue", "prefill", "transfer", "first_decode")]  # fmt: skip
            assert sum(phases) == pytest.approx(samples["longprefill_ttft_seconds_sum",])
            assert samples["longprefill_group_up", "decode-0", "decode"] == 1
            assert all(family.documentation for family in families.values())

    run(work())
