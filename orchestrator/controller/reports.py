"""A job's report, as `longprefill run --json` has it: bytes that its steps sent, imbalance, hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from longprefill.orchestrator.controller.core import Core
from longprefill.orchestrator.controller.live import LiveJob
from longprefill.orchestrator.hosts.contract import HandoffOutcome
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import generate
from longprefill.partition.layout import Slice
from longprefill.partition.work import imbalance
from longprefill.workers.spec import WorkerStats

MAX_STEPS = 512
"""Steps whose imbalance is counted: of more, evenly chosen ones."""


def step_report(before: Mapping[str, Any] | None, stats: Sequence[WorkerStats]) -> dict[str, Any]:
    """The report after one more step: calls and bytes by operation add up, memory peaks."""
    before = before or {}
    comm: dict[str, dict[str, int]] = {name: dict(count) for name, count in before.get("comm", {}).items()}
    calls: dict[str, int] = {}
    for rank in stats:
        for operation, (num_calls, num_bytes, _) in rank.comm.items():
            entry = comm.setdefault(operation, {"calls": 0, "bytes": 0})
            entry["bytes"] += num_bytes
            calls[operation] = max(calls.get(operation, 0), num_calls)
    for operation, num_calls in calls.items():
        comm[operation]["calls"] += num_calls
    peaks = before.get("peak_rss_bytes", [])
    ranks = [rank.peak_rss_bytes for rank in stats]
    if len(peaks) == len(ranks):
        ranks = [max(pair) for pair in zip(peaks, ranks, strict=True)]
    return {**before, "comm": comm, "peak_rss_bytes": ranks}


async def final_report(core: Core, job: LiveJob, handoff: HandoffOutcome | None) -> dict[str, Any]:
    """The report of a job whose prompt is done. Steps of earlier attempts count too: they were run."""
    pool = core.config.prefill[0]
    spans = [
        (event.data["start"], event.data["end"])
        for event in core.journal.events(job.row, limit=1 << 20)
        if event.kind == "step"
    ]
    chosen = spans[:: -(-len(spans) // MAX_STEPS) or 1]
    shape = model_shape(core.model, pool.cluster_settings(core.config.model.dir))
    layouts = [generate(pool.layout, [Slice(job=0, start=start, end=end)], pool.cp) for start, end in chosen]
    counted = await asyncio.to_thread(imbalance, layouts, shape, "all_gather") if layouts else None
    return {
        **(job.row.report or {}),
        "model": {"family": core.model.family, "name": core.config.model.served_name},
        "mesh": {"cp": pool.cp, "tp": pool.tp, "device": pool.device},
        "imbalance": None if counted is None else counted._asdict(),
        "handoff": {
            "bytes": 0 if handoff is None else handoff.num_bytes,
            "seconds": 0.0 if handoff is None else handoff.seconds,
            "exposed_s": 0.0 if handoff is None else handoff.exposed_s,
        },
    }
