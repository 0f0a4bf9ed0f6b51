"""`longprefill run`: everything checked first, then one prompt through a `LocalCluster` with progress and a report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from longprefill.orchestrator.chrome_trace import write_chrome_trace
from longprefill.orchestrator.cluster import LocalCluster, PrefillResult
from longprefill.orchestrator.outputs import check_writable
from longprefill.orchestrator.plan import check_prompt_length
from longprefill.orchestrator.report import StepDone
from longprefill.orchestrator.run_report import build_report
from longprefill.workers.decode import Sampling
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import StreamDecoder, Tokenizer, read_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The options of `longprefill run`."""

    model: Path
    prompt: str
    cp: int
    tp: int
    step_tokens: int | None
    max_new_tokens: int
    dtype: str
    latent_format: str | None
    index_format: str | None
    layout: str
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    json_file: Path | None
    dump: Path | None
    trace: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    tokens: list[int]
    text: str
    first_token_at: float
    """time.perf_counter of the first token at this process."""


def run_prompt(request: RunRequest) -> None:
    """Runs the request. Progress and the table go to standard error, the generated text to standard output.

    Raises:
        UserError: something about the request, the model, the prompt or the machine; nothing was started.
        RunFailed: a worker died, hung or failed.
    """
    for option, path in (("--json", request.json_file), ("--dump", request.dump), ("--trace", request.trace)):
        check_writable(option, path)
    config = read_config(request.model)
    sampling = Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=config.eos_token_ids,
    )
    tokens = read_prompt(request.prompt, request.model)
    check_prompt_length(config, len(tokens), request.max_new_tokens)
    has_tokenizer = (request.model / "tokenizer.json").is_file()
    tokenizer = Tokenizer(request.model) if has_tokenizer else None
    console = Console(stderr=True)
    cluster = LocalCluster(
        request.model,
        cp=request.cp,
        tp=request.tp,
        dtype=request.dtype,
        step_tokens=request.step_tokens,
        latent_format=request.latent_format,
        index_format=request.index_format,
        layout=request.layout,
        max_tokens=len(tokens) + request.max_new_tokens,
        trace=request.trace is not None,
        keep_unpooled_keys=request.dump is not None,
    )
    with console.status(f"starting {request.cp} prefill ranks and a decode worker"):
        cluster.start()
    with cluster:
        result = _prefill(cluster, tokens, request.max_new_tokens, console)
        generated = _generate(cluster, result, sampling, tokenizer, request.stop)
        stats = cluster.workers.stats()
        if request.dump is not None:
            cluster.dump(result.job, request.dump)
        report = build_report(
            cluster,
            result,
            stats,
            ttft_s=generated.first_token_at - result.accepted_at,
            output_tokens=generated.tokens,
            text=generated.text,
        )
    if request.trace is not None:
        write_chrome_trace(request.trace, stats)
    if request.json_file is not None:
        request.json_file.write_text(json.dumps(report.document, indent=2) + "\n")
    console.print(report.table())


def _prefill(cluster: LocalCluster, tokens, max_new_tokens: int, console: Console) -> PrefillResult:
    columns = (
        TextColumn("prefill"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("prefill", total=len(tokens), rate="")

        def on_step(step: StepDone) -> None:
            done = step.slices[-1].end
            rate = f"step {step.number + 1}/{step.num_steps}, {done / (time.perf_counter() - started):,.0f} tokens/s"
            progress.update(task, completed=done, rate=rate)

        return cluster.prefill(tokens, max_new_tokens=max_new_tokens, on_step=on_step)


def _generate(
    cluster: LocalCluster, result: PrefillResult, sampling: Sampling, tokenizer: Tokenizer | None, stop: tuple[str, ...]
) -> Generated:
    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    first_token_at = 0.0
    tokens: list[int] = []
    text = ""
    for token in cluster.generate(result.job, sampling):
        if not tokens:
            first_token_at = time.perf_counter()
        tokens.append(token.id)
        piece = f"{token.id}\n" if decoder is None else decoder.push(token.id)
        text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
        if any(mark in text for mark in stop):
            break
    if decoder is not None:
        rest = decoder.finish()
        text += rest
        sys.stdout.write(rest + "\n")
        sys.stdout.flush()
    return Generated(tokens=tokens, text=text, first_token_at=first_token_at)
