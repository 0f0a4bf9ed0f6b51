"""What the journal's tables are, and how their rows become data. No pickles: JSON and numbers only.

jobs     one row a job; `number` orders them and is what scheduler and workers know a job by, `id` is what owners know
samples  one row a sample of a job: how many tokens it has, its text so far, how it ended
tokens   every sampled token, by the cursor that its stream is read with
events   what happened to a job, by number
meta     schema version and epoch
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from longprefill.orchestrator.job import JobRequest, JobState, JobTimings, SampleView, TokenRecord

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    request TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    idempotency_key TEXT,
    prompt_tokens INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    created_at REAL NOT NULL,
    state_at REAL NOT NULL,
    started_at REAL,
    first_token_at REAL,
    finished_at REAL,
    position INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    num_steps INTEGER NOT NULL DEFAULT 0,
    num_preemptions INTEGER NOT NULL DEFAULT 0,
    num_attempts INTEGER NOT NULL DEFAULT 0,
    num_failures INTEGER NOT NULL DEFAULT 0,
    num_tokens INTEGER NOT NULL DEFAULT 0,
    num_events INTEGER NOT NULL DEFAULT 0,
    queue_s REAL NOT NULL DEFAULT 0,
    prefill_s REAL NOT NULL DEFAULT 0,
    transfer_s REAL NOT NULL DEFAULT 0,
    first_decode_s REAL NOT NULL DEFAULT 0,
    group_name TEXT,
    decode_worker TEXT,
    snapshot TEXT,
    snapshot_position INTEGER NOT NULL DEFAULT 0,
    report TEXT
);
CREATE UNIQUE INDEX jobs_by_key ON jobs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_tenant ON jobs (tenant, number);
CREATE TABLE samples (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    sample INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    text TEXT NOT NULL,
    finish_reason TEXT,
    PRIMARY KEY (job, sample)
) WITHOUT ROWID;
CREATE TABLE tokens (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    cursor INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    place INTEGER NOT NULL,
    token INTEGER NOT NULL,
    text TEXT NOT NULL,
    logprob REAL,
    top_logprobs TEXT,
    finish_reason TEXT,
    PRIMARY KEY (job, cursor)
) WITHOUT ROWID;
CREATE TABLE events (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
"""

PHASE_COLUMNS: Mapping[JobState, str] = {
    JobState.QUEUED: "queue_s",
    JobState.PREFILLING: "prefill_s",
    JobState.HANDING_OFF: "transfer_s",
    JobState.GENERATING: "first_decode_s",
}
"""Where the time in a state goes, up to the first token: the four add up to the time to first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A row of `jobs`. `_s` are seconds, `_at` seconds since the epoch."""

    number: int
    id: str
    tenant: str
    request: JobRequest
    fingerprint: str
    """Of request and prompt: what an idempotency key stands for."""
    idempotency_key: str | None
    prompt_tokens: int
    state: JobState
    reason: str | None
    created_at: float
    state_at: float
    started_at: float | None
    first_token_at: float | None
    finished_at: float | None
    position: int
    cached_tokens: int
    num_steps: int
    num_preemptions: int
    num_attempts: int
    num_failures: int
    """Attempts that a group or worker failed."""
    num_tokens: int
    """Generated, of all samples: the last cursor."""
    num_events: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_decode_s: float
    group_name: str | None
    decode_worker: str | None
    snapshot: str | None
    snapshot_position: int
    report: Mapping[str, Any] | None

    def timings(self, now: float) -> JobTimings:
        """Seconds by phase; the phase that the job is in counts up to now."""
        seconds = {name: getattr(self, name) for name in PHASE_COLUMNS.values()}
        current = PHASE_COLUMNS.get(self.state)
        if current is not None and self.first_token_at is None:
            seconds[current] += max(now - self.state_at, 0.0)
        return JobTimings(
            queue_s=seconds["queue_s"],
            prefill_s=seconds["prefill_s"] or None,
            transfer_s=seconds["transfer_s"] or None,
            first_decode_s=seconds["first_decode_s"] or None,
            ttft_s=None if self.first_token_at is None else self.first_token_at - self.created_at,
            total_s=None if self.finished_at is None else self.finished_at - self.created_at,
        )


JOB_COLUMNS = tuple(item.name for item in fields(JobRow))


def job_row(values: sqlite3.Row) -> JobRow:
    row = dict(values)
    row["request"] = request_of(row["request"])
    row["state"] = JobState(row["state"])
    row["report"] = None if row["report"] is None else json.loads(row["report"])
    return JobRow(**row)


def request_text(request: JobRequest) -> str:
    """A request as JSON; equal requests give equal texts."""
    return json.dumps(asdict(request), sort_keys=True, separators=(",", ":"))


def request_of(text: str) -> JobRequest:
    values = json.loads(text)
    for name in ("stop", "stop_token_ids"):
        values[name] = tuple(values[name])
    return JobRequest(**values)


def token_row(job: int, cursor: int, record: TokenRecord) -> tuple[Any, ...]:
    top = json.dumps(record.top_logprobs, separators=(",", ":")) if record.top_logprobs else None
    return (
        job,
        cursor,
        record.sample,
        record.index,
        record.token,
        record.text,
        record.logprob,
        top,
        record.finish_reason,
    )


def token_record(row: sqlite3.Row) -> TokenRecord:
    top = () if row["top_logprobs"] is None else tuple((int(i), float(p)) for i, p in json.loads(row["top_logprobs"]))
    return TokenRecord(
        sample=row["sample"],
        index=row["place"],
        token=row["token"],
        text=row["text"],
        logprob=row["logprob"],
        top_logprobs=top,
        finish_reason=row["finish_reason"],
    )


def sample_view(row: sqlite3.Row) -> SampleView:
    return SampleView(text=row["text"], num_tokens=row["num_tokens"], finish_reason=row["finish_reason"])
