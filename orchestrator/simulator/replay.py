"""One replay of a trace on a cluster: the first events, and everything that has happened when none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longprefill.orchestrator.scheduler.decisions import Decision
from longprefill.orchestrator.scheduler.jobs import StepCosts
from longprefill.orchestrator.scheduler.scheduler import Scheduler
from longprefill.orchestrator.simulator.cluster import Cluster
from longprefill.orchestrator.simulator.engine import Timed, run
from longprefill.orchestrator.simulator.failures import failing_parts, next_failure
from longprefill.orchestrator.simulator.records import FailureRecord, JobRecord, StepRecord
from longprefill.orchestrator.simulator.steps import Arrives
from longprefill.orchestrator.simulator.trace import Request
from longprefill.orchestrator.simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Everything that happened."""

    policy: str
    jobs: tuple[JobRecord, ...]
    steps: tuple[StepRecord, ...]
    decisions: tuple[tuple[float, Decision], ...]
    """Each with its time."""
    decision_s: tuple[float, ...]
    """CPU seconds of every decision: the one thing here that differs from run to run."""
    failures: tuple[FailureRecord, ...]
    num_units: int
    end_s: float
    lost_s: float
    """Unit-seconds of steps that a failure ended, and of finished steps that had to be run again."""


def replay(requests: Sequence[Request], cluster: Cluster, make_costs: Callable[[], StepCosts]) -> Replay:
    """Replays a trace under the cluster's policy.

    Raises:
        UserError: settings that the scheduler or the costs refuse.
    """
    costs = make_costs()
    scheduler = Scheduler(cluster.scheduler, cluster.fleet, costs)
    world = World(requests, cluster, scheduler, costs)
    first: list[Timed[World]] = [Timed(requests[0].arrival_s, Arrives(0))]
    first += [next_failure(world, part, 0.0) for part in failing_parts(cluster)]
    run(world, first)
    assert not world.num_open, f"{world.num_open} jobs never ended"
    return Replay(
        policy=cluster.scheduler.policy,
        jobs=tuple(world.jobs),
        steps=tuple(world.steps),
        decisions=tuple(world.decisions),
        decision_s=tuple(world.decision_s),
        failures=tuple(world.failures),
        num_units=cluster.fleet.num_units,
        end_s=max((step.end_s for step in world.steps), default=requests[-1].arrival_s),
        lost_s=world.lost_s,
    )
