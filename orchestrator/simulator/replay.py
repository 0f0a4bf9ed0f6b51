"""One replay of a trace on a cluster: a world, and the events that change it. All randomness comes from one seed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from longprefill.orchestrator.scheduler.decisions import Decision, Refused, StepDecision
from longprefill.orchestrator.scheduler.jobs import HeldPrefix, Job, StepCosts
from longprefill.orchestrator.scheduler.scheduler import Scheduler
from longprefill.orchestrator.simulator.cluster import Cluster
from longprefill.orchestrator.simulator.engine import Event, Timed, run
from longprefill.orchestrator.simulator.prefix_cache import Match, PrefixCache
from longprefill.orchestrator.simulator.records import JobRecord, StepRecord
from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS, Request
from longprefill.partition.layout import PAGE_TOKENS, Slice

NO_MATCH = Match(0, 0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Everything that happened."""

    policy: str
    jobs: tuple[JobRecord, ...]
    steps: tuple[StepRecord, ...]
    decisions: tuple[Decision, ...]
    decision_s: tuple[float, ...]
    """CPU seconds of every decision: the one thing here that differs from run to run."""
    end_s: float
    lost_s: float
    """Unit-seconds of steps that a failure ended, and of finished steps that had to be run again."""
    num_failures: int


class World:
    """The state of one replay."""

    def __init__(self, requests: Sequence[Request], cluster: Cluster, scheduler: Scheduler, costs: StepCosts) -> None:
        self.requests = requests
        self.cluster = cluster
        self.scheduler = scheduler
        self.random = np.random.default_rng(cluster.seed)
        self.num_open = len(requests)
        self._costs = costs
        self.jobs = [
            JobRecord(
                id=number,
                num_tokens=request.input_tokens,
                arrival_s=request.arrival_s,
                alone_s=self.alone_seconds(number, request.input_tokens),
            )
            for number, request in enumerate(requests)
        ]
        self.steps: list[StepRecord] = []
        self.decisions: list[Decision] = []
        self.decision_s: list[float] = []
        self.lost_s = 0.0
        self.num_failures = 0
        self.cache = _prefix_cache(cluster)
        self.matches: dict[int, Match] = {}
        self.running: dict[int, StepDecision] = {}
        self.free_slots = cluster.decode.num_workers * cluster.decode.slots_per_worker
        self.waiting_for_slot: deque[int] = deque()

    def alone_seconds(self, job: int, num_tokens: int) -> float:
        """Seconds of the first tokens of a job on one idle unit."""
        piece = Slice(job=job, start=0, end=num_tokens)
        return self._costs.step_seconds((piece,), "zigzag", self.cluster.fleet.mesh(1))

    def decide(self, now: float) -> list[Timed[World]]:
        """Lets the scheduler use what is idle; the ends of the steps it starts."""
        events: list[Timed[World]] = []
        if not (self.scheduler.num_queued and self.scheduler.num_idle_units):
            return events
        before_s = time.thread_time()
        decisions = self.scheduler.decide(now)
        spent_s = time.thread_time() - before_s
        for decision in decisions:
            self.decision_s.append(spent_s / len(decisions))
            self.decisions.append(decision)
            self.running[decision.id] = decision
            for piece in decision.slices:
                self._note_start(piece, now)
            if decision.preempted is not None:
                self.jobs[decision.preempted].num_preemptions += 1
            # the costs are the truth here, whatever the scheduler has learned
            computed_s = self._costs.step_seconds(decision.slices, decision.layout, decision.mesh)
            failures = self.cluster.failures
            if failures.straggler_share and self.random.random() < failures.straggler_share:
                computed_s *= failures.straggler_factor
            seconds = decision.move_s + computed_s
            events.append(Timed(now + seconds, StepEnds(decision.id, seconds)))
        return events

    def record_step(self, decision: StepDecision, end_s: float, *, is_lost: bool) -> None:
        self.steps.append(
            StepRecord(
                id=decision.id,
                jobs=tuple(piece.job for piece in decision.slices),
                spans=tuple((piece.start, piece.end) for piece in decision.slices),
                unit=decision.block.start,
                num_units=decision.block.size,
                start_s=decision.start_s,
                end_s=end_s,
                estimate_s=decision.estimate_s,
                is_lost=is_lost,
                reason=decision.reason,
            )
        )

    def close(self, job: int, first_token_s: float) -> None:
        self.jobs[job].first_token_s = first_token_s
        self.num_open -= 1

    def _note_start(self, piece: Slice, now: float) -> None:
        record = self.jobs[piece.job]
        record.num_steps += 1
        if np.isnan(record.first_step_s):
            record.first_step_s = now
            record.sent_s = now
            record.hit_tokens = piece.start


