"""Our side: a prompt through a running `LocalCluster`, looked at from all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longprefill.orchestrator.align.observation import LOGIT_ROWS, Observation, from_ranks, renumbered
from longprefill.orchestrator.cluster import LocalCluster
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.choices import Record


def whole_step(num_tokens: int) -> int:
    """A step size that takes so many tokens at once."""
    return max(1, -(-num_tokens // PAGE_TOKENS)) * PAGE_TOKENS


def observe_mesh(
    cluster: LocalCluster,
    tokens: np.ndarray,
    *,
    step_tokens: int,
    record: Record,
    replay: bool,
    snapshot: Path | None = None,
) -> Observation:
    """Runs a prompt, from a snapshot if there is one. Choices are compared with `record`, and with `replay` replaced by
    it. The job is closed again.

    Raises:
        RunFailed: a worker died, hung or failed.
    """
    workers = cluster.workers
    workers.start_probe(LOGIT_ROWS)
    workers.replay_choices(renumbered(record, cluster.next_job), keep_own=not replay)
    if snapshot is None:
        result = cluster.prefill_many([tokens], step_tokens=step_tokens)[0]
    else:
        result = cluster.resume(snapshot, step_tokens=step_tokens)
    reports = workers.end_replay()
    ranks = workers.take_probe(result.job)
    cluster.close_job(result.job)
    return from_ranks(
        ranks,
        len(tokens),
        num_choices=sum(report.rows for report in reports),
        swapped=[swap for report in reports for swap in report.swapped],
        keeps_own=not replay,
    )


def export_part(cluster: LocalCluster, tokens: np.ndarray, *, stop: int, record: Record, path: Path) -> None:
    """Runs the first `stop` tokens with replayed choices and writes a snapshot.

    Raises:
        RunFailed: a worker died, hung or failed.
    """
    workers = cluster.workers
    workers.replay_choices(renumbered(record, cluster.next_job))
    result = cluster.run_until(tokens, stop)
    workers.end_replay()
    cluster.export_job(result.job, path)
    cluster.close_job(result.job)


def carry_on(cluster: LocalCluster, snapshot: Path, *, stop: int, record: Record, path: Path) -> None:
    """Resumes a snapshot, goes on to `stop`, writes another.

    Raises:
        RunFailed: a worker died, hung or failed.
    """
    workers = cluster.workers
    workers.replay_choices(renumbered(record, cluster.next_job))
    result = cluster.resume(snapshot, stop=stop)
    workers.end_replay()
    cluster.export_job(result.job, path)
    cluster.close_job(result.job)
