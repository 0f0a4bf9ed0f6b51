"""`longprefill align`: everything checked first, then the yardstick, our mesh, one table and one last line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console

from longprefill.orchestrator.align.compare import Row, compare, first_deviation
from longprefill.orchestrator.align.mesh import observe_mesh, whole_step
from longprefill.orchestrator.align.observation import Observation
from longprefill.orchestrator.align.oracle import Oracle, check_oracle
from longprefill.orchestrator.align.report import document_of, last_line, table_of
from longprefill.orchestrator.align.single import EXACT, Numbers, SingleRank
from longprefill.orchestrator.cluster import LocalCluster
from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.orchestrator.plan import ClusterSettings, check_prompt_length
from longprefill.partition.errors import UserError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.sharding import check_tp
from longprefill.workers.model.tokenizer import read_prompt
from longprefill.workers.model.weights import check_weights

STDOUT = Path("-")
DEFAULT_TOKENS = 1000
AGAINST = ("transformers", "single")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignRequest:
    """The options of `longprefill align`."""

    model: Path
    tokens: int | None
    prompt: str | None
    cp: int
    tp: int
    expert_parallel: bool
    step_tokens: int | None
    dtype: str
    latent_format: str | None
    index_format: str | None
    against: str
    replay_choices: bool
    grid: bool
    meshes: str | None
    lengths: str | None
    steps: str | None
    json_file: Path | None
    tolerance: float
    seed: int


class Yardstick(Protocol):
    """transformers' class or one rank of ours, in fp32."""

    def run(self, tokens: np.ndarray) -> Observation:
        """The whole prompt at once, with its choices recorded."""
        ...


def align(request: AlignRequest) -> bool:
    """Runs the request; whether all agree. The table goes to standard output, or to standard error where the JSON
    document goes to standard output.

    Raises:
        UserError: something about the request, the model, the prompt or the machine; nothing was started.
        RunFailed: a worker died, hung or failed.
    """
    check_outputs({"--json": None if request.json_file == STDOUT else request.json_file}, inputs=[request.model])
    config = read_config(request.model)
    check_weights(request.model, config)
    settings = check_request(request, config)
    console = Console(stderr=request.json_file == STDOUT)
    if request.grid:
        from longprefill.orchestrator.align.grid import walk

        document, line, agrees = walk(request, config, settings, console)
    else:
        rows = _align_once(request, config, settings, prompt_of(request, config), console)
        line, agrees = last_line(rows), first_deviation(rows) is None
        document = {"rows": document_of(rows)}
    _write(
        request, {"agrees": agrees, "last_line": line, "against": request.against, "dtype": request.dtype} | document
    )
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return agrees


def check_request(request: AlignRequest, config: ModelConfig) -> dict[str, Any]:
    """Settings of the mesh's cluster, all options checked.

    Raises:
        UserError: names the option and what is allowed.
    """
    if request.against not in AGAINST and not Path(request.against).is_dir():
        raise UserError(f"--against {request.against!r} is neither transformers, single nor a model directory")
    if not 0 < request.tolerance < 1:
        raise UserError(f"--tolerance {request.tolerance}: use a number between 0 and 1, for example 1e-5")
    if not request.grid and any((request.meshes, request.lengths, request.steps)):
        raise UserError("--meshes, --lengths and --steps belong to --grid: add it, or use --cp, --tp and --step-tokens")
    if request.grid and (request.prompt is not None or request.tokens is not None):
        raise UserError("--grid has random prompts of its own: use --lengths instead of --tokens and --prompt")
    if request.tokens is not None and request.prompt is not None:
        raise UserError("--tokens and --prompt exclude each other: give one of them")
    if request.tokens is not None:
        check_prompt_length(config, request.tokens, 0)
    settings = {
        "cp": request.cp,
        "tp": request.tp,
        "expert_parallel": request.expert_parallel,
        "dtype": request.dtype,
        "step_tokens": request.step_tokens,
        "latent_format": request.latent_format,
        "index_format": request.index_format,
    }
    ClusterSettings(model_dir=str(request.model), **settings)
    check_tp(config, request.tp)
    if request.against == "transformers":
        check_oracle(request.model)
    return settings


def numbers_of(request: AlignRequest) -> Numbers:
    """In which numbers the mesh computes and keeps rows."""
    return Numbers(
        dtype=request.dtype,
        latent=request.latent_format or request.dtype,
        index=request.index_format or request.dtype,
    )


def prompt_of(request: AlignRequest, config: ModelConfig) -> np.ndarray:
    """The prompt's token ids, or seeded random ones."""
    if request.prompt is not None:
        tokens = np.asarray(read_prompt(request.prompt, request.model))
        check_prompt_length(config, len(tokens), 0)
        return tokens
    return random_tokens(request, config, DEFAULT_TOKENS if request.tokens is None else request.tokens)


def random_tokens(request: AlignRequest, config: ModelConfig, num_tokens: int) -> np.ndarray:
    """Seeded token ids, int64 [num_tokens]."""
    return np.random.default_rng((request.seed, num_tokens)).integers(0, config.vocab_size, num_tokens)


def make_yardstick(request: AlignRequest) -> Yardstick:
    """What the mesh is compared with, always exact."""
    if request.against == "transformers":
        return Oracle(request.model)
    return SingleRank(request.model if request.against == "single" else request.against, EXACT)


def _align_once(
    request: AlignRequest, config: ModelConfig, settings: dict[str, Any], tokens: np.ndarray, console: Console
) -> list[Row]:
    numbers = numbers_of(request)
    cluster = LocalCluster(request.model, decode=False, max_tokens=len(tokens), **settings)
    with console.status(f"{request.against}: {len(tokens)} tokens"):
        expected = make_yardstick(request).run(tokens)
        base = None if numbers.is_exact else SingleRank(request.model, numbers).run(tokens, expected.record)
    with console.status(f"{settings['cp']} x {settings['tp']} ranks"), cluster:
        actual = observe_mesh(
            cluster,
            tokens,
            step_tokens=request.step_tokens or whole_step(len(tokens)),
            record=expected.record,
            replay=request.replay_choices or not numbers.is_exact,
        )
    rows = compare(config, expected, actual, tolerance=request.tolerance, base=base)
    expert = ", experts spread" if request.expert_parallel else ""
    title = (
        f"{config.family}, {len(tokens)} tokens, CP {request.cp} x TP {request.tp}{expert}, {request.dtype}, against "
        f"{request.against}"
    )
    console.print(table_of(rows, title))
    return rows


def _write(request: AlignRequest, document: dict[str, Any]) -> None:
    if request.json_file is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if request.json_file == STDOUT:
        sys.stdout.write(text)
        return
    with writing("--json", request.json_file):
        request.json_file.write_text(text)