class Arrives(Event[World]):
    order = 1  # ends of steps at the same time come first: what they free can be given away

    def __init__(self, number: int) -> None:
        self.number = number

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        request, held = world.requests[self.number], None
        if world.cache is not None:
            match = world.cache.match(request.full_blocks)
            world.matches[self.number] = match
            world.jobs[self.number].page_hit_tokens = match.page_tokens
            resume = match.resume_tokens
            if resume == request.input_tokens:
                # the last token is always computed: a whole hit resumes one block earlier, if a state is there
                shorter = world.cache.match(request.full_blocks[: resume // BLOCK_TOKENS - 1])
                match, resume = shorter, shorter.resume_tokens
            if resume:
                held = HeldPrefix(match.unit, resume)
        job = Job(id=self.number, num_tokens=request.input_tokens, arrival_s=now, held=held)
        answer = world.scheduler.submit(job, now)
        world.decisions.append(answer)
        if isinstance(answer, Refused):
            world.jobs[self.number].refusal = answer.reason
            world.num_open -= 1
        following: list[Timed[World]] = []
        if self.number + 1 < len(world.requests):
            following.append(Timed(world.requests[self.number + 1].arrival_s, Arrives(self.number + 1)))
            if following[0].at_s == now:
                return following  # who comes at the same time is compared before anyone starts
        return [*following, *world.decide(now)]


class StepEnds(Event[World]):
    def __init__(self, step: int, seconds: float) -> None:
        self.step = step
        self.seconds = seconds

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        decision = world.running.pop(self.step, None)
        if decision is None:
            return []  # a failure ended it before
        end = world.scheduler.step_done(self.step, now, self.seconds)
        world.record_step(decision, now, is_lost=False)
        fleet, decode = world.cluster.fleet, world.cluster.decode
        for piece in decision.slices:
            record = world.jobs[piece.job]
            sent = -(-piece.num_tokens // PAGE_TOKENS) * PAGE_TOKENS * fleet.token_bytes
            record.sent_s = max(record.sent_s, now) + sent / decode.handoff_bytes_per_s
        events: list[Timed[World]] = []
        for job in end.finished:
            events += _prefilled(world, job, decision.block.start, now)
        return [*events, *world.decide(now)]


class HandedOver(Event[World]):
    def __init__(self, job: int) -> None:
        self.job = job

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        if not world.free_slots:
            world.waiting_for_slot.append(self.job)
            return []
        return _decode(world, self.job, now)


class DecodeEnds(Event[World]):
    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        world.free_slots += 1
        return _decode(world, world.waiting_for_slot.popleft(), now) if world.waiting_for_slot else []


class UnitFails(Event[World]):
    def __init__(self, unit: int) -> None:
        self.unit = unit

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        if not world.num_open:
            return []
        world.num_failures += 1
        loss = world.scheduler.unit_lost(self.unit, now)
        for step in loss.lost_steps:
            decision = world.running.pop(step)
            world.lost_s += (now - decision.start_s) * decision.block.size
            world.record_step(decision, now, is_lost=True)
        for job, num_tokens in loss.restarted:
            world.lost_s += world.alone_seconds(job, num_tokens)
        if world.cache is not None and not world.cluster.fleet.is_recoverable:
            world.cache.drop_unit(self.unit)
        back = Timed(now + world.cluster.failures.repair_s, UnitReturns(self.unit))
        return [back, *world.decide(now)]


class UnitReturns(Event[World]):
    def __init__(self, unit: int) -> None:
        self.unit = unit

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        world.scheduler.unit_back(self.unit)
        return [_next_failure(world, self.unit, now), *world.decide(now)]


def replay(requests: Sequence[Request], cluster: Cluster, make_costs: Callable[[], StepCosts]) -> Replay:
    """Replays a trace under the cluster's policy.

    Raises:
        UserError: settings that the scheduler or the costs refuse.
    """
    costs = make_costs()
    scheduler = Scheduler(cluster.scheduler, cluster.fleet, costs)
    world = World(requests, cluster, scheduler, costs)
    first: list[Timed[World]] = [Timed(requests[0].arrival_s, Arrives(0))]
    if cluster.failures.unit_mtbf_s < float("inf"):
        first += [_next_failure(world, unit, 0.0) for unit in range(cluster.fleet.num_units)]
    run(world, first)
    assert not world.num_open, f"{world.num_open} jobs never ended"
    return Replay(
        policy=cluster.scheduler.policy,
        jobs=tuple(world.jobs),
        steps=tuple(world.steps),
        decisions=tuple(world.decisions),
        decision_s=tuple(world.decision_s),
        end_s=max((step.end_s for step in world.steps), default=requests[-1].arrival_s),
        lost_s=world.lost_s,
        num_failures=world.num_failures,
    )


def _prefilled(world: World, job: int, unit: int, now: float) -> list[Timed[World]]:
    """A job's last step has ended: its prompt may be kept, its caches go to a decode worker."""
    world.jobs[job].prefilled_s = now
    if world.cache is not None:
        match = world.matches.pop(job)
        world.cache.insert(world.requests[job].full_blocks, match, unit)
    decode = world.cluster.decode
    if not decode.num_workers:
        world.close(job, now)
        return []
    state_s = world.cluster.fleet.state_bytes / decode.handoff_bytes_per_s
    return [Timed(world.jobs[job].sent_s + state_s + decode.handoff_latency_s, HandedOver(job))]


def _decode(world: World, job: int, now: float) -> list[Timed[World]]:
    decode = world.cluster.decode
    world.free_slots -= 1
    world.close(job, now + decode.token_s)
    return [Timed(now + world.requests[job].output_tokens * decode.token_s, DecodeEnds())]


def _next_failure(world: World, unit: int, now: float) -> Timed[World]:
    return Timed(now + float(world.random.exponential(world.cluster.failures.unit_mtbf_s)), UnitFails(unit))


def _prefix_cache(cluster: Cluster) -> PrefixCache | None:
    prefix, fleet = cluster.prefix, cluster.fleet
    if not prefix.capacity_bytes:
        return None
    pages = prefix.capacity_bytes * (1 - prefix.state_share) / max(BLOCK_TOKENS * fleet.token_bytes, 1)
    states = prefix.capacity_bytes * prefix.state_share / fleet.state_bytes if fleet.state_bytes else None
    return PrefixCache(num_blocks=int(pages), num_states=None if states is None else int(states))
