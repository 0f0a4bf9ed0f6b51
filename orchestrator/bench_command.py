"""`longprefill bench`: measurements of this machine and of models, each a command or an option of the group."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from longprefill.orchestrator.command_edge import terminate, user_facing
from longprefill.partition.errors import UserError

bench = typer.Typer(name="bench", help="Measure this machine, or what a model makes of a long prompt.")


@bench.callback(invoke_without_command=True)
@user_facing
def _measure(
    context: typer.Context,
    calibrate: Annotated[Path | None, typer.Option(help="Measure this machine and write its profile as JSON.")] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="With --calibrate: measure for this model directory; may be repeated.")
    ] = None,
    tp: Annotated[int, typer.Option(help="With --calibrate: measure one rank's share of so many.")] = 1,
    dtype: Annotated[str, typer.Option(help="With --calibrate: compute dtype, bf16 or fp32.")] = "bf16",
    latent_format: Annotated[str | None, typer.Option(help="With --calibrate: bf16, fp8 or fp32.")] = None,
    index_format: Annotated[str | None, typer.Option(help="With --calibrate: bf16, mxfp8 or fp32.")] = None,
    longest: Annotated[int | None, typer.Option(help="With --calibrate: farthest position, 69632.")] = None,
    seconds: Annotated[float | None, typer.Option(help="With --calibrate: about how long to measure, 150.")] = None,
) -> None:
    """Measure this machine, or what a model makes of a long prompt."""
    if calibrate is None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
        return
    if context.invoked_subcommand is not None:
        raise UserError(f"bench --calibrate takes no command: run bench {context.invoked_subcommand} on its own")
    from longprefill.orchestrator.calibrate.command import BUDGET_S, CalibrateRequest
    from longprefill.orchestrator.calibrate.command import calibrate as measure
    from longprefill.orchestrator.calibrate.schedule import LONGEST_TOKENS

    signal.signal(signal.SIGTERM, terminate)
    measure(
        CalibrateRequest(
            file=calibrate,
            models=tuple(model or ()),
            tp=tp,
            dtype=dtype,
            latent_format=latent_format,
            index_format=index_format,
            longest_tokens=LONGEST_TOKENS if longest is None else longest,
            budget_s=BUDGET_S if seconds is None else seconds,
        )
    )
