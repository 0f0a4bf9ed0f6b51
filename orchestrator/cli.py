"""The command line: `longprefill COMMAND --help`. Wrong calls end with one line and exit code 2, failed runs with 1.

Here and in the other modules of commands annotations are values (no `from __future__ import annotations`): typer reads
those of all commands at every start, and text would be compiled each time.
"""

import gc
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from longprefill.orchestrator.bench_command import bench
from longprefill.orchestrator.client_command import add_client_commands
from longprefill.orchestrator.command_edge import end, terminate, user_facing

if TYPE_CHECKING:
    from longprefill.partition.generators import LayoutKind
    from longprefill.partition.work import Exchange

GC_OBJECTS = 100_000
"""New objects between two collections of garbage. What a command loads stays: looking through it after every 700 takes
a tenth of a short command's time."""
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""What the option parser raises for any wrong call; typer has had two homes for it."""

app = typer.Typer(
    name="longprefill",
    help="Exact context-parallel prefill of very long prompts for hybrid KDA + DSA language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)


@app.callback()
def _root() -> None:
    """Exact context-parallel prefill of very long prompts for hybrid KDA + DSA language models."""


@app.command()
@user_facing
def run(
    model: Annotated[Path, typer.Option(help="Model directory as published.")],
    prompt: Annotated[str, typer.Option(help="UTF-8 text, token ids (.npy, .json, .ids), or - for standard input.")],
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    expert_parallel: Annotated[
        bool, typer.Option(help="Spread the experts over all ranks instead of giving each rank all of them.")
    ] = False,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens a step, a multiple of 64; chosen by memory.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 16,
    dtype: Annotated[str, typer.Option(help="Compute dtype: bf16 or fp32.")] = "bf16",
    latent_format: Annotated[
        str | None, typer.Option(help="Latent cache rows: bf16, fp8 or fp32; the compute dtype.")
    ] = None,
    index_format: Annotated[
        str | None, typer.Option(help="Index keys: bf16, mxfp8 or fp32; the compute dtype.")
    ] = None,
    layout: Annotated[str, typer.Option(help="How a step is cut over ranks: zigzag or contiguous.")] = "zigzag",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of this probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; may be repeated.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Write logits, cache rows and states as safetensors.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
) -> None:
    """Prefill one prompt on local ranks, hand it to a decode worker and generate."""
    from longprefill.orchestrator.run_command import RunRequest, run_prompt

    signal.signal(signal.SIGTERM, terminate)
    run_prompt(
        RunRequest(
            model=model,
            prompt=prompt,
            cp=cp,
            tp=tp,
            expert_parallel=expert_parallel,
            step_tokens=step_tokens,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            latent_format=latent_format,
            index_format=index_format,
            layout=layout,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
            json_file=json_file,
            dump=dump,
            trace=trace,
        )
    )


@app.command()
@user_facing
def align(
    model: Annotated[Path, typer.Option(help="Model directory as published.")],
    tokens: Annotated[int | None, typer.Option(help="Length of a random prompt; 1000.")] = None,
    prompt: Annotated[str | None, typer.Option(help="UTF-8 text or token ids instead of a random prompt.")] = None,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    expert_parallel: Annotated[bool, typer.Option(help="Spread the experts over all ranks.")] = False,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens a step, a multiple of 64; the whole prompt.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: bf16 or fp32.")] = "fp32",
    latent_format: Annotated[str | None, typer.Option(help="Latent cache rows: bf16, fp8 or fp32.")] = None,
    index_format: Annotated[str | None, typer.Option(help="Index keys: bf16, mxfp8 or fp32.")] = None,
    against: Annotated[
        str, typer.Option(help="transformers, single (one rank, one step), or a directory with a twin of the model.")
    ] = "single",
    replay_choices: Annotated[
        bool, typer.Option("--replay-choices", help="Our run takes the other side's index and expert choices.")
    ] = False,
    grid: Annotated[bool, typer.Option("--grid", help="Walk meshes, lengths and step sizes.")] = False,
    meshes: Annotated[str | None, typer.Option(help="With --grid: CPxTP, as in 1x1,2x1,4x2.")] = None,
    lengths: Annotated[str | None, typer.Option(help="With --grid: prompt lengths, as in 1,63,1000.")] = None,
    steps: Annotated[str | None, typer.Option(help="With --grid: step sizes, as in 64,192,whole.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the comparison as JSON; - prints it.")] = None,
    tolerance: Annotated[float, typer.Option(help="Relative RMS, and distance of a near tie, in fp32.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Of random prompts.")] = 0,
) -> None:
    """Compare a mesh's run with transformers or one rank, layer by layer; exit code 1 beyond the tolerance."""
    from longprefill.orchestrator.align.command import align as run_alignment
    from longprefill.orchestrator.align.request import AlignRequest

    signal.signal(signal.SIGTERM, terminate)
    agrees = run_alignment(
        AlignRequest(
            model=model,
            tokens=tokens,
            prompt=prompt,
            cp=cp,
            tp=tp,
            expert_parallel=expert_parallel,
            step_tokens=step_tokens,
            dtype=dtype,
            latent_format=latent_format,
            index_format=index_format,
            against=against,
            replay_choices=replay_choices,
            grid=grid,
            meshes=meshes,
            lengths=lengths,
            steps=steps,
            json_file=json_file,
            tolerance=tolerance,
            seed=seed,
        )
    )
    if not agrees:
        raise typer.Exit(1)


