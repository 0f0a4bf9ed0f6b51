"""One alignment: the yardstick, then our mesh, then the table; and what a grid shares with it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from rich.console import Console

from longprefill.orchestrator.align.compare import Row, compare
from longprefill.orchestrator.align.mesh import observe_mesh, whole_step
from longprefill.orchestrator.align.observation import EXACT, Numbers, Observation
from longprefill.orchestrator.align.oracle import Oracle
from longprefill.orchestrator.align.quantization import PathEffect, effects_table, measure_paths
from longprefill.orchestrator.align.report import table_of
from longprefill.orchestrator.align.request import DEFAULT_TOKENS, AlignRequest
from longprefill.orchestrator.align.single import SingleRank
from longprefill.orchestrator.cluster import LocalCluster
from longprefill.orchestrator.plan import check_prompt_length
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.tokenizer import read_prompt


class Yardstick(Protocol):
    """transformers' class or one rank of ours, in fp32."""

    def run(self, tokens: np.ndarray) -> Observation:
        """The whole prompt at once, with its choices recorded."""
        ...


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


def align_once(
    request: AlignRequest, config: ModelConfig, settings: dict[str, Any], tokens: np.ndarray, console: Console
) -> tuple[list[Row], list[PathEffect]]:
    """Prints the tables; all comparisons, and what each quantized cache does.

    Raises:
        UserError: no room for the mesh on this machine; nothing was started.
        RunFailed: a worker died, hung or failed.
    """
    numbers = numbers_of(request)
    cluster = LocalCluster(request.model, decode=False, max_tokens=len(tokens), **settings)
    with console.status(f"{request.against}: {len(tokens)} tokens"):
        expected = make_yardstick(request).run(tokens)
        base, effects = None, []
        if not numbers.is_exact:
            rank = SingleRank(request.model, numbers)
            effects = measure_paths(rank, numbers, tokens)
            base = rank.run(tokens, expected.record)
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
    if effects:
        console.print(effects_table(effects, len(tokens)))
    return rows, effects
