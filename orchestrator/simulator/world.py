"""What a replay changes: jobs, steps, caches, decode slots, and what is down. All randomness comes from one seed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from longprefill.orchestrator.scheduler.decisions import Block, Decision, Refused, StepDecision
from longprefill.orchestrator.scheduler.jobs import HeldPrefix, Job, StepCosts
from longprefill.orchestrator.scheduler.scheduler import Scheduler
from longprefill.orchestrator.simulator.cluster import Cluster
from longprefill.orchestrator.simulator.prefix_cache import Match, PrefixCache
from longprefill.orchestrator.simulator.records import FailureRecord, JobRecord, StepRecord
from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS, Request
from longprefill.partition.layout import Slice


@dataclass(slots=True, eq=False)
class Handed:
    """A job whose prompt is done, on its way to a decode worker or there. Each way is another object, so that events of
    an earlier one are known to be stale."""

    block: Block
    """Where its caches were made, and are until a worker has them."""
    worker: int | None
    """Where they go, or are; None: no worker lives, or any will do."""
    num_attempts: int = 1
    is_decoding: bool = False


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
                alone_s=self.alone_seconds(number, 0, request.input_tokens),
            )
            for number, request in enumerate(requests)
        ]
        self.steps: list[StepRecord] = []
        self.decisions: list[tuple[float, Decision]] = []
        self.decision_s: list[float] = []
        self.failures: list[FailureRecord] = []
        self.lost_s = 0.0
        self.num_restarts = 0
        self.num_handed_again = 0
        self.cache = _prefix_cache(cluster)
        self.matches: dict[int, Match] = {}
        self.running: dict[int, StepDecision] = {}
        self.handed: dict[int, Handed] = {}
        self.free_slots = [cluster.decode.slots_per_worker] * cluster.decode.num_workers
        self.waiting_for_slot: deque[int] = deque()
        self.dead_units: dict[int, float] = {}
        """Until when."""
        self.dead_workers: dict[int, float] = {}
        self._unbegun: set[int] = set()

    def alone_seconds(self, job: int, start: int, end: int) -> float:
        """Seconds of a job's tokens on one idle unit."""
        piece = Slice(job=job, start=start, end=end)
        return self._costs.step_seconds((piece,), "zigzag", self.cluster.fleet.mesh(1))

    def submit(self, job: int, now: float) -> None:
        """Queues a job from its beginning, or from what is cached of it; or ends it, refused."""
        request, record, held = self.requests[job], self.jobs[job], None
        if self.cache is not None:
            match = self.cache.match(request.full_blocks)
            self.matches[job] = match
            record.page_hit_tokens = match.page_tokens
            resume = match.resume_tokens
            if resume == request.input_tokens:
                # the last token is always computed: a whole hit resumes one block earlier, if a state is there
                shorter = self.cache.match(request.full_blocks[: resume // BLOCK_TOKENS - 1])
                self.matches[job], resume = shorter, shorter.resume_tokens
                match = shorter
            if resume:
                held = HeldPrefix(match.unit, resume)
        self._unbegun.add(job)
        asked = Job(id=job, num_tokens=request.input_tokens, arrival_s=request.arrival_s, held=held)
        answer = self.scheduler.submit(asked, now)
        self.decisions.append((now, answer))
        if isinstance(answer, Refused):
            if isnan(record.first_step_s):
                record.refusal = answer.reason
            else:
                record.failure = answer.reason
            self.end(job, now)

    def decide(self, now: float) -> list[StepDecision]:
        """Lets the scheduler use what is idle; the steps that start."""
        if not (self.scheduler.num_queued and self.scheduler.num_idle_units):
            return []
        before_s = time.thread_time()
        decisions = self.scheduler.decide(now)
        spent_s = time.thread_time() - before_s
        for decision in decisions:
            self.decision_s.append(spent_s / len(decisions))
            self.decisions.append((now, decision))
            self.running[decision.id] = decision
            for piece in decision.slices:
                self._note_start(piece, now)
            if decision.preempted is not None:
                self.jobs[decision.preempted].num_preemptions += 1
        return decisions

    def actual_seconds(self, decision: StepDecision) -> float:
        """Of a step: the costs are the truth here, whatever the scheduler has learned."""
        computed_s = self._costs.step_seconds(decision.slices, decision.layout, decision.mesh)
        failures = self.cluster.failures
        if failures.straggler_share and self.random.random() < failures.straggler_share:
            computed_s *= failures.straggler_factor
        return decision.move_s + computed_s

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

    def begins_again(self, job: int, position: int) -> None:
        """The finished steps of a job, up to a position, were for nothing."""
        record = self.jobs[job]
        record.num_restarts += 1
        self.num_restarts += 1
        self.lost_s += self.alone_seconds(job, record.hit_tokens, position)
        self._unbegun.add(job)

    def step_lost(self, decision: StepDecision, now: float) -> None:
        """A step that a failure ended; its jobs are queued again."""
        self.lost_s += (now - decision.start_s) * decision.block.size
        self.record_step(decision, now, is_lost=True)
        for piece in decision.slices:
            self.jobs[piece.job].num_losses += 1
            if not self.scheduler.position(piece.job):
                self._unbegun.add(piece.job)

    def end(self, job: int, now: float) -> None:
        """A job's only end."""
        record = self.jobs[job]
        assert isnan(record.ended_s), f"job {job} has ended at {record.ended_s} s and ends again at {now} s"
        record.ended_s = now
        self.num_open -= 1

    def is_given_up(self, job: int, now: float) -> bool:
        """Ends a job that has lost too much; it must be nowhere any more."""
        record = self.jobs[job]
        if record.num_losses < self.cluster.failures.most_losses:
            return False
        record.failure = f"lost {record.num_losses} times: more is not tried ([failures] most_losses)"
        self.end(job, now)
        return True

    def freest_worker(self) -> int | None:
        """The decode worker that lives and has most free slots; None: none lives."""
        alive = (worker for worker in range(len(self.free_slots)) if worker not in self.dead_workers)
        return max(alive, key=lambda worker: (self.free_slots[worker], -worker), default=None)

    def _note_start(self, piece: Slice, now: float) -> None:
        record = self.jobs[piece.job]
        record.num_steps += 1
        if piece.job in self._unbegun:
            self._unbegun.remove(piece.job)
            record.sent_s = now
            record.hit_tokens = piece.start
            if isnan(record.first_step_s):
                record.first_step_s = now


def _prefix_cache(cluster: Cluster) -> PrefixCache | None:
    prefix, fleet = cluster.prefix, cluster.fleet
    if not prefix.capacity_bytes:
        return None
    pages = prefix.capacity_bytes * (1 - prefix.state_share) / max(BLOCK_TOKENS * fleet.token_bytes, 1)
    states = prefix.capacity_bytes * prefix.state_share / fleet.state_bytes if fleet.state_bytes else None
    return PrefixCache(num_blocks=int(pages), num_states=None if states is None else int(states))
