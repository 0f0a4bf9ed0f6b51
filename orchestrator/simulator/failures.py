"""Units, whole machines and decode workers fail and come back, at times that are drawn as they happen.

What survives is the scheduler's to say (`Scheduler.survives`). Jobs that lose finished steps begin again, from what is
cached of them; those that lose their decode worker as `handing` has it. A job that has lost too much is given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from longprefill.orchestrator.simulator.cluster import Cluster
from longprefill.orchestrator.simulator.engine import Event, Timed
from longprefill.orchestrator.simulator.handing import fill_slots, prefill_again, send_again
from longprefill.orchestrator.simulator.records import FailureRecord
from longprefill.orchestrator.simulator.steps import start_steps
from longprefill.orchestrator.simulator.world import World


class Part(NamedTuple):
    """What fails at once."""

    kind: str
    """unit, node or decode."""
    number: int
    mtbf_s: float
    units: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()


def failing_parts(cluster: Cluster) -> list[Part]:
    """Everything that can fail."""
    failures, num_workers = cluster.failures, cluster.decode.num_workers
    parts = [Part("unit", unit, failures.unit_mtbf_s, units=(unit,)) for unit in range(cluster.fleet.num_units)]
    nodes = cluster.node_units
    for number, units in enumerate(nodes):
        workers = tuple(range(number, num_workers, len(nodes))) if cluster.decode.on_nodes else ()
        parts.append(Part("node", number, failures.node_mtbf_s, units=units, workers=workers))
    parts += [Part("decode", worker, failures.decode_mtbf_s, workers=(worker,)) for worker in range(num_workers)]
    return [part for part in parts if part.mtbf_s < inf]


def next_failure(world: World, part: Part, now: float) -> Timed[World]:
    return Timed(now + float(world.random.exponential(part.mtbf_s)), PartFails(part))


class PartFails(Event[World]):
    def __init__(self, part: Part) -> None:
        self.part = part

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        part = self.part
        if not world.num_open:
            return []
        if world.dead_units.keys() >= set(part.units) and world.dead_workers.keys() >= set(part.workers):
            return [next_failure(world, part, now)]  # what is down already does not fail
        until_s = now + world.cluster.failures.repair_s
        world.dead_units |= dict.fromkeys(part.units, until_s)
        world.dead_workers |= dict.fromkeys(part.workers, until_s)
        for worker in part.workers:
            world.free_slots[worker] = 0
        num_restarts, num_handed_again = world.num_restarts, world.num_handed_again
        num_lost_steps = _lose_units(world, part, now) if part.units else 0
        events = _lose_workers(world, part, now) if part.workers else []
        world.failures.append(
            FailureRecord(
                kind=part.kind,
                number=part.number,
                units=part.units,
                workers=part.workers,
                at_s=now,
                until_s=until_s,
                num_lost_steps=num_lost_steps,
                num_restarted=world.num_restarts - num_restarts,
                num_handed_again=world.num_handed_again - num_handed_again,
            )
        )
        return [Timed(until_s, PartReturns(part)), *events, *start_steps(world, now)]


class PartReturns(Event[World]):
    """What has failed works again, empty, unless it has failed once more with something else."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        for unit in self.part.units:
            if world.dead_units.get(unit, inf) <= now:
                del world.dead_units[unit]
                world.scheduler.unit_back(unit)
        for worker in self.part.workers:
            if world.dead_workers.get(worker, inf) <= now:
                del world.dead_workers[worker]
                world.free_slots[worker] = world.cluster.decode.slots_per_worker
        return [next_failure(world, self.part, now), *fill_slots(world, now), *start_steps(world, now)]


def _lose_units(world: World, part: Part, now: float) -> int:
    """Steps on the units end, and what lay there and nowhere else is lost; how many steps."""
    scheduler, units = world.scheduler, part.units
    loss = scheduler.units_lost(units, now)
    if world.cache is not None:
        if part.kind == "node":
            world.cache.drop(units)
        elif not world.cluster.fleet.is_recoverable:
            world.cache.drop_states(units)
    for job, position in loss.restarted:
        world.begins_again(job, position)
    stepping: list[int] = []
    for step in loss.lost_steps:
        decision = world.running.pop(step)
        world.step_lost(decision, now)
        stepping += (piece.job for piece in decision.slices)
    for job in stepping:
        if world.jobs[job].num_losses >= world.cluster.failures.most_losses:
            scheduler.cancel(job)
            world.is_given_up(job, now)
    for job, handed in sorted(world.handed.items()):
        if not handed.is_decoding and not scheduler.survives(handed.block, units):
            prefill_again(world, job, now)
    return len(loss.lost_steps)


def _lose_workers(world: World, part: Part, now: float) -> list[Timed[World]]:
    """What the workers held is lost; what was on its way to them goes elsewhere."""
    events: list[Timed[World]] = []
    for job, handed in sorted(world.handed.items()):
        if handed.worker in part.workers:
            if handed.is_decoding:
                prefill_again(world, job, now)
            else:
                events += send_again(world, job, now)
    return events
