"""`longprefill plan`: how a prompt would be prefilled on a cluster, what that takes, and why not otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.orchestrator.planner.candidate import Candidate, PlanError, PlanRequest
from longprefill.orchestrator.planner.crossovers import crossovers
from longprefill.orchestrator.planner.evaluate import Evaluator
from longprefill.orchestrator.planner.machines import machines_of
from longprefill.orchestrator.planner.models import find_model
from longprefill.orchestrator.planner.report import document, rounded
from longprefill.orchestrator.planner.search import choose
from longprefill.orchestrator.simulator.cluster import Cluster, read_cluster
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.partition.work import Exchange
from longprefill.workers.model.config import ModelConfig


def plan(request: PlanRequest, json_file: Path | None) -> None:
    """Plans, prints, and writes the JSON (`-`: prints that instead).

    Raises:
        UserError: a wrong request, an unreadable file, or no plan, with what would make one.
        RunFailed: the JSON could not be written.
    """
    is_printed = json_file is not None and str(json_file) == "-"
    if json_file is not None and not is_printed:
        check_outputs({"--json": json_file}, inputs=[request.cluster])
    config = find_model(request.model)
    cluster = read_cluster(request.cluster)
    if request.tokens > config.max_tokens:
        raise PlanError(
            f"--tokens {request.tokens}: {request.model} takes {config.max_tokens} tokens at most "
            "(max_position_embeddings or model_max_length of its config.json): use fewer"
        )
    if len(request.devices) > 1:
        content: dict[str, object] = {"kind": "modelled", "scaling": scaling(config, request, cluster)}
        if not is_printed:
            from longprefill.orchestrator.planner.tables import show_scaling

            show_scaling(content["scaling"])  # pyright: ignore[reportArgumentType]
    else:
        evaluator = evaluator_of(config, request, cluster, request.devices[0] if request.devices else None)
        choice = choose(evaluator)
        borders = crossovers(evaluator, choice.best)
        content = document(evaluator, choice, borders)
        if not is_printed:
            from longprefill.orchestrator.planner.tables import show

            show(evaluator, choice, borders)
    if is_printed:
        print_json(rounded(content))
    elif json_file is not None:
        with writing("--json", json_file):
            json_file.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")


def evaluator_of(config: ModelConfig, request: PlanRequest, cluster: Cluster, num_devices: int | None) -> Evaluator:
    """Everything that estimates need, for the first `num_devices` of the cluster or all."""
    machines = machines_of(cluster, f"--cluster {request.cluster}", num_devices)
    return Evaluator(config, request, machines, has_decode=cluster.decode.num_workers > 0)


def scaling(config: ModelConfig, request: PlanRequest, cluster: Cluster) -> list[dict[str, object]]:
    """A row for each number of devices: the plan, and the same mesh by every exchange of KDA states."""
    rows: list[dict[str, object]] = []
    evaluators = [evaluator_of(config, request, cluster, num_devices) for num_devices in request.devices]
    alone_s = one_device_s(evaluators[0])
    for num_devices, evaluator in zip(request.devices, evaluators, strict=True):
        best = choose(evaluator).best
        by_exchange = {
            exchange: evaluator.estimate(replace(best.candidate, exchange=exchange)) for exchange in get_args(Exchange)
        }
        rows.append(
            {
                "devices": num_devices,
                "plan": best.candidate.describe(),
                "layout": best.candidate.layout,
                "steps": best.prompt.num_steps,
                "seconds": best.prefill_s,
                "efficiency": None if alone_s is None else alone_s / (num_devices * best.prefill_s),
                **{f"{name}_s": None if found is None else found.prefill_s for name, found in by_exchange.items()},
                "exposed_s": best.prompt.exposed_s,
                "waiting_s": best.prompt.waiting_s,
                "memory_gib": best.memory.total / (1 << 30),
            }
        )
    return rows


def one_device_s(evaluator: Evaluator) -> float | None:
    """The prompt on one device, whether it has the memory or not; None: a rate that it needs is not known."""
    request = evaluator.request
    step = min(65_536, -(-request.tokens // PAGE_TOKENS) * PAGE_TOKENS)
    candidate = Candidate(
        cp=1,
        tp=1,
        step_tokens=step,
        latent_format=request.latent_format or request.dtype,
        index_format=request.index_format or request.dtype,
    )
    estimate = evaluator.estimate(candidate)
    return None if estimate is None else estimate.prefill_s


def device_numbers(text: str | None) -> tuple[int, ...]:
    """Numbers as in 16,32,64.

    Raises:
        PlanError: something else.
    """
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise PlanError(f"--devices {text}: use whole numbers above 0, as in 16,32,64")
    return tuple(int(part) for part in parts)


def print_json(content: object) -> None:
    """The object on standard output."""
    import typer

    typer.echo(json.dumps(content, indent=1))
