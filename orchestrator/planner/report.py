"""A choice as JSON and as text. Every figure is modelled, and says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longprefill.orchestrator.planner.crossovers import Crossovers
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator, limits
from longprefill.orchestrator.planner.search import Choice

WIDTH = 118
RUNNABLE_EXCHANGES = ("all_gather",)
"""What the engine has (`workers/model/layers/state_exchange.py`, which needs torch; a test compares)."""


def document(evaluator: Evaluator, choice: Choice, borders: Crossovers) -> dict[str, object]:
    """The JSON object of `plan --json`."""
    best, request = choice.best, evaluator.request
    return {
        "kind": "modelled",
        "model": {"name": request.model, "family": evaluator.config.family},
        "tokens": request.tokens,
        "cached": request.cached,
        "concurrent": request.concurrent,
        "devices": evaluator.machines.num_devices,
        "plan": plan_fields(best),
        "estimate": estimate_fields(best),
        "memory": {**limits(best.memory), "device_bytes": best.site.memory_bytes},
        "memory_by_rank": [
            {
                "device": kind.device,
                "tp_ranks": list(kind.tp_ranks),
                "ranks": kind.num_ranks,
                **limits(kind.memory),
                "device_bytes": kind.device_bytes,
            }
            for kind in evaluator.memory_by_rank(best.candidate, best.site)
        ],
        "received_bytes": evaluator.traffic(best.candidate),
        "handoff_bytes": evaluator.handoff_bytes(best.candidate, request.tokens) if evaluator.has_decode else 0,
        "alternatives": [
            {
                "what": other.what,
                "ttft_s": None if other.estimate is None else other.estimate.ttft_s,
                "devices": None if other.estimate is None else other.estimate.candidate.num_devices,
                "reason": other.reason,
            }
            for other in choice.alternatives
        ],
        "crossovers": asdict(borders),
        "rates": evaluator.costs(best.candidate, best.site).coverage(),
        "notes": list(notes(evaluator, choice)),
    }


def rounded(value: object) -> object:
    """Floats to six digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def plan_fields(best: Estimate) -> dict[str, object]:
    """What a group is told."""
    candidate = best.candidate
    return {
        "cp": candidate.cp,
        "tp": candidate.tp,
        "devices": candidate.num_devices,
        "groups": best.num_groups,
        "machines": best.site.num_machines,
        "expert_parallel": candidate.is_expert_parallel,
        "step_tokens": candidate.step_tokens,
        "steps": best.prompt.num_steps,
        "prompts_per_step": candidate.jobs_per_step,
        "layout": candidate.layout,
        "exchange": candidate.exchange,
        "caches": "sharded" if candidate.is_cache_sharded else "replicated",
        "latent_format": candidate.latent_format,
        "index_format": candidate.index_format,
    }


def estimate_fields(best: Estimate) -> dict[str, object]:
    """Seconds, and what they are made of: `parts` sum to `prefill_s`."""
    prompt = best.prompt
    return {
        "ttft_s": best.ttft_s,
        "mean_ttft_s": best.mean_ttft_s,
        "prefill_s": prompt.seconds,
        "handoff_exposed_s": best.handoff_s,
        "queue_s": best.queue_s,
        "parts": dict(sorted(prompt.parts.items(), key=lambda part: -part[1])),
        "work_max_over_mean": prompt.max_work_s / prompt.mean_work_s if prompt.mean_work_s else 1.0,
    }


def notes(evaluator: Evaluator, choice: Choice) -> Iterator[str]:
    """What the reader should know of these figures."""
    yield from choice.notes
    profiles = {profile.name: profile for profile in choice.best.site.placement.profiles}
    for profile in profiles.values():
        yield f"device {profile.name}: {profile.source}"
    if not evaluator.has_decode:
        yield "no hand-off: the cluster file has no [decode] workers"
    candidate = choice.best.candidate
    if candidate.cp > 1 and candidate.exchange not in RUNNABLE_EXCHANGES:
        yield (
            f"the engine does not run {candidate.exchange} yet, it is modelled: add --exchange "
            f"{' or '.join(RUNNABLE_EXCHANGES)} for a plan that runs"
        )
    if candidate.is_cache_sharded:
        yield "the engine does not shard caches yet, it is modelled"
        yield "sharded caches: a finished step cannot be recovered when a rank dies, the job starts again"


