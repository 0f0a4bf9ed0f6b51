"""The figures of a replay. Percentiles are interpolated; jobs that were refused or given up count there only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from longprefill.orchestrator.simulator.cluster import Cluster
from longprefill.orchestrator.simulator.records import JobRecord
from longprefill.orchestrator.simulator.replay import Replay

DOCUMENT_TOKENS = 65536
BUCKETS = (0, 4096, 16384, 32768, 65536, 131_072, 262_144, 524_288, 1_048_576)
"""Lower ends of the length buckets."""
DECISION_STEP_S = 0.0005
"""Decision times, the one figure that differs from run to run, are told up to the next multiple of this: fine enough
for a bound of 1 ms, and equal replays on a quiet machine give equal reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMetrics:
    """TTFT and slowdown of one length bucket."""

    least_tokens: int
    num_jobs: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    slowdown_p50: float
    slowdown_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One policy's row."""

    policy: str
    jobs: int
    refused: int
    mean_ttft_s: float
    p50: float
    """Of TTFT, seconds; so p90, p99."""
    p90: float
    p99: float
    mean_slowdown: float
    p99_slowdown: float
    p99_slowdown_64k: float
    """Of jobs of 65,536 tokens and more; 0 when there is none."""
    max_slowdown: float
    mean_queue_wait_s: float
    """From arrival to the first step."""
    goodput_tokens_per_s: float
    """Prompt tokens of jobs that met the objective."""
    slo_attainment: float
    tokens_per_s_per_device: float
    device_s_per_token: float
    utilisation: float
    """Unit-seconds in steps over all units and the time from the first arrival to the last step."""
    hit_share: float
    """Prompt tokens that were resumed from a cache."""
    page_hit_share: float
    """Prompt tokens whose pages were cached, with or without a state to resume from."""
    preemptions: int
    lost_s: float
    """Unit-seconds of steps that failures ended, and of finished steps whose caches are lost."""
    failures: int
    unit_failures: int
    node_failures: int
    decode_failures: int
    prefilled_again: int
    """Jobs, each time that a failure took all their caches."""
    handed_again: int
    """Jobs, each time that the decode worker they were sent to failed."""
    given_up: int
    """Jobs that were lost too often; they count nowhere else."""
    decisions: int
    decision_p99_s: float
    """CPU seconds that 99 % of the decisions stayed under, up to the next DECISION_STEP_S."""
    estimate_error: float
    """Mean of |estimate / actual - 1| over all steps."""
    buckets: tuple[BucketMetrics, ...]


def metrics(replay: Replay, cluster: Cluster) -> Metrics:
    """The figures of a replay on its cluster."""
    done = [job for job in replay.jobs if job.is_served]
    kinds = Counter(failure.kind for failure in replay.failures)
    tokens = np.array([job.num_tokens for job in done], dtype=np.int64)
    ttft_s = np.array([job.ttft_s for job in done])
    slowdown = np.array([job.slowdown for job in done])
    is_document = tokens >= DOCUMENT_TOKENS
    alone_s = np.array([job.alone_s for job in done])
    is_met = ttft_s <= cluster.slo.base_s + cluster.slo.stretch * alone_s
    first_s = min((job.arrival_s for job in replay.jobs), default=0.0)
    span_s = max(replay.end_s - first_s, 1e-9)
    busy_s = sum((step.end_s - step.start_s) * step.num_units for step in replay.steps)
    whole = [step for step in replay.steps if not step.is_lost]
    num_tokens = max(int(tokens.sum()), 1)
    return Metrics(
        policy=replay.policy,
        jobs=len(done),
        refused=sum(bool(job.refusal) for job in replay.jobs),
        mean_ttft_s=_mean(ttft_s),
        p50=_percentile(ttft_s, 50),
        p90=_percentile(ttft_s, 90),
        p99=_percentile(ttft_s, 99),
        mean_slowdown=_mean(slowdown),
        p99_slowdown=_percentile(slowdown, 99),
        p99_slowdown_64k=_percentile(slowdown[is_document], 99),
        max_slowdown=_percentile(slowdown, 100),
        mean_queue_wait_s=_mean(np.array([job.first_step_s - job.arrival_s for job in done])),
        goodput_tokens_per_s=int(tokens[is_met].sum()) / span_s,
        slo_attainment=_mean(is_met.astype(float)),
        tokens_per_s_per_device=num_tokens / span_s / cluster.num_devices,
        device_s_per_token=busy_s * cluster.fleet.devices_per_unit / num_tokens,
        utilisation=busy_s / (span_s * cluster.fleet.num_units),
        hit_share=sum(job.hit_tokens for job in done) / num_tokens,
        page_hit_share=sum(job.page_hit_tokens for job in done) / num_tokens,
        preemptions=sum(job.num_preemptions for job in done),
        lost_s=replay.lost_s,
        failures=len(replay.failures),
        unit_failures=kinds["unit"],
        node_failures=kinds["node"],
        decode_failures=kinds["decode"],
        prefilled_again=sum(job.num_restarts for job in replay.jobs),
        handed_again=sum(job.num_handed_again for job in replay.jobs),
        given_up=sum(bool(job.failure) for job in replay.jobs),
        decisions=len(replay.decision_s),
        decision_p99_s=decision_p99_s(replay.decision_s),
        estimate_error=_mean(np.array([abs(step.estimate_s / (step.end_s - step.start_s) - 1) for step in whole])),
        buckets=_buckets(done),
    )


def decision_p99_s(seconds: Sequence[float]) -> float:
    """The 99th percentile, up to the next DECISION_STEP_S; 0 without a decision."""
    return DECISION_STEP_S * ceil(_percentile(np.array(seconds), 99) / DECISION_STEP_S)


def _buckets(jobs: Sequence[JobRecord]) -> tuple[BucketMetrics, ...]:
    rows: list[BucketMetrics] = []
    for place, least in enumerate(BUCKETS):
        beyond = BUCKETS[place + 1] if place + 1 < len(BUCKETS) else None
        chosen = [job for job in jobs if job.num_tokens >= least and (beyond is None or job.num_tokens < beyond)]
        if not chosen:
            continue
        ttft_s = np.array([job.ttft_s for job in chosen])
        slowdown = np.array([job.slowdown for job in chosen])
        rows.append(
            BucketMetrics(
                least_tokens=least,
                num_jobs=len(chosen),
                ttft_p50_s=_percentile(ttft_s, 50),
                ttft_p90_s=_percentile(ttft_s, 90),
                ttft_p99_s=_percentile(ttft_s, 99),
                slowdown_p50=_percentile(slowdown, 50),
                slowdown_p99=_percentile(slowdown, 99),
            )
        )
    return tuple(rows)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
