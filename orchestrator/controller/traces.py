"""Spans of jobs on disk, and the Chrome trace that comes of them: one line of JSON a step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longprefill.orchestrator.chrome_trace import THREADS
from longprefill.orchestrator.job import JobEvent, JobState
from longprefill.workers.spec import WorkerStats

MAX_FILE_BYTES = 64 << 20
"""Of one job: later steps have no spans of their own."""
CONTROLLER_PID = 0


class TraceFiles:
    """One file a job, removed with the job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)

    def add_step(self, job: str, group: str, stats: Sequence[WorkerStats]) -> None:
        """Keeps the spans of one step, by rank."""
        path = self._path(job)
        with contextlib.suppress(OSError):  # a trace that finds no room is no reason to stop
            if not path.exists() or path.stat().st_size < MAX_FILE_BYTES:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"group": group, "ranks": [rank.spans for rank in stats]}) + "\n")

    def remove(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            self._path(job).unlink(missing_ok=True)

    def sweep(self, known: Iterable[str]) -> None:
        """Removes what no known job has left."""
        names = set(known)
        for path in self.directory.iterdir():
            if path.stem not in names:
                path.unlink(missing_ok=True)

    def chrome_trace(self, job: str, events: Sequence[JobEvent], now: float) -> dict[str, Any]:
        """The job's phases and control calls as the controller saw them, and the spans of its ranks; microseconds from
        the first."""
        origin_us = events[0].at * 1e6
        found = [_name(CONTROLLER_PID, "controller"), *_phases(events, origin_us, now), *_steps(events, origin_us)]
        pids: dict[str, int] = {}
        for line in self._lines(job):
            for rank, spans in enumerate(line["ranks"]):
                label = f"{line['group']} rank {rank}"
                if label not in pids:
                    pids[label] = len(pids) + 1
                    found.append(_name(pids[label], label))
                for name, category, start_us, duration_us, layer, _ in spans:
                    arguments = {} if layer < 0 else {"layer": layer}
                    found.append(
                        _span(
                            name, category, pids[label], THREADS[category], start_us - origin_us, duration_us, arguments
                        )
                    )
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def _lines(self, job: str) -> list[dict[str, Any]]:
        path = self._path(job)
        if not path.exists():
            return []
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last one of a killed controller
                lines.append(json.loads(line))
        return lines

    def _path(self, job: str) -> Path:
        return self.directory / f"{job}.jsonl"


def _phases(events: Sequence[JobEvent], origin_us: float, now: float) -> list[dict[str, Any]]:
    states = [event for event in events if event.kind == "state"]
    ends = [event.at for event in states[1:]] + [now]
    return [
        _span(event.data["state"], "phase", CONTROLLER_PID, 0, event.at * 1e6 - origin_us, (end - event.at) * 1e6, {})
        for event, end in zip(states, ends, strict=True)
        if not JobState(event.data["state"]).is_final
    ]


def _steps(events: Sequence[JobEvent], origin_us: float) -> list[dict[str, Any]]:
    """Steps as control calls: what they take beyond the ranks' own spans is the control plane's."""
    return [
        _span(
            f"step {event.data['number']}",
            "step",
            CONTROLLER_PID,
            1,
            (event.at - event.data["seconds"]) * 1e6 - origin_us,
            event.data["seconds"] * 1e6,
            {name: event.data[name] for name in ("start", "end", "group", "rank_seconds")},
        )
        for event in events
        if event.kind == "step" and event.data["seconds"] is not None
    ]


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _span(
    name: str, category: str, pid: int, tid: int, start_us: float, duration_us: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": round(start_us, 1),
        "dur": round(max(duration_us, 0.0), 1),
        "args": arguments,
    }
