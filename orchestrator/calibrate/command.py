"""`longprefill bench --calibrate FILE`: the wrong calls that it refuses, its progress, and the file that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longprefill.orchestrator.calibrate.reduced import rank_share, reduced
from longprefill.orchestrator.calibrate.schedule import LONGEST_TOKENS, least_tokens
from longprefill.orchestrator.costs.profile_file import write_profile
from longprefill.orchestrator.memory import available_bytes, weight_bytes
from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.partition.errors import UserError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.sizes import RAW_CONFIGS

DEFAULT_MODELS = (("longprefill_hybrid", "small"), ("longprefill_hybrid", "bench"))
"""What `scripts/make_checkpoint` writes under these names."""
BUDGET_S = 160.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """What the command line asked for."""

    file: Path
    models: tuple[Path, ...] = ()
    """Directories with a config.json; none: the models that come with the scripts."""
    tp: int = 1
    """Tensor-parallel ranks whose share of each model is measured."""
    dtype: str = "bf16"
    latent_format: str | None = None
    index_format: str | None = None
    longest_tokens: int = LONGEST_TOKENS
    budget_s: float = BUDGET_S


def calibrate(request: CalibrateRequest) -> None:
    """Measures and writes the profile.

    Raises:
        UserError: a wrong call; nothing was started.
        RunFailed: a worker died or failed, or the file could not be written.
    """
    check_outputs({"--calibrate": request.file}, inputs=request.models)
    if request.file.suffix != ".json":
        raise UserError(f"--calibrate {request.file}: profiles are written as JSON: name the file .json")
    if not 1 <= request.budget_s <= 86400:
        raise UserError(f"--seconds {request.budget_s:g}: use 1 to 86400")
    wanted = [(str(path), read_config(path)) for path in request.models] or [
        (f"{family} {size}", config_from(RAW_CONFIGS[family, size])) for family, size in DEFAULT_MODELS
    ]
    settings = ClusterSettings(
        model_dir="",
        tp=request.tp,
        dtype=request.dtype,
        latent_format=request.latent_format,
        index_format=request.index_format,
    )
    shares = [(name, rank_share(config, request.tp)) for name, config in wanted]
    least = max(least_tokens(share) for _, share in shares)
    if request.longest_tokens < least:
        raise UserError(f"--longest {request.longest_tokens}: use {least} tokens or more for these models")
    for _, share in shares:
        _check_room(share, settings)
    _measure(request, [(name, share, settings) for name, share in shares])


def _check_room(config: ModelConfig, settings: ClusterSettings) -> None:
    needed = 2 * weight_bytes(reduced(config), max(settings.item_bytes, 4))
    if needed > available_bytes():
        raise UserError(
            f"one layer of every kind of {config.family} needs {needed / (1 << 30):.1f} GiB in two processes and "
            f"{available_bytes() / (1 << 30):.1f} GiB are free: calibrate a smaller model, or a share of it with --tp"
        )


def _measure(request: CalibrateRequest, models: list[tuple[str, ModelConfig, ClusterSettings]]) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from longprefill.orchestrator.calibrate.measure import Subject, measure

    subjects = [Subject(name=name, config=config, settings=settings) for name, config, settings in models]
    console = Console(stderr=True)
    with Progress(
        TextColumn("calibrate"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("calibrate", total=1.0, what="starting")
        profile = measure(
            subjects,
            name=request.file.stem,
            longest_tokens=request.longest_tokens,
            budget_s=request.budget_s,
            progress=lambda what, done: bar.update(task, completed=done, what=what),
        )
    with writing("--calibrate", request.file):
        write_profile(request.file, profile)
    num_points = sum(len(table.points) for table in profile.tables)
    console.print(f"{request.file}: {len(profile.tables)} tables, {num_points} points, {len(profile.links)} links")
