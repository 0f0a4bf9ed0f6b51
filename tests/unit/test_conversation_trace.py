"""What docs/benchmarks/2026-11-30-scheduling.md claims of the guard; the published trace is not in the repository."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from longprefill.orchestrator.simulator.cluster import Cluster, read_cluster
from longprefill.orchestrator.simulator.generate import TraceRecipe, generate_trace
from longprefill.orchestrator.simulator.load import prepare
from longprefill.orchestrator.simulator.metrics import Metrics, metrics
from longprefill.orchestrator.simulator.replay import replay
from longprefill.orchestrator.simulator.trace import Request, read_trace

REPOSITORY = Path(__file__).resolve().parents[2]
TRACE = REPOSITORY.parent / "shared/data/traces/conversation_trace.jsonl"
MEAN, TAIL = 0.33, 1.6
"""Of first come, first served: the mean TTFT, and the p99 slowdown of documents of 64 K and more."""
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason="../shared is not here")


def rows(trace: Sequence[Request], policies: tuple[str, ...]) -> dict[str, Metrics]:
    """One group, work T (1 + T / 131072), borders every 8 K, load 0.9."""
    found: dict[str, Metrics] = {}
    prepared, make_costs = prepare(trace, Cluster(), 0.9)
    for policy in policies:
        cluster = replace(Cluster(), scheduler=replace(Cluster().scheduler, policy=policy))
        found[policy] = metrics(replay(prepared, cluster, make_costs), cluster)
    return found


@needs_trace
@pytest.mark.timeout(400)
def test_the_published_trace() -> None:
    found = rows(read_trace(TRACE), ("guarded", "fcfs"))
    assert found["guarded"].jobs == 12_031
    assert found["guarded"].mean_ttft_s <= MEAN * found["fcfs"].mean_ttft_s
    assert found["guarded"].p99_slowdown_64k <= TAIL * found["fcfs"].p99_slowdown_64k


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "recipe",
    [
        TraceRecipe(num_requests=2500, seed=31, tail=2.5, short_share=0.95, short_tokens=7000, most_tokens=131_072),
        TraceRecipe(
            num_requests=2500, seed=32, tail=2.0, burstiness=4, short_share=0.93, short_tokens=6000, most_tokens=131_072
        ),
        TraceRecipe(
            num_requests=2500, seed=33, tail=3.0, burstiness=10, short_share=0.9, short_tokens=8000, most_tokens=131_072
        ),
    ],
)
def test_traces_that_nothing_was_tuned_on(recipe: TraceRecipe) -> None:
    """Within a quarter of both ratios."""
    found = rows(generate_trace(recipe), ("guarded", "fcfs"))
    assert found["guarded"].mean_ttft_s <= 1.25 * MEAN * found["fcfs"].mean_ttft_s
    assert found["guarded"].p99_slowdown_64k <= 1.25 * TAIL * found["fcfs"].p99_slowdown_64k


@needs_trace
def test_a_thousand_devices() -> None:
    """The file of the benchmark, on the trace's beginning."""
    cluster = read_cluster(REPOSITORY / "examples/simulate/1024-devices.toml")
    assert (cluster.num_devices, cluster.fleet.num_units) == (1024, 128)
    prepared, make_costs = prepare(read_trace(TRACE, most=300), cluster, 0.9)
    row = metrics(replay(prepared, cluster, make_costs), cluster)
    assert (row.jobs, row.refused) == (300, 0)
