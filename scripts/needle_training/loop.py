"""The training loop: stage after stage, a checkpoint every few minutes, a line of the curve every few steps.

A step's data depend on (seed, stage, step) only, so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import csv
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from longprefill.orchestrator.needle.filler import Filler
from longprefill.partition.errors import UserError
from longprefill.workers.model.parameters import parameter_shapes

from .curriculum import STAGES, Stage, config_of, grown, initial_parameters
from .data import Batch, make_batch
from .model import Asked, Outputs, Trainee
from .muon import Optimizer

TEXT_WEIGHT = 0.2
"""Of the loss of running text; that of answers has weight 1."""
INDEX_ANSWER_SHARE = 0.7
"""Of the index loss, carried by rows that predict answers."""
CLIP = 1.0
LINE_STEPS = 25
CHECKPOINT_S = 120.0
COLUMNS = ("stage", "step", "minutes", "answer_loss", "byte_acc", "first", "plain", "section", "absent", "text_loss",
           "index_loss", "grad_norm")  # fmt: skip
"""Of the curve: means over the steps since the last line. `plain`, `section`, `absent`: share of answers of that kind
with every byte right; `first`: of first digits."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a checkpoint holds."""

    parameters: dict[str, torch.Tensor]
    optimizer: Optimizer
    stage: int
    step: int
    """Steps of the stage that are done."""
    seconds: float
    """Spent on the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seed: int = 0
    """Of weights and data."""
    compiled: bool = False
    """Halves a step's time after a minute of torch.compile."""
    plain_residual: bool = False
    """Without Attention Residuals, to see what they change."""


def train(directory: Path, *, stages: tuple[str, ...], options: Options) -> Path:
    """Runs the named stages, each from the end of the one before it; goes on from what `directory` holds.

    Writes curve.csv, checkpoint.safetensors and STAGE.safetensors for each finished stage; returns the last of those.

    Raises:
        UserError: a stage that is not the first lacks the weights of the one before it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    filler = Filler("training")
    result = directory
    for number, stage in enumerate(STAGES):
        if stage.name not in stages:
            continue
        result = directory / f"{stage.name}.safetensors"
        if result.exists():
            continue
        progress = _resume(directory, number, options)
        _run(progress, stage, filler, directory, options)
        weights = {name: p.detach() for name, p in progress.parameters.items()}
        if stage.is_averaged:
            before = load_file(directory / f"{STAGES[number - 1].name}.safetensors")
            weights = {name: (before[name] + value) / 2 for name, value in weights.items()}
        _write_whole(result, weights)
    return result


def losses(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss of answers, of running text, all that is trained on without the index loss)."""
    each_N = F.cross_entropy(outputs.logits_BRV.flatten(0, 1), batch.targets_BR.flatten(), reduction="none")
    is_answer_N = batch.answer_BR.flatten() >= 0
    answer, text = each_N[is_answer_N].mean(), each_N[~is_answer_N].mean()
    return answer, text, answer + TEXT_WEIGHT * text


def index_weights(batch: Batch) -> torch.Tensor:
    """[B, R] that sum to 1."""
    is_answer_BR = batch.answer_BR >= 0
    answer, text = is_answer_BR.sum(), (~is_answer_BR).sum()
    return torch.where(is_answer_BR, INDEX_ANSWER_SHARE / answer, (1 - INDEX_ANSWER_SHARE) / text)


def _run(progress: Progress, stage: Stage, filler: Filler, directory: Path, options: Options) -> None:
    config = config_of(stage, plain_residual=options.plain_residual)
    model = Trainee(config, product_dtype=torch.bfloat16, compiled=options.compiled)
    tally = Tally()
    saved = started = time.perf_counter()
    before = progress.seconds
    while progress.step < stage.steps:
        rng = random.Random(f"{options.seed}/{stage.name}/{progress.step}")
        mix = stage.mix(progress.step / stage.steps)
        batch = make_batch(filler, mix, stage.batch, stage.length, stage.text_rows, rng)
        asked = Asked(rows_BR=batch.rows_BR, weight_BR=index_weights(batch))
        outputs = model(progress.parameters, batch.ids_BT, asked, with_index=stage.index_loss)
        answer, text, loss = losses(outputs, batch)
        (loss + outputs.index_loss).backward()
        rate = stage.rate(progress.step)
        norm = progress.optimizer.step(muon_rate=stage.muon_rate * rate, adam_rate=stage.adam_rate * rate, clip=CLIP)
        progress.step += 1
        progress.seconds = before + time.perf_counter() - started
        tally.add(batch, outputs, answer, text, norm)
        if progress.step % LINE_STEPS == 0 or progress.step == stage.steps:
            _write_line(
                directory / "curve.csv", [stage.name, progress.step, f"{progress.seconds / 60:.2f}", *tally.take()]
            )
        if time.perf_counter() - saved > CHECKPOINT_S or progress.step == stage.steps:
            _save(directory, progress)
            saved = time.perf_counter()


