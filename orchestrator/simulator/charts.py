"""The charts of replays, prefix studies and sweeps, each as SVG and PNG in a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from longprefill.orchestrator.simulator.plots.chart import Chart, Line
from longprefill.orchestrator.simulator.plots.png import png
from longprefill.orchestrator.simulator.plots.svg import svg
from longprefill.orchestrator.simulator.prefix_study import StudyRow
from longprefill.orchestrator.simulator.replay import Replay
from longprefill.partition.errors import UserError

PERCENTS = tuple(float(percent) for percent in np.concatenate([np.arange(0, 99, 1), np.arange(99, 100, 0.1)]))


def write_charts(directory: Path, charts: dict[str, Chart]) -> None:
    """NAME.svg and NAME.png of every chart; the directory is made.

    Raises:
        UserError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, chart in charts.items():
            (directory / f"{name}.svg").write_text(svg(chart), encoding="utf-8")
            (directory / f"{name}.png").write_bytes(png(chart))
    except OSError as error:
        raise UserError(f"--plots {directory} cannot be written: {error.strerror}: choose another path") from None


def replay_charts(directory: Path, replays: Sequence[Replay]) -> None:
    """Distributions of TTFT and of slowdown by policy."""
    write_charts(
        directory,
        {
            "ttft": Chart(
                title="Time to first token",
                x_title="share of jobs, %",
                y_title="seconds",
                is_y_log=True,
                lines=tuple(_distribution(run, [job.ttft_s for job in run.jobs if job.is_served]) for run in replays),
            ),
            "slowdown": Chart(
                title="Slowdown: time to first token over the time alone",
                x_title="share of jobs, %",
                y_title="slowdown",
                is_y_log=True,
                lines=tuple(_distribution(run, [job.slowdown for job in run.jobs if job.is_served]) for run in replays),
            ),
        },
    )


def study_charts(directory: Path, rows: Sequence[StudyRow]) -> None:
    """Hits by the states' share of bytes, online and hindsight, for every model."""
    lines: list[Line] = []
    for model in dict.fromkeys(row.model for row in rows):
        chosen = [row for row in rows if row.model == model]
        shares = tuple(100 * row.state_share for row in chosen)
        lines.append(Line(name=f"{model}, online", x=shares, y=tuple(row.online for row in chosen)))
        lines.append(Line(name=f"{model}, hindsight", x=shares, y=tuple(row.hindsight for row in chosen)))
    chart = Chart(
        title="Hits over those of pages alone",
        x_title="states' share of cache bytes, %",
        y_title="hit over ideal",
        lines=tuple(lines),
    )
    write_charts(directory, {"prefix": chart})


def _distribution(run: Replay, values: Sequence[float]) -> Line:
    y = np.percentile(np.array(values), PERCENTS) if values else np.zeros(len(PERCENTS))
    return Line(name=run.policy, x=PERCENTS, y=tuple(float(value) for value in y))
