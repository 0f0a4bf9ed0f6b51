"""Worker spans as a Chrome trace (chrome://tracing, Perfetto): a rank is a process, a kind of span is a thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from longprefill.workers.spec import WorkerStats

THREADS = {"host": 0, "layer": 1, "kernel": 2, "collective": 3, "wait": 4}


def write_chrome_trace(path: str | Path, stats: Mapping[str, WorkerStats]) -> None:
    """Writes one JSON object; `stats` by worker label, prefill ranks first. Times in microseconds from the first
    span."""
    starts = [span[2] for worker in stats.values() for span in worker.spans]
    origin = min(starts, default=0.0)
    events: list[dict[str, object]] = []
    for pid, (label, worker) in enumerate(stats.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}})
        for name, tid in THREADS.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        for name, category, start_us, duration_us, layer, job in worker.spans:
            arguments = {key: value for key, value in (("layer", layer), ("job", job)) if value >= 0}
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": category,
                    "pid": pid,
                    "tid": THREADS[category],
                    "ts": round(start_us - origin, 1),
                    "dur": round(duration_us, 1),
                    "args": arguments,
                }
            )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
