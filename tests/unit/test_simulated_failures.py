"""Failures of units, machines and decode workers in replays: every job ends once, and all time is accounted for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import inf, isnan
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.scheduler.decisions import Block, StepDecision
from longprefill.orchestrator.scheduler.jobs import HeldPrefix, Job
from longprefill.orchestrator.scheduler.scheduler import Scheduler
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.orchestrator.simulator.cluster import (
    Cluster,
    ClusterError,
    CostSettings,
    DecodeSettings,
    FailureSettings,
    NodeSettings,
    PrefixSettings,
    read_cluster,
)
from longprefill.orchestrator.simulator.costs import QuadraticCosts
from longprefill.orchestrator.simulator.failures import failing_parts
from longprefill.orchestrator.simulator.files import job_rows, write_chrome_trace
from longprefill.orchestrator.simulator.generate import TraceRecipe, generate_trace
from longprefill.orchestrator.simulator.metrics import metrics
from longprefill.orchestrator.simulator.replay import Replay, replay
from longprefill.orchestrator.simulator.trace import Request

RATE = CostSettings(work_per_s=4e5)
COSTS = QuadraticCosts(work_per_s=4e5)
CLUSTER = Cluster(
    seed=1,
    fleet=FleetSettings(num_units=4, token_bytes=1000, state_bytes=10**6),
    nodes=(NodeSettings(count=2, devices=2),),
    scheduler=SchedulerSettings(step_target_s=0.05, max_degree=4, pack_tokens=3000),
    costs=RATE,
    decode=DecodeSettings(num_workers=3, slots_per_worker=4, token_s=0.0005, handoff_bytes_per_s=1e9),
)
"""Two machines of two units; moving costs nothing, so all busy time is work."""


def requests(num: int = 40, seed: int = 1) -> tuple[Request, ...]:
    recipe = TraceRecipe(num_requests=num, seed=seed, requests_per_s=20, most_tokens=200_000, short_share=0.8)
    return generate_trace(replace(recipe, burstiness=6.0, short_tokens=2000))


def run(cluster: Cluster, trace: tuple[Request, ...] | None = None) -> Replay:
    return replay(trace or requests(), cluster, lambda: COSTS)


def check(result: Replay, cluster: Cluster, trace: tuple[Request, ...]) -> None:
    """What holds of every replay."""
    own_s = 0.0
    for job, request in zip(result.jobs, trace, strict=True):
        assert job.ended_s >= request.arrival_s  # and once, which `World.end` asserts
        assert not (job.refusal and job.failure)
        if job.is_served:
            assert request.arrival_s <= job.first_step_s < job.prefilled_s
            assert job.first_token_s <= job.ended_s + cluster.decode.token_s
            covered = job.hit_tokens
            ours = [step for step in result.steps if job.id in step.jobs and not step.is_lost]
            for step in ours[_last_beginning(ours, job.id, covered) :]:
                start, end = step.spans[step.jobs.index(job.id)]
                assert start == covered
                covered = end
            assert covered == job.num_tokens
            piece_s = COSTS.work(job.num_tokens) - COSTS.work(job.hit_tokens)
            own_s += piece_s / 4e5
    busy_s = sum((step.end_s - step.start_s) * step.num_units for step in result.steps)
    if not any(job.failure for job in result.jobs):
        assert busy_s == pytest.approx(own_s + result.lost_s)
    row = metrics(result, cluster)
    assert row.utilisation <= 1 + 1e-9
    assert row.jobs + row.refused + row.given_up == len(trace)
    assert row.failures == row.unit_failures + row.node_failures + row.decode_failures == len(result.failures)
    assert row.prefilled_again == sum(failure.num_restarted for failure in result.failures)
    assert row.handed_again == sum(failure.num_handed_again for failure in result.failures)
    lost = [step for step in result.steps if step.is_lost]
    assert len(lost) == sum(failure.num_lost_steps for failure in result.failures)
    for failure in result.failures:
        for step in result.steps if failure.units else ():  # nothing runs on what is down
            if step.start_s < failure.until_s and step.end_s > failure.at_s:
                assert not Block(step.unit, step.num_units).touches(failure.units)


def _last_beginning(steps: list, job: int, start: int) -> int:
    """The step from which on a job was computed for the last time."""
    return max(n for n, step in enumerate(steps) if step.spans[step.jobs.index(job)][0] == start)


MTBF_S = st.one_of(st.just(inf), st.floats(0.2, 5.0))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    unit=MTBF_S,
    node=MTBF_S,
    decode=MTBF_S,
    repair_s=st.sampled_from([0.0, 0.01, 0.3]),
    most_losses=st.sampled_from([1, 3, 30]),
    is_recoverable=st.booleans(),
    on_nodes=st.booleans(),
    num_workers=st.integers(0, 3),
    has_cache=st.booleans(),
    policy=st.sampled_from(["guarded", "fcfs", "srpt"]),
    seed=st.integers(0, 1000),
)
def test_every_job_ends_once_and_no_time_is_lost_from_sight(
    unit: float,
    node: float,
    decode: float,
    repair_s: float,
    most_losses: int,
    is_recoverable: bool,
    on_nodes: bool,
    num_workers: int,
    has_cache: bool,
    policy: str,
    seed: int,
) -> None:
    cluster = replace(
        CLUSTER,
        seed=seed,
        fleet=replace(CLUSTER.fleet, is_recoverable=is_recoverable),
        scheduler=replace(CLUSTER.scheduler, policy=policy),
        decode=replace(CLUSTER.decode, num_workers=num_workers, on_nodes=on_nodes),
        prefix=PrefixSettings(capacity_bytes=10**9 if has_cache else 0),
        failures=FailureSettings(
            unit_mtbf_s=unit,
            node_mtbf_s=node,
            decode_mtbf_s=decode if num_workers else inf,
            repair_s=repair_s,
            most_losses=most_losses,
        ),
    )
    trace = requests(20, seed)
    result = run(cluster, trace)
    check(result, cluster, trace)
    again = run(cluster, trace)
    assert repr(replace(again, decision_s=())) == repr(replace(result, decision_s=()))


def failing(cluster: Cluster = CLUSTER, **failures: float) -> tuple[Replay, Cluster]:
    cluster = replace(cluster, failures=FailureSettings(repair_s=0.2, **failures))  # pyright: ignore[reportArgumentType]
    result = run(cluster)
    check(result, cluster, requests())
    return result, cluster


def test_a_lost_decode_worker_costs_prompts_and_hand_offs() -> None:
    result, cluster = failing(
        replace(CLUSTER, decode=replace(CLUSTER.decode, token_s=0.002, handoff_bytes_per_s=1e8)), decode_mtbf_s=1.0
    )
    row, calm = metrics(result, cluster), metrics(run(CLUSTER), CLUSTER)
    assert row.decode_failures == row.failures > 0
    assert row.prefilled_again > 0
    assert row.handed_again > 0
    assert row.lost_s > calm.lost_s == 0
    prefilled_twice = [job for job in result.jobs if job.num_restarts and job.first_token_s < job.prefilled_s]
    assert prefilled_twice  # their first tokens were out before, and stay


def test_a_lost_machine_takes_both_units() -> None:
    """What ran on both machines goes on; what ran on one begins again, though single units would have survived."""
    machines, cluster = failing(node_mtbf_s=0.3)
    units, _ = failing(unit_mtbf_s=0.3)
    assert {failure.kind for failure in machines.failures} == {"node"}
    assert all(failure.units in ((0, 1), (2, 3)) for failure in machines.failures)
    assert sum(failure.num_restarted for failure in machines.failures) > 0
    assert sum(failure.num_restarted for failure in units.failures) == 0
    assert metrics(machines, cluster).lost_s > 0


def test_machines_take_decode_workers_that_lie_on_them() -> None:
    there = replace(CLUSTER, decode=replace(CLUSTER.decode, on_nodes=True))
    found = failing_parts(replace(there, failures=FailureSettings(node_mtbf_s=1.0)))
    assert [(part.kind, part.units, part.workers) for part in found] == [
        ("node", (0, 1), (0, 2)),
        ("node", (2, 3), (1,)),
    ]
    wide = replace(there, fleet=replace(there.fleet, num_units=2, devices_per_unit=2), nodes=(NodeSettings(count=4),))
    assert wide.node_units == ((0,), (0,), (1,), (1,))
    result, _ = failing(there, node_mtbf_s=1.0)
    assert any(failure.workers for failure in result.failures)


def test_a_job_that_is_lost_too_often_is_given_up() -> None:
    cluster = replace(
        CLUSTER,
        fleet=replace(CLUSTER.fleet, is_recoverable=False),
        failures=FailureSettings(unit_mtbf_s=0.1, repair_s=0.05, most_losses=3),
    )
    trace = (Request(0.0, 500_000, 1, ()), Request(0.0, 1000, 1, ()))
    result = run(cluster, trace)
    check(result, cluster, trace)
    assert "lost 3 times" in result.jobs[0].failure
    assert isnan(result.jobs[0].first_token_s)
    assert metrics(result, cluster).given_up == 1
    assert job_rows(result)[0]["failure"] == result.jobs[0].failure


def test_what_is_on_a_lost_unit_is_forgotten_by_those_that_wait() -> None:
    def first(units: tuple[int, ...]) -> StepDecision:
        fleet = FleetSettings(num_units=4, token_bytes=1, move_bytes_per_s=1e12)
        system = Scheduler(SchedulerSettings(step_tokens=8192), fleet, COSTS)
        system.submit(Job(id=0, num_tokens=50_000, arrival_s=0.0, held=HeldPrefix(1, 40_960)), 0.0)
        system.units_lost(units, 0.0)
        return system.decide(0.0)[0]

    assert first((1,)).slices[0].start == 40_960  # a second copy is on unit 0
    assert first((0, 1)).slices[0].start == 0
    assert first((2, 3)).slices[0].start == 40_960


def test_time_lines_show_what_is_down(tmp_path: Path) -> None:
    result, _ = failing(
        replace(CLUSTER, decode=replace(CLUSTER.decode, on_nodes=True)), node_mtbf_s=0.5, unit_mtbf_s=0.5
    )
    write_chrome_trace(tmp_path / "trace.json", [result])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    down = [event for event in events if event.get("cat") == "failure"]
    assert {event["name"].split()[0] for event in down} == {"unit", "node"}
    assert len(down) == sum(len(failure.units) + len(failure.workers) for failure in result.failures)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} <= {
        "decode worker 0",
        "decode worker 1",
        "decode worker 2",
    }
    for thread in {event["tid"] for event in down}:
        spans = sorted((event["ts"], event["dur"]) for event in events if event.get("tid") == thread and "dur" in event)
        assert all(ts + dur <= after + 0.1 for (ts, dur), (after, _) in pairwise(spans))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unit_mtbf_s = 0\n", r"\[failures\] unit_mtbf_s=0\.0: use 0\.001 seconds or more, or leave it out"),
        ("node_mtbf_s = -5\n", r"\[failures\] node_mtbf_s=-5\.0: use 0\.001 seconds or more"),
        ("decode_mtbf_s = nan\n[decode]\nnum_workers = 1\n", r"\[failures\] decode_mtbf_s=nan: use 0\.001"),
        ("decode_mtbf_s = 100\n", r"decode_mtbf_s=100\.0: \[decode\] num_workers=0 leaves none to fail"),
        ("repair_s = -1\n", r"\[failures\] repair_s=-1\.0: use seconds from 0 on"),
        ("repair_s = inf\n", r"\[failures\] repair_s=inf: use seconds from 0 on, and not for ever"),
        ("most_losses = 0\n", r"\[failures\] most_losses=0: need 1 or more"),
        ("node_mtbf = 3\n", r"node_mtbf is unknown: use decode_mtbf_s, most_losses, node_mtbf_s"),
    ],
)
def test_impossible_failures_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f"[failures]\n{text}")
    with pytest.raises(ClusterError, match=words):
        read_cluster(tmp_path / "c.toml")