@app.command()
@user_facing
def serve(
    config: Annotated[Path, typer.Option(help="TOML file; examples/serve has some.")],
) -> None:
    """Serve a model over HTTP: many jobs, prefill groups, decode workers, until SIGTERM or Ctrl-C."""
    from longprefill.orchestrator.serve_command import serve as run_service

    signal.signal(signal.SIGTERM, terminate)
    run_service(config)


@app.command()
@user_facing
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what this machine can run: devices, kernel backends, model families, memory, and why something cannot."""
    from longprefill.orchestrator.doctor import print_diagnosis

    print_diagnosis(as_json=as_json)


@app.command()
@user_facing
def plan(
    model: Annotated[str, typer.Option(help="Directory with a config.json, or a shipped name: kimi_linear, ...")],
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")],
    cluster: Annotated[Path, typer.Option(help="TOML file of machines, devices and links.")],
    cached: Annotated[int, typer.Option(help="Tokens of it that pages and a state already stand for.")] = 0,
    concurrent: Annotated[int, typer.Option(help="Equal prompts that come together.")] = 1,
    devices: Annotated[
        str | None, typer.Option(help="Devices to use; several, as in 16,32,64: a scaling table.")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(help="The fewest devices that are this fast.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks; chosen.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks; chosen.")] = None,
    expert_parallel: Annotated[
        bool | None, typer.Option("--expert-parallel/--no-expert-parallel", help="Spread the experts; chosen.")
    ] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens a step, a multiple of 64; chosen.")] = None,
    layout: Annotated[str | None, typer.Option(help="zigzag or contiguous; chosen.")] = None,
    exchange: Annotated[str | None, typer.Option(help="all_gather, head_transposed or relay; chosen.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: bf16 or fp32.")] = "bf16",
    latent_format: Annotated[str | None, typer.Option(help="Latent cache rows: bf16, fp8 or fp32.")] = None,
    index_format: Annotated[str | None, typer.Option(help="Index keys: bf16, mxfp8 or fp32.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan as JSON; - prints it.")] = None,
) -> None:
    """Plan a prefill on a cluster: mesh, steps, layout, exchange, memory, time, and why not otherwise."""
    from longprefill.orchestrator.plan_command import PlanRequest, device_numbers
    from longprefill.orchestrator.plan_command import plan as make_plan

    request = PlanRequest(
        model=model,
        tokens=tokens,
        cluster=cluster,
        cached=cached,
        concurrent=concurrent,
        devices=device_numbers(devices),
        deadline_s=deadline_s,
        cp=cp,
        tp=tp,
        expert_parallel=expert_parallel,
        step_tokens=step_tokens,
        layout=cast("LayoutKind | None", layout),
        exchange=cast("Exchange | None", exchange),
        dtype=dtype,
        latent_format=latent_format,
        index_format=index_format,
    )
    make_plan(request, json_file)


@app.command()
@user_facing
def simulate(
    trace: Annotated[Path | None, typer.Option(help="Requests to replay: JSONL in the form of Mooncake.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="TOML file; left out: one group, steps of 8 K.")] = None,
    load: Annotated[float | None, typer.Option(help="Work offered over work possible.")] = None,
    policy: Annotated[str | None, typer.Option(help="guarded, fcfs, edf, srpt or all; the cluster's own.")] = None,
    requests: Annotated[int | None, typer.Option(help="Replay only the first requests of the trace.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of failures and stragglers; the cluster's own.")] = None,
    sweep: Annotated[bool, typer.Option(help="Strong and weak scaling over device counts instead.")] = False,
    prefix_study: Annotated[bool, typer.Option(help="Hits by the states' share of cache bytes instead.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write rows as CSV: jobs, or a sweep's.")] = None,
    chrome_trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
    decisions: Annotated[Path | None, typer.Option(help="Write every decision with its reason as JSONL.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write SVG and PNG plots to this directory.")] = None,
) -> None:
    """Replay a trace on a simulated cluster with the real scheduler, or sweep over device counts."""
    from longprefill.orchestrator.simulate_command import SimulateRequest
    from longprefill.orchestrator.simulate_command import simulate as run_simulation

    run_simulation(
        SimulateRequest(
            trace=trace,
            cluster=cluster,
            load=load,
            policy=policy,
            most=requests,
            json_file=json_file,
            csv_file=csv_file,
            chrome_trace=chrome_trace,
            decisions=decisions,
            plots=plots,
            sweep=sweep,
            prefix_study=prefix_study,
            seed=seed,
        )
    )


add_client_commands(app)


def _given(error: Exception) -> str:
    """The option and the value that the parser could not read: its message names only the option."""
    if not isinstance(error, typer.BadParameter) or error.param is None:
        return ""
    for option in error.param.opts:
        for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
            if word == option and following:
                return f"{option} {following}: "
            if word.startswith(f"{option}="):
                return f"{word}: "
    return ""


def main() -> None:
    """Entry point of the `longprefill` command."""
    gc.set_threshold(GC_OBJECTS)
    if len(sys.argv) < 2:
        sys.argv.append("--help")
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        command = "longprefill" if error.ctx is None else error.ctx.command_path
        end(f"{_given(error)}{error.format_message().rstrip('.')}: see {command} --help", 2)
    except (typer.Abort, KeyboardInterrupt):
        end("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)