def show(evaluator: Evaluator, choice: Choice, borders: Crossovers) -> None:
    """Prints the plan, its breakdown, memory, bytes, alternatives and crossovers."""
    best, request = choice.best, evaluator.request
    console = Console(width=WIDTH, highlight=False, markup=False)
    fields = plan_fields(best)
    console.print(
        f"{request.model}: {request.tokens:,} tokens"
        + (f", {request.cached:,} of them cached" if request.cached else "")
        + (f", {request.concurrent} prompts at once" if request.concurrent > 1 else "")
        + f", {evaluator.machines.num_devices} device(s). Modelled."
    )
    console.print(
        f"plan    {best.candidate.describe()}: {best.num_groups} group(s) of {fields['devices']} device(s), "
        f"{fields['steps']} step(s) of {fields['step_tokens']:,} tokens"
        + (f" for {fields['prompts_per_step']} prompts each" if best.candidate.jobs_per_step > 1 else "")
        + f", {fields['layout']}, states by {fields['exchange']}, caches {fields['caches']}, "
        f"latent {fields['latent_format']}, index {fields['index_format']}"
    )
    console.print(
        f"time    {_seconds(best.ttft_s)} to the first token: prefill {_seconds(best.prefill_s)}, "
        f"hand-off {_seconds(best.handoff_s)}"
        + (
            f", of the last prompt after waiting {_seconds(best.queue_s)}; mean {_seconds(best.mean_ttft_s)}"
            if request.concurrent > 1
            else ""
        )
    )
    memory = limits(best.memory)
    console.print(
        "memory  "
        + ", ".join(f"{name} {_size(size)}" for name, size in memory.items())
        + f", of {_size(best.site.memory_bytes)} a device"
    )
    kinds = evaluator.memory_by_rank(best.candidate, best.site)
    for kind in kinds if len(kinds) > 1 else ():
        places = ", ".join(map(str, kind.tp_ranks))
        console.print(
            f"        {kind.num_ranks} rank(s) on {kind.device}, place {places} of tp {best.candidate.tp}: "
            f"total {_size(kind.memory.total)} of {_size(kind.device_bytes)}"
        )
    received = evaluator.traffic(best.candidate)
    if received:
        console.print(
            "bytes   received by a device: " + ", ".join(f"{name} {_size(size)}" for name, size in received.items())
        )
    console.print(_breakdown(best))
    if choice.alternatives:
        console.print(_alternatives(choice))
    for line in border_lines(borders):
        console.print(line)
    for line in notes(evaluator, choice):
        console.print(f"note: {line}")


def border_lines(borders: Crossovers) -> Iterator[str]:
    """Crossovers in words."""
    if borders.cp_pays_from_tokens is not None:
        efficient = borders.cp_efficient_from_tokens
        more = f", at half of its ideal speed-up or more from {efficient:,}" if efficient is not None else ""
        yield f"cp {borders.cp} is faster than one group from {borders.cp_pays_from_tokens:,} tokens on{more}"
    if borders.contiguous_from_cached_tokens is not None:
        start = borders.contiguous_from_cached_tokens
        yield f"contiguous steps are within 5 % of zigzag from {start:,} cached tokens on"
    elif borders.contiguous_looked_at_tokens is not None:
        yield f"zigzag steps stay ahead of contiguous ones up to {borders.contiguous_looked_at_tokens:,} cached tokens"
    if borders.break_even_gb_per_s is not None:
        where = "over the machines" if borders.link == "network" else "on one machine"
        yield (
            f"cp {borders.wide_cp} {where} is faster than cp {borders.narrow_cp} from "
            f"{borders.break_even_gb_per_s:.3g} GB/s a device of {borders.link} bandwidth on"
        )


def show_scaling(rows: Sequence[dict[str, object]]) -> None:
    """The table of `--devices`, in seconds."""
    console = Console(width=WIDTH + 14, highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        title = name.removesuffix("_s").replace("_", " ")
        table.add_column(title, justify="left" if name in ("plan", "layout") else "right", no_wrap=name == "plan")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _breakdown(best: Estimate) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="where the prefill's seconds go", title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in sorted(best.prompt.parts.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{seconds:.4g}", f"{seconds / best.prompt.seconds:.1%}")
    return table


def _alternatives(choice: Choice) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="what else there is", title_justify="left")
    table.add_column("instead")
    table.add_column("devices", justify="right")
    table.add_column("first token", justify="right")
    table.add_column("why not")
    for other in choice.alternatives:
        estimate = other.estimate
        table.add_row(
            other.what,
            "" if estimate is None else str(estimate.candidate.num_devices),
            "" if estimate is None else _seconds(estimate.ttft_s),
            other.reason,
        )
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{seconds * 1e3:.3g} ms"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
