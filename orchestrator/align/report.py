"""The table, the JSON document and the last line of an alignment."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.table import Table

from longprefill.orchestrator.align.compare import Row, first_deviation


def table_of(rows: list[Row], title: str) -> Table:
    """One line a comparison; what fails is marked."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("layer", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rms", "worst", "allowed", "rows", "left out", "swaps"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(
            "" if row.layer is None else f"{row.layer} {row.kind}",
            row.what,
            _number(row.rms),
            _number(row.worst),
            _number(row.allowed),
            str(row.compared),
            str(row.excluded or ""),
            str(row.swaps or ""),
            "" if row.is_ok else f"[red]{row.problem or 'beyond'}[/red]",
        )
    return table


def last_line(rows: list[Row]) -> str:
    """Where it goes wrong first, or that all agree."""
    deviation = first_deviation(rows)
    if deviation is not None:
        return f"first deviation: {deviation}"
    swaps = sum(row.swaps for row in rows)
    swapped = f"; {swaps} swapped choices" if swaps else ""
    return f"all {len(rows)} comparisons agree{swapped}"


def document_of(rows: list[Row]) -> list[dict[str, Any]]:
    """The comparisons as plain data; what is not a number is null."""
    return [
        {
            "layer": row.layer,
            "kind": row.kind,
            "what": row.what,
            "rms": _finite(row.rms),
            "worst": _finite(row.worst),
            "allowed": row.allowed,
            "rows": row.compared,
            "excluded": row.excluded,
            "swaps": row.swaps,
            "ok": row.is_ok,
            "problem": row.problem,
        }
        for row in rows
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
