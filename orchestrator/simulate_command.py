"""`longprefill simulate`: replays of a trace under one policy or all, and sweeps over device counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longprefill.orchestrator.outputs import check_outputs
from longprefill.orchestrator.scheduler.base import POLICIES
from longprefill.orchestrator.simulator.cluster import Cluster, ClusterError, read_cluster
from longprefill.orchestrator.simulator.files import (
    job_rows,
    write_chrome_trace,
    write_csv,
    write_decisions,
    write_json,
)
from longprefill.orchestrator.simulator.load import prepare
from longprefill.orchestrator.simulator.metrics import Metrics, metrics
from longprefill.orchestrator.simulator.replay import Replay, replay
from longprefill.orchestrator.simulator.trace import Request, read_trace

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """What the command line asked for."""

    trace: Path | None
    cluster: Path | None
    load: float | None
    policy: str | None
    """None: the cluster's own."""
    most: int | None
    json_file: Path | None
    csv_file: Path | None
    chrome_trace: Path | None
    decisions: Path | None
    plots: Path | None
    sweep: bool
    prefix_study: bool
    seed: int | None


def simulate(request: SimulateRequest) -> None:
    """Runs what was asked for, prints a table and writes the files.

    Raises:
        UserError: a wrong call, an unreadable file, an impossible setting.
    """
    check_outputs(
        {
            "--json": request.json_file,
            "--csv": request.csv_file,
            "--chrome-trace": request.chrome_trace,
            "--decisions": request.decisions,
        },
        inputs=[path for path in (request.trace, request.cluster) if path is not None],
    )
    cluster = read_cluster(request.cluster)
    if request.seed is not None:
        cluster = replace(cluster, seed=request.seed)
    if request.sweep:
        from longprefill.orchestrator.simulator.sweep_command import sweep

        sweep(cluster, json_file=request.json_file, csv_file=request.csv_file, plots=request.plots)
        return
    if request.trace is None:
        raise ClusterError("simulate needs --trace FILE, or --sweep")
    requests = read_trace(request.trace, most=request.most)
    if request.prefix_study:
        _prefix_study(request, requests)
        return
    _replays(request, cluster, requests)


def _replays(request: SimulateRequest, cluster: Cluster, requests: Sequence[Request]) -> None:
    prepared, make_costs = prepare(requests, cluster, request.load)
    names = POLICIES if request.policy == "all" else (request.policy or cluster.scheduler.policy,)
    replays: list[Replay] = []
    rows: list[Metrics] = []
    for name in names:
        chosen = replace(cluster, scheduler=replace(cluster.scheduler, policy=name))
        replays.append(replay(prepared, chosen, make_costs))
        rows.append(metrics(replays[-1], chosen))
    reference = next((row for row in rows if row.policy == "fcfs"), None)
    _print_rows(rows, reference, cluster)
    if request.json_file is not None:
        content: dict[str, object] = {
            "trace": request.trace.name if request.trace else None,
            "requests": len(prepared),
            "load": request.load,
            "cluster": _described(cluster),
            "policies": {row.policy: _with_ratios(row, reference) for row in rows},
        }
        write_json(request.json_file, content)
    if request.csv_file is not None:
        write_csv(request.csv_file, [row for run in replays for row in job_rows(run)])
    if request.chrome_trace is not None:
        write_chrome_trace(request.chrome_trace, replays)
    if request.decisions is not None:
        write_decisions(request.decisions, replays)
    if request.plots is not None:
        from longprefill.orchestrator.simulator.charts import replay_charts

        replay_charts(request.plots, replays)


def _described(cluster: Cluster) -> dict[str, object]:
    """All settings as plain values."""
    content = asdict(cluster)
    content["scheduler"]["tenant_weights"] = dict(cluster.scheduler.tenant_weights)
    return content


def _with_ratios(row: Metrics, reference: Metrics | None) -> dict[str, object]:
    content = asdict(row)
    if reference is not None:
        for name in ("mean_ttft_s", "p99_slowdown", "p99_slowdown_64k"):
            least = getattr(reference, name)
            content[f"{name}_over_fcfs"] = getattr(row, name) / least if least else None
    return content


