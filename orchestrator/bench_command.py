"""`longprefill bench`: measurements of this machine and of models, each a command or an option of the group."""

from __future__ import annotations

import typer

bench = typer.Typer(name="bench", help="Measure this machine, or what a model makes of a long prompt.")


@bench.callback(invoke_without_command=True)
def _measure(context: typer.Context) -> None:
    """Measure this machine, or what a model makes of a long prompt."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
