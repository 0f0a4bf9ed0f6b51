"""`longprefill bench needle`: runs, and prints a line a document and a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from longprefill.orchestrator.needle.bench import NeedleReport, NeedleRequest, length_label, run_needles
from longprefill.partition.errors import UserError


def measure_needles(request: NeedleRequest) -> None:
    """Everything is checked before anything starts; progress and the table go to standard error.

    Raises:
        UserError: the model, an output or the machine does not allow it.
        RunFailed: a worker died, hung or failed.
    """
    console = Console(stderr=True, highlight=False)
    report = run_needles(request, lambda line: console.print(line, markup=False))
    console.print(_table(report))


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Numbers with commas between, each once.

    Raises:
        UserError: something else.
    """
    found: list[int] = []
    for word in text.split(","):
        if not word.strip().isdecimal():
            raise UserError(f"{option} {text!r}: {word.strip()!r} is no number: give numbers with commas between")
        found.append(int(word))
    return tuple(dict.fromkeys(found))


def _table(report: NeedleReport) -> Table:
    request = report.request
    table = Table(title="right answers", title_justify="left")
    table.add_column("tokens", justify="right")
    columns: list[tuple[str, dict[str, Any]]] = [("plain", {"task": "plain"})]
    columns += [(f"section {gap}", {"task": "section", "gap": gap}) for gap in request.gaps]
    columns.append(("absent", {"task": "absent"}))
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    table.add_column("tokens/s", justify="right")
    for length in request.lengths:
        cells: list[str] = []
        for _, wanted in columns:
            score = report.score(length=length, **wanted)
            cells.append(f"{score.right}/{score.asked} {100 * score.share:.0f}%" if score.asked else "-")
        rate = length * report.documents[length] / report.prefill_s[length]
        table.add_row(length_label(length), *cells, f"{rate:,.0f}")
    return table
