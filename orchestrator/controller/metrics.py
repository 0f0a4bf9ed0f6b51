"""What the service counts, as Prometheus text: base units, totals from this controller's start."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from longprefill.orchestrator.job import JobState, JobTimings
from longprefill.orchestrator.journal.schema import JobRow

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)
STAGES = ("queued", "prefilling", "handing_off", "generating")
PHASES = ("queue", "prefill", "transfer", "first_decode")
MAX_TENANTS = 200
"""Tenants beyond are counted together: labels must not grow without a bound."""


class Metrics:
    """One object a controller."""

    def __init__(self, epoch: int, model: str) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._build(epoch, model)

    def _build(self, epoch: int, model: str) -> None:
        registry = self.registry
        info = Gauge("longprefill_info", "The model that is served.", ["model"], registry=registry)
        info.labels(model).set(1)
        Gauge("longprefill_controller_epoch", "Starts of the controller on this journal.", registry=registry).set(epoch)
        self.ttft = Histogram(
            "longprefill_ttft_seconds", "From acceptance to the first token.", buckets=SECONDS, registry=registry
        )
        self.phase = Histogram(
            "longprefill_ttft_phase_seconds",
            "Parts of the time to first token; they add up to it.",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self.step = Histogram("longprefill_step_seconds", "Prefill steps.", buckets=SECONDS, registry=registry)
        self.tokens = Counter(
            "longprefill_tokens_total", "By kind: prompt, cached, prefilled, generated.", ["kind"], registry=registry
        )
        self.comm_bytes = Counter(
            "longprefill_comm_bytes_total", "Sent by ranks, by operation.", ["operation"], registry=registry
        )
        self.handoff_bytes = Counter(
            "longprefill_handoff_bytes_total", "Pages and states handed over.", registry=registry
        )
        self.handoff_exposed = Histogram(
            "longprefill_handoff_exposed_seconds",
            "Hand-off that prefill does not hide.",
            buckets=SECONDS,
            registry=registry,
        )
        self.jobs = Counter("longprefill_jobs_total", "Ended jobs.", ["tenant", "outcome"], registry=registry)
        self.submitted = Counter("longprefill_jobs_submitted_total", "Accepted jobs.", ["tenant"], registry=registry)
        self.refused = Counter("longprefill_jobs_refused_total", "By reason.", ["reason"], registry=registry)
        self.failures = Counter(
            "longprefill_failures_total",
            "Groups, workers, hand-offs and jobs that failed.",
            ["reason"],
            registry=registry,
        )
        self.preemptions = Counter(
            "longprefill_preemptions_total", "Jobs that gave way at a step border.", registry=registry
        )
        self.restarts = Counter("longprefill_job_restarts_total", "Jobs queued again after a loss.", registry=registry)
        self.estimate = Histogram(
            "longprefill_step_estimate_ratio",
            "Estimated over measured seconds of a step.",
            buckets=RATIOS,
            registry=registry,
        )
        self.estimate_error = Gauge(
            "longprefill_step_estimate_error",
            "Mean of |measured / estimated - 1| over the last steps.",
            registry=registry,
        )
        self.stage = Gauge("longprefill_stage_jobs", "Unfinished jobs by stage.", ["stage"], registry=registry)
        self.group_up = Gauge("longprefill_group_up", "1: ready.", ["group", "role"], registry=registry)
        self.group_tokens = Gauge(
            "longprefill_group_used_tokens", "Cache tokens that are held.", ["group"], registry=registry
        )
        self.group_max_tokens = Gauge("longprefill_group_max_tokens", "Cache capacity.", ["group"], registry=registry)
        self.group_rss = Gauge(
            "longprefill_group_resident_bytes", "Memory of a group's processes.", ["group"], registry=registry
        )
        self.group_restarts = Gauge(
            "longprefill_group_restarts", "Since the controller's start.", ["group"], registry=registry
        )
        self.journal_bytes = Gauge("longprefill_journal_bytes", "The journal's file.", registry=registry)
        self.overhead = Histogram(
            "longprefill_step_control_seconds",
            "A step as the controller sees it less the time its slowest rank measured.",
            buckets=SECONDS,
            registry=registry,
        )

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def tenant(self, name: str) -> str:
        """The tenant's label."""
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return "other"
        self._tenants.add(name)
        return name

    def first_token(self, timings: JobTimings) -> None:
        if timings.ttft_s is not None:
            self.ttft.observe(timings.ttft_s)
        for phase in PHASES:
            self.phase.labels(phase).observe(getattr(timings, f"{phase}_s") or 0.0)

    def ended(self, row: JobRow) -> None:
        self.jobs.labels(self.tenant(row.tenant), row.state.value).inc()
        if row.state is JobState.FAILED:
            self.failures.labels("job").inc()

    def stages(self, rows: Iterable[JobRow]) -> None:
        counts: dict[str, int] = dict.fromkeys(STAGES, 0)
        for row in rows:
            counts[row.state.value] += 1
        for stage, count in counts.items():
            self.stage.labels(stage).set(count)
