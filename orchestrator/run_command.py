"""`longprefill run`: everything checked first, then one prompt through a `LocalCluster` with progress and a report."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from longprefill.orchestrator.chrome_trace import write_chrome_trace
from longprefill.orchestrator.cluster import LocalCluster, PrefillResult
from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.orchestrator.plan import ClusterSettings, check_prompt_length
from longprefill.orchestrator.report import StepDone
from longprefill.orchestrator.run_report import RunReport, build_report
from longprefill.orchestrator.stop_text import StopText
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import STDIN, StreamDecoder, Tokenizer, read_prompt
from longprefill.workers.sampling import Sampling
from longprefill.workers.spec import WorkerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The options of `longprefill run`."""

    model: Path
    prompt: str
    cp: int
    tp: int
    expert_parallel: bool
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


def run_prompt(request: RunRequest) -> None:
    """Runs the request. Progress and the table go to standard error, the generated text to standard output.

    Raises:
        UserError: something about the request, the model, the prompt or the machine; nothing was started.
        RunFailed: a worker died, hung or failed.
    """
    outputs = {"--json": request.json_file, "--dump": request.dump, "--trace": request.trace}
    inputs = [request.model] if request.prompt == STDIN else [request.model, Path(request.prompt)]
    check_outputs(outputs, inputs=inputs)
    config = read_config(request.model)
    sampling = Sampling(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=config.eos_token_ids,
    )
    settings: dict[str, Any] = {
        "cp": request.cp,
        "tp": request.tp,
        "expert_parallel": request.expert_parallel,
        "dtype": request.dtype,
        "step_tokens": request.step_tokens,
        "latent_format": request.latent_format,
        "index_format": request.index_format,
        "layout": request.layout,
        "trace": request.trace is not None,
        "keep_unpooled_keys": request.dump is not None,
    }
    ClusterSettings(model_dir=str(request.model), **settings)  # a wrong option is told before a long prompt is read
    stop = StopText(request.stop)
    tokens = read_prompt(request.prompt, request.model)
    check_prompt_length(config, len(tokens), request.max_new_tokens)
    tokenizer = Tokenizer(request.model) if (request.model / "tokenizer.json").is_file() else None
    cluster = LocalCluster(request.model, max_tokens=len(tokens) + request.max_new_tokens, **settings)
    report, stats = _run(request, cluster, tokens, sampling, Printer(tokenizer, stop))
    if request.json_file is not None:
        with writing("--json", request.json_file):
            request.json_file.write_text(json.dumps(report.document, indent=2) + "\n")
    if request.trace is not None:
        with writing("--trace", request.trace):
            write_chrome_trace(request.trace, stats)
    Console(stderr=True).print(report.table())


class Printer:
    """Generated tokens to standard output: as text, or as one id a line where the model has no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stop: StopText) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stop = stop
        self.text = ""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to end

    def push(self, token: int) -> bool:
        """Shows a token; False once a stop text has ended the output."""
        self._show(self._stop.push(f"{token}\n" if self._decoder is None else self._decoder.push(token)))
        return not self._stop.is_reached

    def finish(self) -> None:
        """Shows what was held back."""
        if self._decoder is not None:
            self._show(self._stop.push(self._decoder.finish()))
        self._show(self._stop.finish())
        sys.stdout.write("" if self.text.endswith("\n") else "\n")
        sys.stdout.flush()

    def _show(self, piece: str) -> None:
        self.text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()


def _run(
    request: RunRequest, cluster: LocalCluster, tokens: np.ndarray, sampling: Sampling, printer: Printer
) -> tuple[RunReport, dict[str, WorkerStats]]:
    console = Console(stderr=True)
    try:
        with console.status(f"starting {request.cp} prefill ranks and a decode worker"):
            cluster.start()
        result = _prefill(cluster, tokens, request.max_new_tokens, console)
        generated: list[int] = []
        first_token_at = 0.0
        for token in cluster.generate(result.job, sampling):
            first_token_at = first_token_at or time.perf_counter()
            generated.append(token.id)
            if not printer.push(token.id):
                break
        printer.finish()
        stats = cluster.workers.stats()
        if request.dump is not None:
            cluster.dump(result.job, request.dump)
        ttft_s = first_token_at - result.accepted_at
        return build_report(cluster, result, stats, ttft_s=ttft_s, output_tokens=generated, text=printer.text), stats
    finally:
        cluster.close()


def _prefill(cluster: LocalCluster, tokens: np.ndarray, max_new_tokens: int, console: Console) -> PrefillResult:
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
