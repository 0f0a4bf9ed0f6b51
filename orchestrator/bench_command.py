"""`longprefill bench`: measurements of this machine and of models, each a command or an option of the group."""

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
    seconds: Annotated[float | None, typer.Option(help="With --calibrate: about how long to measure, 160.")] = None,
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


@bench.command()
@user_facing
def needle(
    model: Annotated[Path, typer.Option(help="A model whose tokens are bytes.")] = Path("examples/needle"),
    lengths: Annotated[str, typer.Option(help="Tokens of the documents.")] = "4096,16384,65536",
    depths: Annotated[int, typer.Option(help="Equal parts of a document that are told apart.")] = 10,
    needles: Annotated[int, typer.Option(help="Facts of each task for each length and depth.")] = 5,
    gaps: Annotated[str, typer.Option(help="Bytes between a section's header and its fact, in turn.")] = "32,128",
    absent: Annotated[int, typer.Option(help="Questions about names that are not there, for each length.")] = 50,
    seed: Annotated[int, typer.Option(help="Of documents and questions.")] = 0,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens a step, a multiple of 64; chosen by memory.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: bf16 or fp32.")] = "bf16",
    latent_format: Annotated[str | None, typer.Option(help="Latent cache rows: bf16, fp8 or fp32.")] = None,
    index_format: Annotated[str | None, typer.Option(help="Index keys: bf16, mxfp8 or fp32.")] = None,
    layout: Annotated[str, typer.Option(help="How a step is cut over ranks: zigzag or contiguous.")] = "zigzag",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures and wrong answers.")] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the picture as SVG.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Write the picture as PNG.")] = None,
) -> None:
    """Facts planted in long documents: the share of right answers by length and depth, for facts that name their owner
    and for facts whose owner stands in a header above."""
    from longprefill.orchestrator.needle.bench import NeedleRequest
    from longprefill.orchestrator.needle.command import measure_needles, numbers

    signal.signal(signal.SIGTERM, terminate)
    measure_needles(
        NeedleRequest(
            model=model,
            lengths=numbers("--lengths", lengths),
            depths=depths,
            needles=needles,
            gaps=numbers("--gaps", gaps),
            absent=absent,
            seed=seed,
            settings={
                "cp": cp,
                "tp": tp,
                "dtype": dtype,
                "latent_format": latent_format,
                "index_format": index_format,
                "step_tokens": step_tokens,
                "layout": layout,
            },
            json_file=json_file,
            svg_file=svg_file,
            png_file=png_file,
        )
    )
