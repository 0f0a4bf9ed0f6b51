"""What the controller adds to the scheduler: adopted jobs, kept caches, learned costs, the outlook; and placements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.orchestrator.controller.estimates import OneLayout
from longprefill.orchestrator.placement import Demand, unsatisfiable
from longprefill.orchestrator.scheduler.correction import LearnedCosts
from longprefill.orchestrator.scheduler.jobs import Job, Mesh
from longprefill.orchestrator.scheduler.live import LiveScheduler
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.partition.layout import Slice

from .scheduler_cases import LinearCosts

MESH = Mesh(cp=1)


def scheduler(num_units: int = 1, cache: int | None = None, policy: str = "fcfs") -> LiveScheduler:
    fleet = FleetSettings(num_units=num_units, cache_bytes=cache, token_bytes=1, is_recoverable=False, can_move=False)
    return LiveScheduler(SchedulerSettings(policy=policy, step_tokens=1024), fleet, LinearCosts())


def job(number: int, num_tokens: int = 4096) -> Job:
    return Job(id=number, num_tokens=num_tokens, arrival_s=float(number))


def test_an_adopted_job_goes_on_where_it_is_and_nowhere_else() -> None:
    live = scheduler(num_units=2)
    live.adopt(job(1), unit=1, position=2048, now=0.0)
    live.submit(job(2), 0.0)
    live.submit(job(3), 0.0)
    steps = {step.slices[0].job: step for step in live.decide(0.0)}
    assert steps[1].block.start == 1
    assert steps[1].slices[0].start == 2048
    assert set(steps) == {1, 2}
    live.step_done(steps[2].id, 1.0, 1.0)
    (again,) = live.decide(1.0)  # a started job stays where its caches are; the other unit is busy
    assert again.block.start == 0


def test_kept_caches_hold_memory_until_they_are_released() -> None:
    live = scheduler(cache=8192)
    live.keep(7, unit=0, num_tokens=6000)
    live.submit(job(1), 0.0)
    assert live.decide(0.0) == []
    live.release(7)
    assert len(live.decide(0.0)) == 1


def test_a_lost_unit_forgets_kept_caches_too() -> None:
    live = scheduler(cache=8192)
    live.keep(7, unit=0, num_tokens=6000)
    live.submit(job(1), 0.0)
    live.forget_unit(0, 1.0)
    assert live.decide(1.0) == []
    live.unit_back(0)
    (step,) = live.decide(1.0)
    assert step.slices[0] == Slice(job=1, start=0, end=1024)
    live.release(7)


def test_a_step_that_is_given_up_leaves_its_job_where_it_was() -> None:
    live = scheduler()
    live.submit(job(1), 0.0)
    (step,) = live.decide(0.0)
    live.give_up(step.id)
    (again,) = live.decide(0.0)
    assert again.slices == step.slices
    assert not live.drop(1)
    live.give_up(again.id)
    assert live.drop(1)
    assert not live.knows(1)


def test_a_resumed_job_starts_at_its_snapshot_on_any_unit() -> None:
    live = scheduler(num_units=2)
    live.unit_lost(0, 0.0)
    live.resume(job(1), 2048, 0.0)
    (step,) = live.decide(0.0)
    assert (step.block.start, step.slices[0].start) == (1, 2048)


def test_the_outlook_follows_the_policy() -> None:
    live = scheduler(policy="srpt")
    live.submit(job(1, 8192), 0.0)
    live.submit(job(2, 1024), 0.0)
    outlook = live.outlook(0.0)
    assert outlook[2].start_s == 0.0
    assert outlook[1].num_before == 1
    assert outlook[1].start_s == pytest.approx(outlook[2].finish_s)
    assert live.rest_seconds(1, 4096) == pytest.approx(4096e-6)
    assert live.rest_seconds(9, 0) == 0.0


@given(
    overhead_s=st.floats(0.0, 0.5),
    factor=st.floats(0.05, 200.0),
    lengths=st.lists(st.integers(64, 65536), min_size=3, max_size=30),
)
def test_costs_learn_overhead_and_factor(overhead_s: float, factor: float, lengths: list[int]) -> None:
    costs = LearnedCosts(LinearCosts(), overhead_s=0.02)

    def actual_s(num_tokens: int) -> float:
        return overhead_s + factor * num_tokens * 1e-6

    for length in lengths:
        observe(costs, length, actual_s(length))
        assert costs.overhead_s >= 0
        assert costs.factor > 0
    for length in lengths:
        estimate_s = costs.step_seconds((Slice(job=0, start=0, end=length),), "contiguous", MESH)
        assert estimate_s == pytest.approx(actual_s(length), rel=0.25, abs=0.005)


def test_costs_say_when_earlier_estimates_are_off() -> None:
    costs = LearnedCosts(LinearCosts(), overhead_s=0.02)
    assert observe(costs, 65536, 10.0)
    assert not observe(costs, 65536, 10.0)
    assert not observe(costs, 65536, 0.0)


def observe(costs: LearnedCosts, num_tokens: int, actual_s: float) -> bool:
    step = (Slice(job=0, start=0, end=num_tokens),)
    expected_s = costs.step_seconds(step, "zigzag", MESH)
    return costs.observe(step, "zigzag", MESH, expected_s=expected_s, actual_s=actual_s)


def test_a_groups_own_layout_is_what_is_estimated() -> None:
    class Layouts(LinearCosts):
        def step_seconds(self, slices, layout, mesh) -> float:
            return 1.0 if layout == "contiguous" else 2.0

    step = (Slice(job=0, start=0, end=64),)
    assert OneLayout(Layouts(), "contiguous").step_seconds(step, "zigzag", MESH) == 1.0


@pytest.mark.parametrize(
    ("demands", "said"),
    [
        ([Demand(name="prefill-0", num_packs=2, pack={"CPU": 2.0})], None),
        ([Demand(name="prefill-0", num_packs=1, pack={"CPU": 5.0})], "prefill-0 needs CPU 5 on one node"),
        ([Demand(name="prefill-0", num_packs=1, pack={"GPU": 1.0})], "prefill-0 needs GPU 1 on one node"),
        ([Demand(name="prefill-0", num_packs=3, pack={"CPU": 3.0})], "all pools together need CPU 9"),
    ],
)
def test_placements_that_can_never_be(demands: list[Demand], said: str | None) -> None:
    reason = unsatisfiable([{"CPU": 4.0}, {"CPU": 4.0}], demands)
    assert (reason is None) if said is None else (reason is not None and said in reason)
