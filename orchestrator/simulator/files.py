"""Files of replays and sweeps: JSON, CSV, Chrome traces. Equal inputs give equal bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from longprefill.orchestrator.simulator.replay import Replay

DIGITS = 9
"""Significant digits in files: more would show nothing but rounding."""


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """One JSON object, indented, keys in the order given."""
    path.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """One line a row, the columns of the first row; nested values are left out."""
    columns = [name for name, value in rows[0].items() if not isinstance(value, list | tuple | dict)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: rounded(row[name]) for name in columns})
    path.write_text(text.getvalue(), encoding="utf-8")


def job_rows(replay: Replay) -> list[dict[str, object]]:
    """One row a job: what happened to it."""
    return [
        {
            "policy": replay.policy,
            "job": job.id,
            "tokens": job.num_tokens,
            "arrival_s": job.arrival_s,
            "alone_s": job.alone_s,
            "queue_wait_s": job.first_step_s - job.arrival_s,
            "ttft_s": job.ttft_s,
            "slowdown": job.slowdown,
            "hit_tokens": job.hit_tokens,
            "steps": job.num_steps,
            "preemptions": job.num_preemptions,
            "prefilled_again": job.num_restarts,
            "handed_again": job.num_handed_again,
            "refusal": job.refusal,
            "failure": job.failure,
        }
        for job in replay.jobs
    ]


def write_chrome_trace(path: Path, replays: Sequence[Replay]) -> None:
    """A process a policy, a thread a unit, a span a step; arrows follow a job from step to step. What is down has a
    span on the thread of each of its units, and of its decode workers, whose threads follow those of the units."""
    events: list[dict[str, object]] = []
    for pid, replay in enumerate(replays):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": replay.policy}})
        last: dict[int, bool] = {}
        for step in replay.steps:
            arguments = {
                "jobs": list(step.jobs),
                "tokens": [list(span) for span in step.spans],
                "units": step.num_units,
                "estimate_s": step.estimate_s,
                "reason": step.reason,
            }
            name = f"job {step.jobs[0]}" + (f" + {len(step.jobs) - 1}" if len(step.jobs) > 1 else "")
            start_us, end_us = step.start_s * 1e6, step.end_s * 1e6
            place: dict[str, object] = {"pid": pid, "tid": step.unit}
            events.append(
                {
                    "ph": "X",
                    "name": name + (" (lost)" if step.is_lost else ""),
                    "cat": "step",
                    "ts": start_us,
                    "dur": end_us - start_us,
                    "args": arguments,
                }
                | place
            )
            for job in step.jobs:
                flow: dict[str, object] = {"name": "job", "cat": "job", "id": f"{pid}.{job}", "bp": "e", "ts": start_us}
                events.append({"ph": "t" if last.get(job) else "s"} | flow | place)
                last[job] = True
        events += _failure_spans(pid, replay)
    path.write_text(json.dumps(rounded({"traceEvents": events, "displayTimeUnit": "ms"})), encoding="utf-8")


def _failure_spans(pid: int, replay: Replay) -> list[dict[str, object]]:
    """What is down already stays so: a further failure's span begins where that ends."""
    events: list[dict[str, object]] = []
    until_s: dict[int, float] = {}
    for failure in replay.failures:
        cost = {
            "lost_steps": failure.num_lost_steps,
            "prefilled_again": failure.num_restarted,
            "handed_again": failure.num_handed_again,
        }
        workers = {replay.num_units + worker: f"decode worker {worker}" for worker in failure.workers}
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}}
            for thread, name in workers.items()
        ]
        for thread in (*failure.units, *workers):
            start_s = max(failure.at_s, until_s.get(thread, 0.0))
            until_s[thread] = failure.until_s
            events.append(
                {
                    "ph": "X",
                    "name": f"{failure.kind} {failure.number} is down",
                    "cat": "failure",
                    "ts": start_s * 1e6,
                    "dur": (failure.until_s - start_s) * 1e6,
                    "args": cost,
                    "pid": pid,
                    "tid": thread,
                }
            )
    return events


def write_decisions(path: Path, replays: Sequence[Replay]) -> None:
    """A JSON object a line: every admission, refusal and step as it was decided, with its estimates, what finished
    steps had taught, and the reason."""
    with path.open("w", encoding="utf-8") as file:
        for replay in replays:
            for at_s, decision in replay.decisions:
                line = {"policy": replay.policy, "at_s": at_s, "kind": decision.kind, **asdict(decision)}
                file.write(json.dumps(rounded(line)) + "\n")


def rounded(value: object) -> object:
    """The value with its fractions cut to DIGITS significant digits; what is not finite becomes null."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
