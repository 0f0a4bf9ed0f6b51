"""The scheduler's promises: every job ends once, memory holds, waiting is bounded, and equal calls decide equally."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.scheduler.base import POLICIES, Pick, make_policy
from longprefill.orchestrator.scheduler.decisions import Admitted, Block, Refused, StepDecision
from longprefill.orchestrator.scheduler.guarded import Guarded
from longprefill.orchestrator.scheduler.jobs import HeldPrefix, Job, Mesh, SchedulerError
from longprefill.orchestrator.scheduler.scheduler import Scheduler
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.orchestrator.scheduler.table import JobTable
from longprefill.orchestrator.scheduler.tenants import LIMIT, TenantShares
from longprefill.orchestrator.simulator.costs import QuadraticCosts
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice

from .scheduler_cases import LinearCosts, drive

MINUTE = 60.0


@st.composite
def job_lists(draw: st.DrawFn, most_tokens: int = 300_000) -> list[Job]:
    """Bursts of short jobs and documents, some with deadlines and priorities."""
    now, jobs = 0.0, []
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.5]))
        tokens = draw(st.one_of(st.integers(1, 4000), st.integers(4000, most_tokens)))
        wait = draw(st.sampled_from([float("inf"), float("inf"), 0.05, 1.0]))
        priority = draw(st.sampled_from([1.0, 1.0, 0.2, 5.0]))
        jobs.append(Job(id=number, num_tokens=tokens, arrival_s=now, deadline_s=now + wait, priority=priority))
    return jobs


def scheduler(policy: str = "guarded", *, costs: object = None, fleet: FleetSettings | None = None, **fields: object):
    chosen = {"step_tokens": 8192} | fields
    return Scheduler(
        SchedulerSettings(policy=policy, **chosen),  # pyright: ignore[reportArgumentType]
        fleet or FleetSettings(),
        costs or LinearCosts(),  # pyright: ignore[reportArgumentType]
    )


STEPS: list[dict[str, Any]] = [
    *({"step_tokens": step} for step in (1024, 8192, 65536)),
    {"step_tokens": None, "step_target_s": 0.05},
    {"step_tokens": None, "step_target_s": 1e-4},
]
"""Of the costs below a grain takes 1 ms and more, so the last target is met by no step."""


@settings(max_examples=60)
@given(
    jobs=job_lists(100_000),
    step=st.sampled_from(STEPS),
    pack=st.sampled_from([0, 4096, 65536]),
    rate=st.sampled_from([1, 5]),
)
def test_no_promise_is_ever_missed_on_one_unit(jobs: list[Job], step: dict[str, Any], pack: int, rate: float) -> None:
    run = drive(scheduler(costs=QuadraticCosts(work_per_s=rate * 1e6), pack_tokens=pack, **step), jobs)
    for job in jobs:
        answer = run.answers[job.id]
        assert isinstance(answer, Admitted)
        assert run.finish_s[job.id] <= answer.latest_s + 1e-6


@settings(max_examples=20)
@given(jobs=job_lists())
def test_a_promise_is_bounded_by_the_backlog_at_arrival(jobs: list[Job]) -> None:
    """20 times its own time or 4 times first come, first served; a document by its kind's worst so far."""
    costs = QuadraticCosts(work_per_s=1e6)
    run = drive(scheduler(costs=costs), jobs)
    first_come = drive(scheduler("fcfs", costs=costs), [replace_urgency(job) for job in jobs]).finish_s
    worst = 8.0
    for job in jobs:
        answer = run.answers[job.id]
        assert isinstance(answer, Admitted)
        wait_s = first_come[job.id] - job.arrival_s
        worst = max(worst, 1.5 * wait_s / answer.estimate_s)
        stretch, factor = (20.0, 4.0) if job.num_tokens < 65536 else (worst, 1.2)
        bound_s = max(stretch * answer.estimate_s, factor * wait_s)
        assert answer.latest_s - job.arrival_s <= bound_s + 1e-6


def replace_urgency(job: Job) -> Job:
    return Job(id=job.id, num_tokens=job.num_tokens, arrival_s=job.arrival_s)


