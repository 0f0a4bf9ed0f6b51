"""What `longprefill align` is asked for, checked. Imports no torch, so that a wrong call is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from longprefill.orchestrator.plan import ClusterSettings, check_prompt_length
from longprefill.orchestrator.yardstick import yardstick_refusal
from longprefill.partition.errors import UserError
from longprefill.partition.steps import check_step_tokens
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import read_config, read_object
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.pieces import check_weights
from longprefill.workers.model.sharding import check_tp

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


WHOLE = "whole"


class MeshShape(NamedTuple):
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"{self.cp}x{self.tp}"


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    meshes: tuple[MeshShape, ...]
    lengths: tuple[int, ...]
    steps: tuple[int | None, ...]
    """None: the whole prompt at once."""


FULL = GridPlan(
    meshes=tuple(MeshShape(*pair) for pair in ((1, 1), (2, 1), (3, 1), (8, 1), (2, 2), (1, 4), (4, 2))),
    lengths=(1, 63, 64, 65, 127, 511, 1000, 4097),
    steps=(64, 192, None),
)
"""Of longprefill_hybrid."""
SHORT = GridPlan(
    meshes=(MeshShape(2, 1), MeshShape(3, 1), MeshShape(2, 2)), lengths=(65, 511, 1000), steps=(64, 192, None)
)
"""Of the other families."""
JOURNEY = (MeshShape(2, 1), MeshShape(1, 2), MeshShape(3, 1))
"""The meshes that one job passes through, a third of its tokens on each."""


def check_request(request: AlignRequest, config: ModelConfig) -> dict[str, Any]:
    """Settings of the mesh's cluster, all options checked.

    Raises:
        UserError: names the option and what is allowed.
    """
    if request.against not in AGAINST and not Path(request.against).is_dir():
        raise UserError(f"--against {request.against!r} is neither transformers, single nor a model directory")
    if request.against not in AGAINST:
        check_twin(config, Path(request.against))
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
    if request.grid:
        plan_of(request, config)
    return settings


def check_twin(config: ModelConfig, other_dir: Path) -> None:
    """Refuses a directory whose model has other layers or sizes: nothing of the two runs could be compared.

    Raises:
        UserError: names the first tensor that differs, or what is wrong with the directory.
    """
    other = read_config(other_dir)
    check_weights(other_dir, other)
    ours, theirs = parameter_shapes(config), parameter_shapes(other)
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"--against {other_dir} is another model: {name} is {_shape(theirs.get(name))} there and "
                f"{_shape(ours.get(name))} here: give a directory with the same layers and sizes"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape))


def check_oracle(model_dir: Path) -> None:
    """Refuses a model that transformers cannot be asked about.

    Raises:
        UserError: transformers is not installed, too old, or has no class for the family.
    """
    refusal = yardstick_refusal(str(read_object(model_dir / "config.json").get("model_type")))
    if refusal is not None:
        raise UserError(f"--against transformers: {refusal}: use --against single")


def plan_of(request: AlignRequest, config: ModelConfig) -> GridPlan:
    """The family's plan with what the request changes of it.

    Raises:
        UserError: a list that is not one, or a mesh that the model's heads do not allow.
    """
    default = FULL if config.family == "longprefill_hybrid" else SHORT
    try:
        meshes = default.meshes
        if request.meshes is not None:
            meshes = tuple(MeshShape(*map(int, pair.split("x", 1))) for pair in request.meshes.split(","))
        lengths = default.lengths
        if request.lengths is not None:
            lengths = tuple(int(length) for length in request.lengths.split(","))
        steps = default.steps
        if request.steps is not None:
            steps = tuple(None if step == WHOLE else int(step) for step in request.steps.split(","))
    except (ValueError, TypeError):
        options = {"--meshes": request.meshes, "--lengths": request.lengths, "--steps": request.steps}
        given = " ".join(f"{name} {value}" for name, value in options.items() if value is not None)
        raise UserError(f"{given}: use lists such as --meshes 2x1,2x2 --lengths 63,1000 --steps 64,whole") from None
    for mesh in meshes:
        if min(mesh) < 1:
            raise UserError(f"--meshes {mesh}: a mesh has at least 1x1 rank")
        check_tp(config, mesh.tp)
    for step in steps:
        if step is not None:
            check_step_tokens(step)
    longest = max(lengths)
    if min(lengths) < 1 or longest > config.max_tokens:
        raise UserError(f"--lengths {min(lengths)} to {longest}: this model takes prompts of 1 to {config.max_tokens}")
    return GridPlan(meshes=meshes, lengths=lengths, steps=steps)