FIGURES: tuple[tuple[str, Callable[[Metrics], str]], ...] = (
    ("mean TTFT, s", lambda row: f"{row.mean_ttft_s:.3f}"),
    ("p50", lambda row: f"{row.p50:.3f}"),
    ("p90", lambda row: f"{row.p90:.3f}"),
    ("p99", lambda row: f"{row.p99:.3f}"),
    ("p99 slowdown", lambda row: f"{row.p99_slowdown:.2f}"),
    ("p99 slowdown from 64K on", lambda row: f"{row.p99_slowdown_64k:.2f}"),
    ("within objective", lambda row: f"{row.slo_attainment:.1%}"),
    ("goodput, tokens/s", lambda row: f"{row.goodput_tokens_per_s:,.0f}"),
    ("tokens/s a device", lambda row: f"{row.tokens_per_s_per_device:,.0f}"),
    ("units busy", lambda row: f"{row.utilisation:.1%}"),
    ("tokens from caches", lambda row: f"{row.hit_share:.1%}"),
    ("preemptions", lambda row: f"{row.preemptions}"),
    ("lost, unit-seconds", lambda row: f"{row.lost_s:.1f}"),
    ("failures: units, nodes, decode", lambda row: f"{row.unit_failures}, {row.node_failures}, {row.decode_failures}"),
    ("prefilled again, handed again", lambda row: f"{row.prefilled_again}, {row.handed_again}"),
    ("refused, given up", lambda row: f"{row.refused}, {row.given_up}"),
    ("decisions", lambda row: f"{row.decisions}"),
    ("99 % of decisions under", lambda row: f"{row.decision_p99_s * 1e3:g} ms"),
)
"""What the table shows of every policy."""


def _print_rows(rows: Sequence[Metrics], reference: Metrics | None, cluster: Cluster) -> None:
    from rich.console import Console
    from rich.table import Table

    is_formula = cluster.costs.kind == "quadratic"
    unused = (
        "a step's time is one formula: [network] and devices play no part, as they do with kind = 'work' in [costs]"
    )
    table = Table(
        title=f"{rows[0].jobs} jobs on {cluster.num_devices} device(s)",
        caption=unused if is_formula and (cluster.nodes or cluster.network) else None,
    )
    table.add_column("")
    for row in rows:
        table.add_column(row.policy, justify="right")
    for name, show in FIGURES:
        table.add_row(name, *(show(row) for row in rows))
    if reference is not None and len(rows) > 1:
        table.add_section()
        for title, name in (("mean TTFT over fcfs", "mean_ttft_s"), ("p99 from 64K on, over fcfs", "p99_slowdown_64k")):
            ratios = [getattr(row, name) / (getattr(reference, name) or 1.0) for row in rows]
            table.add_row(title, *(f"{ratio:.3f}" for ratio in ratios))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    console.print(_buckets(rows))


def _buckets(rows: Sequence[Metrics]) -> Table:
    from rich.table import Table

    table = Table(title="time to first token by length, s: p50 / p90 / p99")
    table.add_column("tokens from")
    table.add_column("jobs", justify="right")
    for row in rows:
        table.add_column(row.policy, justify="right")
    by_length = [{bucket.least_tokens: bucket for bucket in row.buckets} for row in rows]
    for least in sorted({least for buckets in by_length for least in buckets}):
        found = [buckets.get(least) for buckets in by_length]
        most = max(bucket.num_jobs for bucket in found if bucket is not None)
        cells = (
            "" if each is None else f"{each.ttft_p50_s:.3g} / {each.ttft_p90_s:.3g} / {each.ttft_p99_s:.3g}"
            for each in found
        )
        table.add_row(f"{least:,}", str(most), *cells)
    return table


def _prefix_study(request: SimulateRequest, requests: Sequence[Request]) -> None:
    from rich.console import Console
    from rich.table import Table

    from longprefill.orchestrator.simulator.prefix_study import study

    rows = study(requests)
    table = Table(title="hits over those of pages alone, by the states' share of all bytes")
    for title in ("model", "share", "states", "online", "hindsight", "online / hindsight"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        shares = (f"{row.online:.3f}", f"{row.hindsight:.3f}", f"{row.ratio:.3f}")
        table.add_row(row.model, f"{row.state_share:.0%}", str(row.num_states), *shares)
    Console().print(table)
    content = [asdict(row) | {"ratio": row.ratio} for row in rows]
    if request.json_file is not None:
        write_json(request.json_file, {"rows": content})
    if request.csv_file is not None:
        write_csv(request.csv_file, content)
    if request.plots is not None:
        from longprefill.orchestrator.simulator.charts import study_charts

        study_charts(request.plots, rows)
