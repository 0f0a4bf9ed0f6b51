"""Jobs on a terminal: tables, and the progress of one."""

from __future__ import annotations

import datetime
import time
from typing import Any, Self

import rich.progress
from rich.console import Console
from rich.table import Table

WIDE = 160
"""Columns where nobody says how many there are."""


def print_table(table: Table) -> None:
    """To standard output, as it is: a reason may hold anything."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def jobs_table(jobs: list[dict[str, Any]]) -> Table:
    """A line a job."""
    table = Table(box=None, pad_edge=False)
    for name in ("job", "state", "prompt", "done", "generated", "age", "reason"):
        table.add_column(name, overflow="fold", justify="right" if name in ("prompt", "done", "generated") else "left")
    now = time.time()
    for job in jobs:
        table.add_row(
            job["id"],
            job["state"],
            f"{job['prompt_tokens']:,}",
            f"{job['position'] / job['prompt_tokens']:.0%}",
            f"{job['generated_tokens']:,}",
            _duration(now - job["created_at"]),
            job["reason"] or "",
        )
    return table


def job_table(job: dict[str, Any]) -> Table:
    """A line a fact."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    estimate, timings = job["estimate"], job["timings"]
    facts = {
        "job": job["id"],
        "state": job["state"] + (f": {job['reason']}" if job["reason"] else ""),
        "accepted": _at(job["created_at"]),
        "ended": _at(job["finished_at"]),
        "prompt": f"{job['prompt_tokens']:,} tokens, {job['position']:,} prefilled in {job['num_steps']} steps",
        "cached": f"{job['cached_tokens']:,} tokens" if job["cached_tokens"] else None,
        "generated": f"{job['generated_tokens']:,} tokens",
        "runs on": ", ".join(filter(None, (job["group"], job["decode_worker"]))) or None,
        "attempts": f"{job['num_attempts']}, preempted {job['num_preemptions']} times",
        "expected": None if estimate is None else _expected(estimate),
        "seconds": ", ".join(f"{name[:-2]} {value:.2f}" for name, value in timings.items() if value is not None)
        or None,
        "snapshot": job["snapshot"],
    }
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, value)
    return table


class Progress:
    """The life of a job on standard error: a bar on a terminal, else a line for every change of state."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[note]}", markup=False),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("queued", total=job["prompt_tokens"], note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Takes an event of the job's stream."""
        kind, data = event["kind"], event["data"]
        if kind == "state":
            self._bar.update(self._task, description=data["state"], note=data.get("reason") or "")
            if not self._console.is_terminal:
                reason = f": {data['reason']}" if data.get("reason") else ""
                self._console.print(f"{_at(event['at'])} {data['state']}{reason}")
        elif kind == "step":
            left = data.get("num_steps_left")
            note = f"step {data['number']}" + (f", {left} left" if left else "")
            self._bar.update(self._task, completed=data["end"], note=note)
        elif kind == "tokens":
            self._bar.update(self._task, note=f"{data['num_tokens']} tokens")


def _expected(estimate: dict[str, Any]) -> str:
    parts = [
        f"{word} {_duration(estimate[name])}"
        for name, word in (("start_s", "runs in"), ("finish_s", "prefilled in"))
        if estimate[name] is not None
    ]
    return "; ".join([*parts, estimate["reason"]])


def _at(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return str(datetime.timedelta(seconds=round(seconds)))