class Tally:
    """Sums over steps for one line of the curve."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, batch: Batch, outputs: Outputs, answer: torch.Tensor, text: torch.Tensor, norm: float) -> None:
        is_right_BR = outputs.logits_BRV.detach().argmax(-1) == batch.targets_BR
        is_answer_BR = batch.answer_BR >= 0
        width = int(batch.answer_BR.max()) + 1
        wrong = torch.zeros(len(batch.answer_BR), width, dtype=torch.int64)
        slot_BR = batch.answer_BR.clamp_min(0)
        wrong.scatter_add_(1, slot_BR, (is_answer_BR & ~is_right_BR).long())
        is_whole_BR = (wrong == 0).gather(1, slot_BR)
        is_first_BR = batch.place_BR == 0
        self._extend("answer_loss", [answer.item()])
        self._extend("text_loss", [text.item()])
        self._extend("index_loss", [outputs.index_loss.item()])
        self._extend("grad_norm", [norm])
        self._extend("byte_acc", is_right_BR[is_answer_BR].float().tolist())
        self._extend("first", is_right_BR[is_first_BR & (batch.kind_BR != 2)].float().tolist())
        for number, kind in enumerate(("plain", "section", "absent")):
            self._extend(kind, is_whole_BR[is_first_BR & (batch.kind_BR == number)].float().tolist())

    def take(self) -> list[str]:
        """Means in the order of COLUMNS from the fourth on; empty where nothing was counted."""
        line = [self.values.get(name, []) for name in COLUMNS[3:]]
        self.values = {}
        return [f"{sum(values) / len(values):.4f}" if values else "" for values in line]

    def _extend(self, name: str, values: list[float]) -> None:
        self.values.setdefault(name, []).extend(values)


def _write_line(path: Path, cells: list[object]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerow(cells)


def _save(directory: Path, progress: Progress) -> None:
    tensors = {f"parameter.{name}": p.detach() for name, p in progress.parameters.items()}
    tensors |= {f"optimizer.{name}": value for name, value in progress.optimizer.state.items()}
    tensors["position"] = torch.tensor([progress.stage, progress.step, int(progress.seconds)])
    _write_whole(directory / "checkpoint.safetensors", tensors)


def _write_whole(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The whole file or none, however the run ends."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def _resume(directory: Path, number: int, options: Options) -> Progress:
    """In the middle of the stage, or at its start from the last stage's weights."""
    config = config_of(STAGES[number], plain_residual=options.plain_residual)
    checkpoint = directory / "checkpoint.safetensors"
    if checkpoint.exists():
        tensors = load_file(checkpoint)
        stage, step, seconds = tensors.pop("position").tolist()
        if stage == number:
            # in the model's order: a file has them in another, and sums would round otherwise
            parameters = _trainable({name: tensors[f"parameter.{name}"] for name in parameter_shapes(config)})
            optimizer = Optimizer(parameters)
            optimizer.state = {name: tensors[f"optimizer.{name}"].clone() for name in optimizer.state}
            return Progress(parameters=parameters, optimizer=optimizer, stage=number, step=step, seconds=seconds)
    if number == 0:
        parameters = initial_parameters(config, options.seed)
    else:
        before = directory / f"{STAGES[number - 1].name}.safetensors"
        if not before.exists():
            name, earlier = STAGES[number].name, STAGES[number - 1].name
            raise UserError(f"--stage {name}: it starts from {before}: run --stage {earlier} first")
        parameters = grown(load_file(before), config)
    parameters = _trainable(parameters)
    return Progress(parameters=parameters, optimizer=Optimizer(parameters), stage=number, step=0, seconds=0.0)


def _trainable(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but the norm weights of Attention Residuals, which only multiply their queries."""
    return {name: p.clone().requires_grad_(not name.endswith("_res.norm")) for name, p in parameters.items()}
