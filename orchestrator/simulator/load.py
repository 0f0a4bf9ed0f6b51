"""From a trace and a cluster to a replay at a wanted load: rates that are missing, or arrivals, are scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from longprefill.orchestrator.scheduler.jobs import StepCosts
from longprefill.orchestrator.simulator.cluster import Cluster, ClusterError
from longprefill.orchestrator.simulator.costs import QuadraticCosts
from longprefill.orchestrator.simulator.subject import counted_costs
from longprefill.orchestrator.simulator.trace import Request, TraceError, span_seconds
from longprefill.partition.layout import Slice

DEFAULT_LOAD = 0.9


def prepare(
    requests: Sequence[Request], cluster: Cluster, load: float | None
) -> tuple[tuple[Request, ...], Callable[[], StepCosts]]:
    """The requests to replay and the costs to replay them with.

    Load is the unit-seconds that all requests take alone over what all units have between the first arrival and the
    last. Where [costs] names no rate, the rate is chosen for the load (0.9 when none is given); otherwise arrivals are
    moved together or apart, and left alone when no load is given.

    Raises:
        TraceError: a load cannot be had from arrivals that are all at once.
        ClusterError: a load that is not positive, or costs that do not exist.
    """
    if load is not None and not 0 < load < float("inf"):
        raise ClusterError(f"--load {load}: use a positive number")
    span_s = span_seconds(requests)
    if span_s <= 0 and (load is not None or _needs_rate(cluster)):
        raise TraceError("all requests arrive at once: a load needs arrivals that are apart, use a longer trace")
    if _needs_rate(cluster):
        unscaled = QuadraticCosts(work_per_s=1.0, scale_tokens=cluster.costs.scale_tokens)
        work = sum(unscaled.work(request.input_tokens) for request in requests)
        per_s = work / ((load or DEFAULT_LOAD) * span_s * cluster.num_devices)
        scale = cluster.costs.scale_tokens
        return tuple(requests), lambda: QuadraticCosts(work_per_s=per_s, scale_tokens=scale)
    make_costs = costs_of(cluster, max(request.input_tokens for request in requests))
    if load is None:
        return tuple(requests), make_costs
    factor = offered_load(requests, cluster, make_costs()) / load
    moved = tuple(replace(request, arrival_s=request.arrival_s * factor) for request in requests)
    return moved, make_costs


def offered_load(requests: Sequence[Request], cluster: Cluster, costs: StepCosts) -> float:
    """Unit-seconds of all requests, alone, over unit-seconds between the first arrival and the last."""
    mesh = cluster.fleet.mesh(1)
    seconds = sum(
        costs.step_seconds((Slice(job=0, start=0, end=request.input_tokens),), "zigzag", mesh) for request in requests
    )
    return seconds / (span_seconds(requests) * cluster.fleet.num_units)


def costs_of(cluster: Cluster, longest_tokens: int) -> Callable[[], StepCosts]:
    """The costs that a cluster names, ready for prompts up to a length; a formula needs its rate."""
    settings = cluster.costs
    if settings.kind == "quadratic":
        per_s = settings.work_per_s
        if per_s is None:
            raise ClusterError("[costs] kind='quadratic' without work_per_s: give a rate, or replay a trace at a load")
        return lambda: QuadraticCosts(work_per_s=per_s, scale_tokens=settings.scale_tokens)
    costs, fleet, scheduler = counted_costs(cluster)(), cluster.fleet, cluster.scheduler
    degrees = [1 << power for power in range(min(scheduler.max_degree, fleet.num_units).bit_length())]
    costs.warm([fleet.mesh(degree) for degree in degrees], longest_tokens, pack_tokens=scheduler.pack_tokens)
    return lambda: costs


def _needs_rate(cluster: Cluster) -> bool:
    return cluster.costs.kind == "quadratic" and cluster.costs.work_per_s is None
