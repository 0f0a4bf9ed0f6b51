"""A choice as text. `report` has the same as JSON, which needs no rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longprefill.orchestrator.planner.crossovers import Crossovers
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator, limits
from longprefill.orchestrator.planner.report import notes, plan_fields
from longprefill.orchestrator.planner.search import Choice

WIDTH = 118


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
