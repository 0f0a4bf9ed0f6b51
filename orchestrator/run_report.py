"""The report of one run: the JSON of `run --json` and the table that people read. Figures as measured or counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from longprefill.orchestrator.cluster import LocalCluster, PrefillResult
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import generate
from longprefill.partition.work import Imbalance, imbalance
from longprefill.workers.spec import WorkerStats


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """`document` is the JSON object; its fields are the public contract."""

    document: dict[str, Any]

    def table(self) -> Table:
        """Tokens, steps, times, imbalance, bytes by collective."""
        report = self.document
        table = Table(show_header=False, title="longprefill run", title_justify="left")
        mesh, handoff = report["mesh"], report["handoff"]
        imbalances = "  ".join(f"{name} {value:.3f}" for name, value in report["imbalance"].items())
        rows = {
            "model": f"{report['model']['family']} {report['model']['fingerprint']}",
            "mesh": f"cp {mesh['cp']} x tp {mesh['tp']} on {mesh['device']}, kernels {mesh['backend']}",
            "prompt": f"{report['prompt_tokens']:,} tokens in {len(report['steps'])} steps",
            "start-up": f"{report['startup_s']:.1f} s",
            "prefill": f"{report['prefill_s']:.2f} s, {report['prompt_tokens'] / report['prefill_s']:,.0f} tokens/s",
            "time to first token": f"{report['ttft_s']:.2f} s",
            "hand-off": f"{_size(handoff['bytes'])}, exposed {handoff['exposed_s']:.3f} s",
            "imbalance (max/mean flops)": imbalances,
            "peak memory by rank": "  ".join(_size(size) for size in report["peak_rss_bytes"]),
        }
        for op, count in report["comm"].items():
            rows[f"sent by {op}"] = f"{_size(count['bytes'])} in {count['calls']} calls"
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def build_report(
    cluster: LocalCluster,
    result: PrefillResult,
    stats: Mapping[str, WorkerStats],
    *,
    ttft_s: float,
    output_tokens: list[int],
    text: str,
) -> RunReport:
    """Everything that `run --json` promises."""
    settings = cluster.settings
    prefill = [worker for label, worker in stats.items() if label.startswith("prefill")]
    comm: dict[str, dict[str, int]] = {}
    for worker in prefill:
        for op, (calls, num_bytes, _) in worker.comm.items():
            entry = comm.setdefault(op, {"calls": 0, "bytes": 0})
            entry["calls"] = max(entry["calls"], calls)
            entry["bytes"] += num_bytes
    backends = sorted(set(cluster.workers.info[cluster.workers.prefill[0].label].backends.values()))
    handoff = result.handoff
    document = {
        "model": {"family": cluster.config.family, "fingerprint": cluster.fingerprint},
        "mesh": {"cp": settings.cp, "tp": settings.tp, "device": settings.device, "backend": "+".join(backends)},
        "prompt_tokens": result.num_tokens,
        "steps": [
            {"start": step.slices[0].start, "tokens": step.slices[0].num_tokens, "seconds": step.seconds}
            for step in result.steps
        ],
        "startup_s": cluster.startup_s,
        "ttft_s": ttft_s,
        "prefill_s": result.prefill_s,
        "handoff": {
            "bytes": handoff.num_bytes if handoff else 0,
            "seconds": handoff.seconds if handoff else 0.0,
            "exposed_s": handoff.exposed_s if handoff else 0.0,
        },
        "comm": comm,
        "imbalance": count_imbalance(cluster, result)._asdict(),
        "peak_rss_bytes": [worker.peak_rss_bytes for worker in prefill],
        "output_tokens": output_tokens,
        "text": text,
    }
    return RunReport(document=document)


def count_imbalance(cluster: LocalCluster, result: PrefillResult) -> Imbalance:
    """Counted flops, max over mean of all ranks, over the whole prefill."""
    settings = cluster.settings
    layouts = [generate(settings.layout, step.slices, settings.cp) for step in result.steps]
    return imbalance(layouts, model_shape(cluster.config, settings), "all_gather")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
