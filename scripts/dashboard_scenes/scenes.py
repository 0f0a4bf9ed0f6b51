"""The scenes: `idle`, `running`, `failed`. Times lie relative to now, so that ages look alike whenever it is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longprefill.orchestrator.controller.contract import GroupView
from longprefill.orchestrator.job import JobEstimate, JobState, JobTimings, SampleView
from longprefill.workers.spec import WorkerStats

from .controller import RANKS, SceneController, job_view

RUNNING_JOB = "job-5d0c6b0ce2f14f7a91b3c2d4"
FAILED_JOB = "job-c41f0aa97be2436085d1f3e9"
DONE_JOB = "job-0be1d7a6c35e4d1f8a2b9c07"
GIB = 1 << 30
STEP_TOKENS = 16384
LAYERS = ("kda", "kda", "kda", "dsa", "kda", "kda", "kda", "dsa")


def idle(directory: Path) -> SceneController:
    """All is ready, and what there was has ended."""
    scene = SceneController(directory)
    _cluster(scene)
    _ended(scene)
    return scene


def running(directory: Path) -> SceneController:
    """Two groups at work, a queue behind them, one job being decoded."""
    scene = idle(directory)
    now = time.time()
    _generating(scene, now)
    _prefilling(scene, RUNNING_JOB, now, prompt_tokens=262144, steps=9, group="prefill-0")
    _prefilling(scene, "job-77aa19d05bd34c9e8f00e1b2", now, prompt_tokens=98304, steps=2, group="prefill-1")
    for number, (name, tokens, start_s) in enumerate(
        (("job-a90b3f6d21c84e57bd6d0f13", 65536, 8.4), ("job-f2c3de1406ab4b7a9d55c08e", 524288, 19.2))
    ):
        estimate = JobEstimate(
            start_s=start_s, finish_s=start_s + tokens / 18500, reason=f"{number + 1} jobs before it"
        )
        scene.add(job_view(name, tokens, tenant="search", created_at=now - 6 + number, estimate=estimate))
    scene.groups[0] = replace(scene.groups[0], jobs=(RUNNING_JOB,), used_tokens=262400)
    scene.groups[1] = replace(scene.groups[1], jobs=("job-77aa19d05bd34c9e8f00e1b2",), used_tokens=98560)
    scene.groups[2] = replace(scene.groups[2], jobs=("job-31e8c2b7a90f4d638e17d5a4",), used_tokens=131328)
    return scene


def failed(directory: Path) -> SceneController:
    """A node is gone: its group waits for resources, and a job has failed with it three times."""
    scene = idle(directory)
    now = time.time()
    job = scene.add(job_view(FAILED_JOB, 393216, created_at=now - 95))
    scene.change(FAILED_JOB, JobState.PREFILLING, at=now - 94, group="prefill-1", started_at=now - 94)
    for number in range(5):
        scene.step(FAILED_JOB, STEP_TOKENS, 0.88, at=now - 93 + 0.9 * number)
    job.view = replace(job.view, position=0, num_steps=0, num_attempts=3)
    for number in range(3):
        scene.step(FAILED_JOB, STEP_TOKENS, 0.87, at=now - 40 + 0.9 * number)
    scene.change(
        FAILED_JOB,
        JobState.FAILED,
        at=now - 31,
        reason="its group was lost 3 times: prefill-1 rank 1 ended: node worker-b is gone",
        timings=JobTimings(queue_s=1.2, total_s=64.0),
        report={"comm": _traffic(49152), "peak_rss_bytes": [31 * GIB, 30 * GIB]},
    )
    reason = "needs 2 nodes with CPU 16 and longprefill_prefill 1: 1 has them"
    scene.groups[1] = replace(
        scene.groups[1], state="waiting", reason=reason, nodes=(), rss_bytes=0, heartbeat_age_s=31.0, num_restarts=3
    )
    scene.nodes[1] = {**scene.nodes[1], "is_alive": False, "resources": {}}
    scene.metrics_of.jobs.labels("research", "failed").inc()
    return scene


SCENES: Mapping[str, Callable[[Path], SceneController]] = {"idle": idle, "running": running, "failed": failed}


def _cluster(scene: SceneController) -> None:
    shared: dict[str, Any] = {"state": "ready", "reason": None, "jobs": (), "used_tokens": 0, "num_restarts": 0}
    for number in range(2):
        scene.groups.append(
            GroupView(
                name=f"prefill-{number}", role="prefill", mesh=f"cp {RANKS} x tp 1", nodes=(f"worker-{'ab'[number]}",),
                max_tokens=1048576, rss_bytes=62 * GIB, heartbeat_age_s=0.4, **shared,
            )
        )  # fmt: skip
    scene.groups.append(
        GroupView(
            name="decode-0", role="decode", mesh="cp 1 x tp 1", nodes=("worker-c",), max_tokens=1048576,
            rss_bytes=40 * GIB, heartbeat_age_s=0.2, **shared,
        )
    )  # fmt: skip
    for name, label in (("worker-a", "prefill"), ("worker-b", "prefill"), ("worker-c", "decode")):
        resources = {"CPU": 32.0, "memory": 192.0 * GIB, f"longprefill_{label}": 1.0}
        scene.nodes.append({"name": name, "is_alive": True, "resources": resources})


def _ended(scene: SceneController) -> None:
    """A job that is done, with a trace, and one that was cancelled."""
    now = time.time()
    name, start = DONE_JOB, now - 240
    scene.add(job_view(name, 131072, created_at=start - 0.8, max_new_tokens=512))
    scene.change(name, JobState.PREFILLING, at=start, started_at=start, group="prefill-0")
    at = start
    for _ in range(8):
        scene.step(name, STEP_TOKENS, 0.86, at=at + 0.88)
        scene.traces.add_step(name, "prefill-0", [_spans(at + 0.01, rank) for rank in range(RANKS)])
        at += 0.9
    scene.change(name, JobState.HANDING_OFF, at=at, decode_worker="decode-0")
    scene.change(name, JobState.GENERATING, at=at + 0.11)
    text = "The recurrence is exact for every cut, and the selections agree with one rank. "
    for index in range(60):
        scene.token(name, text[index % len(text)])
    scene.change(
        name,
        JobState.DONE,
        at=at + 9.1,
        samples=(SampleView(text="", num_tokens=512, finish_reason="length"),),
        timings=JobTimings(queue_s=0.8, prefill_s=7.2, transfer_s=0.11, first_decode_s=0.03, ttft_s=8.14, total_s=17.1),
        report=_report(131072),
    )
    scene.add(job_view("job-9d3e55a1c07b4f2f86aa10ce", 32768, tenant="search", created_at=now - 130))
    scene.change("job-9d3e55a1c07b4f2f86aa10ce", JobState.CANCELLED, at=now - 128, reason="cancelled by its owner")
    scene.metrics_of.jobs.labels("research", "done").inc(41)
    scene.metrics_of.jobs.labels("search", "cancelled").inc(2)
    scene.metrics_of.tokens.labels("prefilled").inc(5373952)
    for _ in range(41):
        scene.metrics_of.ttft.observe(8.14)


def _generating(scene: SceneController, now: float) -> None:
    name = "job-31e8c2b7a90f4d638e17d5a4"
    scene.add(job_view(name, 131072, created_at=now - 21))
    scene.change(name, JobState.PREFILLING, at=now - 20, started_at=now - 20, group="prefill-1")
    for number in range(8):
        scene.step(name, STEP_TOKENS, 0.86, at=now - 19 + 0.9 * number)
    scene.change(name, JobState.HANDING_OFF, at=now - 11.8, decode_worker="decode-0")
    timings = JobTimings(queue_s=1.0, prefill_s=8.2, transfer_s=0.12, first_decode_s=0.03, ttft_s=9.35)
    scene.change(name, JobState.GENERATING, at=now - 11.6, timings=timings, report=_report(131072))
    for _ in range(143):
        scene.token(name, "x ")


def _prefilling(scene: SceneController, name: str, now: float, *, prompt_tokens: int, steps: int, group: str) -> None:
    start = now - 0.9 * steps - 0.4
    left_s = (prompt_tokens / STEP_TOKENS - steps) * 0.9
    estimate = JobEstimate(start_s=0.0, finish_s=left_s, reason="deadline nearest")
    scene.add(job_view(name, prompt_tokens, created_at=start - 1.6, estimate=estimate))
    timings = JobTimings(queue_s=1.6, prefill_s=now - start)
    scene.change(name, JobState.PREFILLING, at=start, started_at=start, group=group, timings=timings)
    for number in range(steps):
        scene.step(name, STEP_TOKENS, 0.86, at=start + 0.9 * (number + 1))
    job = scene.jobs[name]
    job.view = replace(job.view, report={"comm": _traffic(steps * STEP_TOKENS), "peak_rss_bytes": [31 * GIB, 30 * GIB]})


def _traffic(tokens: int) -> dict[str, dict[str, int]]:
    steps = tokens // STEP_TOKENS
    return {
        "cache_rows": {"calls": 2 * steps, "bytes": 1576 * tokens},
        "kda_summaries": {"calls": 6 * steps, "bytes": 6 * steps * (25 << 20)},
        "kda_halo": {"calls": 6 * steps, "bytes": 6 * steps * 49152},
        "boundary_state": {"calls": steps, "bytes": steps * (13 << 20)},
    }


def _report(tokens: int) -> dict[str, Any]:
    return {
        "comm": _traffic(tokens),
        "imbalance": {"indexer": 1.002, "attention": 1.001, "kda": 1.0, "total": 1.001},
        "handoff": {"bytes": 788 * tokens * 2, "seconds": 1.9, "exposed_s": 0.11},
        "peak_rss_bytes": [31 * GIB, 30 * GIB],
    }


def _spans(start_s: float, rank: int) -> WorkerStats:
    """Spans of one step: a layer holds kernels, an exchange and a wait."""
    draw = random.Random(rank * 1000 + int(start_s * 10) % 97)
    at, found = start_s * 1e6, list[tuple[str, str, float, float, int, int]]()
    for layer, kind in enumerate(LAYERS):
        length = (0.098 + 0.006 * draw.random()) * 1e6
        parts = (
            (("cache_rows", "collective", 0.12), ("indexer", "kernel", 0.34), ("attention.sparse", "kernel", 0.3))
            if kind == "dsa"
            else (("kda.project", "kernel", 0.3), ("kda.summaries", "collective", 0.1), ("kda.scan", "kernel", 0.38))
        )
        found.append((kind, "layer", at, length, layer, -1))
        inner = at
        for name, category, share in (*parts, ("cache_rows.wait", "wait", 0.04), ("moe.experts", "kernel", 0.14)):
            found.append((name, category, inner, length * share, layer, -1))
            inner += length * share
        at += length
    return WorkerStats(peak_rss_bytes=31 * GIB, comm={}, spans=tuple(found))
