"""`longprefill simulate --sweep`: scaling tables, files and charts of one model on one kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from longprefill.orchestrator.simulator.charts import write_charts
from longprefill.orchestrator.simulator.cluster import Cluster
from longprefill.orchestrator.simulator.files import write_csv, write_json
from longprefill.orchestrator.simulator.plots.chart import Chart, Line
from longprefill.orchestrator.simulator.subject import subject_of
from longprefill.orchestrator.simulator.sweep import (
    ScalingRow,
    SensitivityRow,
    sensitivity,
    strong_scaling,
    weak_scaling,
)

STRONG_TOKENS = 1 << 20
WEAK_TOKENS_PER_DEVICE = 16_384
SENSITIVITY_DEVICES = 64


def sweep(cluster: Cluster, *, json_file: Path | None, csv_file: Path | None, plots: Path | None) -> None:
    """Runs the sweep with the cluster's [costs] model and device, prints tables and writes files.

    Raises:
        UserError: an unknown model, an unreadable device file.
    """
    subject = subject_of(cluster)
    strong = strong_scaling(subject, STRONG_TOKENS)
    weak = weak_scaling(subject, WEAK_TOKENS_PER_DEVICE)
    changed = sensitivity(subject, STRONG_TOKENS, SENSITIVITY_DEVICES)
    _print_scaling(f"{STRONG_TOKENS} tokens of {cluster.costs.model} on {subject.profile.name} devices", strong)
    _print_scaling(f"{WEAK_TOKENS_PER_DEVICE} tokens a device", weak)
    _print_sensitivity(changed)
    if json_file is not None:
        write_json(
            json_file,
            {
                "model": cluster.costs.model,
                "device": subject.profile.name,
                "device_source": subject.profile.source,
                "scaling": [asdict(row) for row in (*strong, *weak)],
                "sensitivity": [asdict(row) for row in changed],
            },
        )
    if csv_file is not None:
        write_csv(csv_file, [asdict(row) for row in (*strong, *weak)])
    if plots is not None:
        write_charts(plots, scaling_charts(strong, weak))


def scaling_charts(strong: Sequence[ScalingRow], weak: Sequence[ScalingRow]) -> dict[str, Chart]:
    """Seconds and efficiency by devices, and what efficiency is lost to."""
    exchanges = list(dict.fromkeys(row.exchange for row in strong))
    by_exchange = {name: [row for row in strong if row.exchange == name] for name in exchanges}
    least = by_exchange[exchanges[0]]
    pipelined = [row for row in least if row.pipeline_s is not None]
    seconds = [_line(name, rows, "seconds") for name, rows in by_exchange.items()]
    seconds.append(_line("chunked pipeline", pipelined, "pipeline_s"))
    efficiency = [_line(f"strong, {name}", rows, "efficiency") for name, rows in by_exchange.items()]
    efficiency.append(_line("weak, same prompt alone", weak, "efficiency"))
    parts = by_exchange.get("head_transposed", least)
    names = ("work", "load_balance", "serialisation", "transfer", "efficiency")
    return {
        "strong": Chart(
            title=f"{strong[0].tokens} tokens: seconds",
            x_title="devices",
            y_title="seconds",
            is_x_log=True,
            is_y_log=True,
            lines=tuple(seconds),
        ),
        "efficiency": Chart(
            title="T1 over P times T_P",
            x_title="devices",
            y_title="efficiency",
            is_x_log=True,
            lines=tuple(efficiency),
        ),
        "losses": Chart(
            title=f"What efficiency is made of: {parts[0].exchange}",
            x_title="devices",
            y_title="factor",
            is_x_log=True,
            lines=tuple(_line(name.replace("_", " "), parts, name) for name in names),
        ),
    }


def _line(name: str, rows: Sequence[ScalingRow], field: str) -> Line:
    return Line(
        name=name,
        x=tuple(float(row.devices) for row in rows),
        y=tuple(float(getattr(row, field)) for row in rows),
    )


def _print_scaling(title: str, rows: Sequence[ScalingRow]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} (modelled)", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("exchange", "P", "seconds", "T1/PT", "of gemm", "work", "even", "serial", "wire", "pipe"):
        is_name = column == "exchange"
        table.add_column(
            column, justify="left" if is_name else "right", no_wrap=True, min_width=15 if is_name else None
        )
    for row in rows:
        table.add_row(
            row.exchange,
            str(row.devices),
            f"{row.seconds:.4g}",
            f"{row.efficiency:.3f}",
            "" if row.of_gemm_rate is None else f"{row.of_gemm_rate:.3f}",
            *(f"{value:.3f}" for value in (row.work, row.load_balance, row.serialisation, row.transfer)),
            "" if row.pipeline_s is None else f"{row.pipeline_s:.4g}",
        )
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)


def _print_sensitivity(rows: Sequence[SensitivityRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{STRONG_TOKENS} tokens on {SENSITIVITY_DEVICES} devices with one thing changed (modelled)")
    for column in ("what", "value", "seconds", "over base"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(row.what, f"{row.value:g}", f"{row.seconds:.4g}", f"{row.over_base:.3f}")
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