def test_without_the_guard_the_promise_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail: short jobs that never end starve a document under short-first order alone."""
    jobs = [Job(id=0, num_tokens=200_000, arrival_s=0.0)]
    jobs += [Job(id=number, num_tokens=8000, arrival_s=number * 0.0081) for number in range(1, 400)]
    guarded = drive(scheduler(), jobs)
    answer = guarded.answers[0]
    assert isinstance(answer, Admitted)
    assert guarded.finish_s[0] <= answer.latest_s + 1e-9

    def shortest(self: Guarded, table: JobTable, now: float, num_units: int, eligible: np.ndarray) -> Pick | None:
        slots = eligible.nonzero()[0]
        return Pick(int(slots[table.remaining_s[slots].argmin()]), "", False) if len(slots) else None

    monkeypatch.setattr(Guarded, "pick", shortest)
    assert drive(scheduler(), jobs).finish_s[0] > answer.latest_s


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(data=st.data())
def test_every_job_is_computed_once_and_ends_once(policy: str, data: st.DataObject) -> None:
    jobs = data.draw(job_lists(most_tokens=120_000))
    units = data.draw(st.integers(1, 5))
    fleet = FleetSettings(num_units=units, devices_per_unit=2, cache_bytes=150_000, token_bytes=1, step_bytes=1)
    system = scheduler(
        policy,
        fleet=fleet,
        costs=LinearCosts(loss=0.1),
        step_tokens=None,
        step_target_s=0.02,
        max_degree=4,
        pack_tokens=2048,
    )
    run = drive(system, jobs)
    assert sorted(run.finish_s) == [job.id for job in jobs]
    positions = dict.fromkeys(run.finish_s, 0)
    for step in run.steps:
        assert step.block.start + step.block.size <= units
        assert step.block.start % step.block.size == 0
        for piece in step.slices:
            assert piece.start == positions[piece.job]
            positions[piece.job] = piece.end
    assert positions == {job.id: job.num_tokens for job in jobs}
    assert_units_and_memory(run.steps, jobs, run.finish_s, fleet)


def assert_units_and_memory(steps, jobs, finish_s, fleet: FleetSettings) -> None:
    """No unit runs two steps at once, and what started jobs hold on a unit never exceeds its memory."""
    tokens = {job.id: job.num_tokens for job in jobs}
    homes: dict[int, Block] = {}
    busy_until = [0.0] * fleet.num_units
    for step in sorted(steps, key=lambda step: (step.start_s, step.id)):
        for job in [job for job in homes if finish_s[job] <= step.start_s]:
            del homes[job]
        for piece in step.slices:
            homes[piece.job] = step.block
        for unit in range(step.block.start, step.block.start + step.block.size):
            assert busy_until[unit] <= step.start_s + 1e-12
            busy_until[unit] = step.start_s + step.estimate_s
            here = [job for job, home in homes.items() if home.start <= unit < home.start + home.size]
            assert sum(fleet.job_bytes(tokens[job]) for job in here) <= (fleet.cache_bytes or 0)


@settings(max_examples=10)
@given(jobs=job_lists())
def test_equal_calls_give_equal_decisions(jobs: list[Job]) -> None:
    first, second = (drive(scheduler(step_tokens=None), jobs) for _ in range(2))
    assert first.steps == second.steps
    assert first.answers == second.answers


def test_orders() -> None:
    jobs = [
        Job(id=0, num_tokens=90_000, arrival_s=0.0),
        Job(id=1, num_tokens=50_000, arrival_s=0.001),
        Job(id=2, num_tokens=1_000, arrival_s=0.002),
        Job(id=3, num_tokens=60_000, arrival_s=0.003, deadline_s=0.1),
    ]
    ends = {policy: drive(scheduler(policy), jobs).finish_s for policy in POLICIES}
    assert sorted(ends["fcfs"], key=lambda job: ends["fcfs"][job]) == [0, 1, 2, 3]
    assert sorted(ends["srpt"], key=lambda job: ends["srpt"][job]) == [2, 1, 3, 0]
    assert sorted(ends["edf"], key=lambda job: ends["edf"][job]) == [2, 3, 1, 0]
    assert ends["guarded"][2] == min(ends["guarded"].values())
    assert ends["guarded"][3] <= 0.1  # a deadline that can be kept becomes the promise


def test_priority_orders_equals() -> None:
    jobs = [
        Job(id=0, num_tokens=10_000, arrival_s=0.0),
        Job(id=1, num_tokens=20_000, arrival_s=0.0),
        Job(id=2, num_tokens=22_000, arrival_s=0.0, priority=3.0),
    ]
    ends = drive(scheduler("srpt"), jobs).finish_s
    assert ends[2] < ends[0] < ends[1]


def test_ties_do_not_depend_on_slots() -> None:
    """Equal jobs go by arrival, then number, whatever rows they got in the table."""
    policy, table = make_policy("srpt"), JobTable()
    for number in (5, 3, 4):
        table.add(Job(id=number, num_tokens=64, arrival_s=0.0), isolated_s=1, step_s=1, weight=1, need_bytes=0)
    pick = policy.pick(table, 0.0, 1, table.is_ready[: table.end])
    assert pick is not None
    assert table.job_at(pick.slot).id == 3


def test_what_never_fits_is_refused_with_what_would() -> None:
    fleet = FleetSettings(cache_bytes=100_000, token_bytes=1, state_bytes=1000, step_bytes=10)
    answer = scheduler(fleet=fleet).submit(Job(id=7, num_tokens=200_000, arrival_s=0.0), 0.0)
    assert isinstance(answer, Refused)
    assert "at most 98304 tokens" in answer.reason
    assert isinstance(scheduler(fleet=fleet).submit(Job(id=7, num_tokens=98304, arrival_s=0.0), 0.0), Admitted)


def test_a_full_queue_refuses() -> None:
    system = scheduler(max_queued=2)
    answers = [system.submit(Job(id=number, num_tokens=10, arrival_s=0.0), 0.0) for number in range(3)]
    assert [answer.kind for answer in answers] == ["admitted", "admitted", "refused"]


def test_steps_are_sized_by_time() -> None:
    system = scheduler(costs=QuadraticCosts(work_per_s=1e6), step_tokens=None, step_target_s=0.05)
    run = drive(system, [Job(id=0, num_tokens=400_000, arrival_s=0.0)])
    assert all(step.estimate_s <= 0.05 for step in run.steps)
    lengths = [step.slices[0].num_tokens for step in run.steps]
    assert lengths[0] > 2 * lengths[-2]  # later tokens cost more
    assert all(step.slices[0].end % 1024 == 0 for step in run.steps[:-1])


def test_the_smallest_degree_that_meets_the_deadline() -> None:
    fleet = FleetSettings(num_units=8)
    for deadline, degree in ((1.0, 1), (0.06, 2), (0.03, 4), (0.001, 8)):
        system = scheduler(fleet=fleet, max_degree=8, step_tokens=65536)
        system.submit(Job(id=0, num_tokens=65536, arrival_s=0.0, deadline_s=deadline), 0.0)
        assert [step.block.size for step in system.decide(0.0)] == [degree]


def test_no_job_is_widened_under_load_or_where_it_does_not_pay() -> None:
    fleet = FleetSettings(num_units=4)
    busy = scheduler(fleet=fleet, max_degree=4)
    for number in range(6):
        busy.submit(Job(id=number, num_tokens=50_000, arrival_s=0.0), 0.0)
    assert [step.block.size for step in busy.decide(0.0)] == [1, 1, 1, 1]
    idle = scheduler(fleet=fleet, max_degree=4)
    idle.submit(Job(id=0, num_tokens=50_000, arrival_s=0.0), 0.0)
    assert [step.block.size for step in idle.decide(0.0)] == [4]
    lossy = scheduler(fleet=fleet, max_degree=4, costs=LinearCosts(loss=1.0))
    lossy.submit(Job(id=0, num_tokens=50_000, arrival_s=0.0), 0.0)
    assert [step.block.size for step in lossy.decide(0.0)] == [1]


def test_short_jobs_share_a_step() -> None:
    system = scheduler(pack_tokens=2000)
    for number in range(10):
        system.submit(Job(id=number, num_tokens=1500, arrival_s=0.0), 0.0)
    (step,) = system.decide(0.0)
    assert [piece.job for piece in step.slices] == [0, 1, 2, 3, 4]  # 7,500 of 8,192 tokens
    end = system.step_done(step.id, step.estimate_s, step.estimate_s)
    assert end.finished == (0, 1, 2, 3, 4)


def test_no_promise_is_missed_in_bursts() -> None:
    """The two cases that once missed some: steps that share a second, and grains slower than the target."""
    source = random.Random(0)
    cases: list[dict[str, Any]] = [{"pack_tokens": 4096, "step_target_s": 1.0}, {"step_target_s": 0.001}]
    for number in range(20):
        now, jobs = 0.0, []
        for job in range(25):
            now += source.choice([0.0, 0.0, 0.001, 0.05])
            tokens = source.choice([source.randint(1, 4000), source.randint(4000, 120_000)])
            deadline_s = now + source.choice([float("inf"), float("inf"), 0.05, 1.0])
            jobs.append(Job(id=job, num_tokens=tokens, arrival_s=now, deadline_s=deadline_s))
        costs, fields = QuadraticCosts(work_per_s=source.choice([1e5, 1e6])), cases[number % len(cases)]
        run = drive(scheduler(costs=costs, step_tokens=None, **fields), jobs)
        for job, answer in run.answers.items():
            assert isinstance(answer, Admitted)
            assert run.finish_s[job] <= answer.latest_s + 1e-6, (number, fields, job)


def test_a_prefix_is_used_where_it_is_fetched_or_computed_again() -> None:
    def first_step(move_bytes_per_s: float, *, is_home_busy: bool):
        fleet = FleetSettings(num_units=2, token_bytes=1000, move_bytes_per_s=move_bytes_per_s)
        system = scheduler(fleet=fleet)
        if is_home_busy:
            system.submit(Job(id=9, num_tokens=100, arrival_s=0.0, held=HeldPrefix(1, 64)), 0.0)
            system.decide(0.0)
        system.submit(Job(id=0, num_tokens=50_000, arrival_s=0.0, held=HeldPrefix(1, 40_960)), 0.0)
        (step,) = system.decide(0.0)
        return step

    here = first_step(1e9, is_home_busy=False)
    assert (here.block, here.slices[0].start, here.move_s) == (Block(1, 1), 40_960, 0.0)
    fetched = first_step(1e10, is_home_busy=True)
    assert (fetched.block, fetched.slices[0].start) == (Block(0, 1), 40_960)
    assert fetched.move_s == pytest.approx(40_960_000 / 1e10)
    again = first_step(1e6, is_home_busy=True)
    assert (again.slices[0].start, again.move_s) == (0, 0.0)


@pytest.mark.parametrize(("is_recoverable", "start"), [(True, 8192), (False, 0)])
def test_a_lost_unit_costs_its_step_or_all(is_recoverable: bool, start: int) -> None:
    fleet = FleetSettings(num_units=2, token_bytes=10, move_bytes_per_s=1e6, is_recoverable=is_recoverable)
    system = scheduler(fleet=fleet)
    system.submit(Job(id=0, num_tokens=30_000, arrival_s=0.0), 0.0)
    (first,) = system.decide(0.0)
    system.step_done(first.id, 0.01, 0.01)
    (second,) = system.decide(0.01)
    loss = system.unit_lost(0, 0.015)
    assert loss.lost_steps == (second.id,)
    assert loss.restarted == (() if is_recoverable else ((0, 8192),))
    (third,) = system.decide(0.015)
    assert third.block == Block(1, 1)
    assert third.slices[0].start == start
    assert third.move_s == pytest.approx(8192 * 10 / 1e6 if is_recoverable else 0.0)
    with pytest.raises(KeyError):
        system.step_done(second.id, 0.02, 0.01)
    system.unit_back(0)
    assert system.num_idle_units == 1


def test_cancel_waits_for_the_step() -> None:
    system = scheduler()
    system.submit(Job(id=0, num_tokens=20_000, arrival_s=0.0), 0.0)
    (step,) = system.decide(0.0)
    assert not system.cancel(0)
    system.step_done(step.id, 0.01, 0.01)
    assert system.cancel(0)
    assert not system.cancel(0)
    assert system.decide(0.02) == []


def ended_steps(system: Scheduler, num_steps: int, actual_s: Callable[[StepDecision], float]) -> list[StepDecision]:
    """Steps of one job each, one after another."""
    steps: list[StepDecision] = []
    for number in range(num_steps):
        system.submit(Job(id=number, num_tokens=1000 + 10 * number, arrival_s=float(number)), float(number))
        (step,) = system.decide(float(number))
        system.step_done(step.id, number + 0.5, actual_s(step))
        steps.append(step)
    return steps


def test_ended_steps_correct_estimates_and_the_error_is_told() -> None:
    """Once: nothing is corrected twice. The error is that of the last steps, not of all."""
    system = scheduler()
    assert system.costs.error == 0.0
    steps = ended_steps(system, 400, lambda step: 2e-6 * step.slices[0].num_tokens + 0.003)
    assert (steps[0].estimate_s, steps[0].correction) == (1e-3, 1.0)
    assert steps[-1].estimate_s == pytest.approx(2e-6 * 4990 + 0.003, rel=1e-3)
    assert steps[-1].correction == pytest.approx(steps[-1].estimate_s / 4990e-6)
    assert system.costs.error < 1e-3


def test_the_error_is_actual_over_expected() -> None:
    system = scheduler()
    (step,) = ended_steps(system, 1, lambda step: 1.5 * step.estimate_s)
    assert system.costs.error == pytest.approx(0.5)
    assert step.estimate_s == 1e-3


def test_exact_estimates_stay_exact() -> None:
    system = scheduler()
    steps = ended_steps(system, 50, lambda step: step.estimate_s)
    assert [step.estimate_s for step in steps] == [(1000 + 10 * number) * 1e-6 for number in range(50)]
    assert (system.costs.error, system.costs.factor, system.costs.overhead_s) == (0.0, 1.0, 0.0)


def test_a_long_queue_learns_in_parts() -> None:
    """New estimates come a few with every decision, so that none is held up by all."""

    class Asked(LinearCosts):
        num = 0

        def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
            self.num += 1
            return super().step_seconds(slices, layout, mesh)

    costs = Asked()
    system = scheduler(costs=costs)
    for number in range(500):
        system.submit(Job(id=number, num_tokens=100_000 + number, arrival_s=0.0), 0.0)
    (step,) = system.decide(0.0)
    system.step_done(step.id, 1.0, 10 * step.estimate_s)
    assert system.num_outdated == 499  # but the one that ran, which is estimated anew
    left, asked = system.num_outdated, costs.num
    while system.num_outdated:
        system.decide(1.0)
        assert costs.num - asked <= 200
        assert system.num_outdated < left
        left, asked = system.num_outdated, costs.num
    waiting = system._table.remaining_s[: system._table.end]  # pyright: ignore[reportPrivateUsage]
    assert waiting.min() > 0.3


def test_who_had_more_than_his_share_claims_less() -> None:
    shares = TenantShares({"a": 1.0, "b": 3.0})
    assert shares.claim("a", 0.0) == 1.0
    shares.serve("a", 10.0, 0.0)
    shares.serve("b", 10.0, 0.0)
    assert shares.claim("a", 1.0) == pytest.approx(0.5)
    assert shares.claim("b", 1.0) == pytest.approx(1.5)
    assert shares.claim("c", 1.0) == LIMIT
    shares.serve("b", 10_000.0, 100 * MINUTE)
    assert shares.claim("a", 100 * MINUTE) == LIMIT


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_policy("lifo"), "use guarded, fcfs, edf, srpt"),
        (lambda: SchedulerSettings(step_tokens=1000), "use --step-tokens 960 or 1024"),
        (lambda: SchedulerSettings(max_degree=3), "power of two"),
        (lambda: FleetSettings(devices_per_unit=6, tp=4), "does not divide"),
        (lambda: Job(id=0, num_tokens=0, arrival_s=0.0), "1 token or more"),
        (lambda: Job(id=0, num_tokens=10, arrival_s=0.0, held=HeldPrefix(0, 10)), "1 to 9"),
        (lambda: TenantShares({"a": 0.0}), "positive"),
    ],
)
def test_wrong_settings_are_refused(make, words: str) -> None:
    with pytest.raises(Exception, match=words) as raised:
        make()
    assert isinstance(raised.value, SchedulerError) or "step_tokens" in str(raised.value)
