"""The model that scripts/train_needle trains is the engine's: equal logits, equal growth, and a run that resumes."""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longprefill.orchestrator.needle.filler import Filler
from longprefill.orchestrator.needle.words import Phrasing
from longprefill.partition.errors import UserError
from longprefill.workers.cache.pages import CacheFormats
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.tokenizer import Tokenizer
from longprefill.workers.model.weights import load_weights

from .engine_support import WHOLE, Engine, Job, run, steps_of
from .needle_support import MODEL_DIR

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LENGTH = 320


@pytest.fixture(scope="module")
def training():
    """The package of scripts/train_needle."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        names = ("curriculum", "data", "export", "loop", "model")
        yield {name: importlib.import_module(f"needle_training.{name}") for name in names}
    finally:
        sys.path.remove(str(SCRIPTS))


def drawn(curriculum, num_blocks: int, topk: int = 1024):
    """(config, parameters) in which every part matters: no zero query, no neutral norm."""
    config = config_from(curriculum.raw_config(num_blocks) | {"index_topk": topk})
    parameters = curriculum.initial_parameters(config, 1)
    generator = torch.Generator().manual_seed(2)
    for name, value in parameters.items():
        noise = 0.1 * torch.randn(value.shape, generator=generator)
        if name.endswith(("_res.query", "k_norm.bias", "kda.a_log")):
            parameters[name] = noise
        elif "norm" in name:
            parameters[name] = value * (1 + noise)
    return config, parameters


def asked_rows(model, rows: list[int]):
    rows_BR = torch.tensor([rows])
    return model.Asked(rows_BR=rows_BR, weight_BR=torch.full(rows_BR.shape, 1 / len(rows)))


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_training_computes_what_the_engine_computes(training, num_blocks: int) -> None:
    config, parameters = drawn(training["curriculum"], num_blocks)
    ids_BT = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    asked = training["model"].Asked(
        rows_BR=torch.tensor([[50, LENGTH - 1], [LENGTH - 1, 100]]), weight_BR=torch.full((2, 2), 0.25)
    )
    with torch.no_grad():
        ours = training["model"].Trainee(config)(parameters, ids_BT, asked).logits_BRV
    formats = CacheFormats(latent="fp32", index_key="fp32")
    engine = Engine(config=config, model=Model(config, dict(parameters)), dtype=torch.float32, formats=formats)
    for sequence, place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row = int(asked.rows_BR[sequence, place])
        job = Job(number=0, tokens=ids_BT[sequence, : row + 1])
        theirs = run(engine, [job], steps_of([job], WHOLE), permuted=False).outcomes[0]["logits"]
        difference = (ours[sequence, place] - theirs).norm() / theirs.norm()
        assert difference < 1e-5


def test_gradients_survive_saturated_gates(training) -> None:
    """A tile whose gates all forget as fast as they can: its decays span exp(+-80)."""
    config, parameters = drawn(training["curriculum"], 1)
    for name in parameters:
        if name.endswith("kda.dt_bias"):
            parameters[name] = torch.full_like(parameters[name], 100.0)
    parameters = {name: p.requires_grad_() for name, p in parameters.items()}
    ids_BT = torch.randint(0, 256, (1, 96), generator=torch.Generator().manual_seed(6))
    outputs = training["model"].Trainee(config)(parameters, ids_BT, asked_rows(training["model"], [40, 95]))
    outputs.logits_BRV.logsumexp(-1).sum().backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters.values())


def test_growth_keeps_the_function(training) -> None:
    curriculum, model = training["curriculum"], training["model"]
    config, parameters = drawn(curriculum, 1)
    deeper = config_from(curriculum.raw_config(2))
    ids_BT = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(4))
    asked = asked_rows(model, [10, 63])
    with torch.no_grad():
        before = model.Trainee(config)(parameters, ids_BT, asked).logits_BRV
        after = model.Trainee(deeper)(curriculum.grown(parameters, deeper), ids_BT, asked).logits_BRV
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_parameter(training) -> None:
    config, parameters = drawn(training["curriculum"], 2)
    parameters = {name: p.requires_grad_() for name, p in parameters.items()}
    ids_BT = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(5))
    outputs = training["model"].Trainee(config)(parameters, ids_BT, asked_rows(training["model"], [10, 40, 63]))
    (outputs.logits_BRV.logsumexp(-1).sum() + outputs.index_loss).backward()
    idle = [name for name, p in parameters.items() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    # nothing precedes the embedding, so the first mix has one source and its query no choice
    assert idle == ["layers.0.mixer_res.query", "layers.0.mixer_res.norm"]


def test_answers_of_a_batch_follow_their_questions(training) -> None:
    data = training["data"]
    mix = data.Mix(phrasing=Phrasing(), sections=0.5, absent=0.5, siblings=0.3, max_gap=64)
    batch = data.make_batch(Filler("training"), mix, 4, 1024, 16, random.Random(0))
    kinds = set()
    for sequence in range(4):
        text = bytes(batch.ids_BT[sequence].tolist()).decode()
        for number in range(int(batch.answer_BR[sequence].max()) + 1):
            rows = batch.rows_BR[sequence][batch.answer_BR[sequence] == number].tolist()
            targets = batch.targets_BR[sequence][batch.answer_BR[sequence] == number].tolist()
            kind = int(batch.kind_BR[sequence][batch.answer_BR[sequence] == number][0])
            answer = bytes(targets[:-1]).decode()
            kinds.add(kind)
            assert targets[-1] == data.EOS_ID
            assert text[rows[0] + 1 : rows[-1] + 1] == answer
            assert (answer == "unknown") == (kind == 2)
            if kind != 2:
                assert text.index(answer) < rows[0], "the fact stands before the question"
        is_text = batch.answer_BR[sequence] < 0
        rows, targets = batch.rows_BR[sequence][is_text], batch.targets_BR[sequence][is_text]
        assert torch.equal(batch.ids_BT[sequence][rows + 1], targets)
    assert kinds == {0, 1, 2}


def test_export_writes_the_committed_model(training, tmp_path: Path) -> None:
    config = read_config(MODEL_DIR)
    weights = load_weights(MODEL_DIR, config, dtype=torch.float32)
    save_file({name: value.float() for name, value in weights.items()}, tmp_path / "H.safetensors")
    training["export"].export(tmp_path / "H.safetensors", 2, tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (MODEL_DIR / name).read_bytes(), name
    text = bytes(range(128)).decode() + "\u00fc\u20ac"
    assert Tokenizer(tmp_path / "model").encode(text) == Tokenizer(MODEL_DIR).encode(text) == list(text.encode())


def test_a_stage_without_the_one_before_it_is_refused(training, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--stage C: it starts from .*B.safetensors: run --stage B first"):
        training["loop"].train(tmp_path, stages=("C",), options=training["loop"].Options())


def test_a_stopped_run_goes_on_as_if_it_had_not(training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, curriculum = training["loop"], training["curriculum"]
    short = dataclasses.replace(curriculum.STAGES[0], length=64, batch=2, steps=4, text_rows=4)
    monkeypatch.setattr(loop, "STAGES", (short,))
    whole = loop.train(tmp_path / "whole", stages=("A",), options=loop.Options())

    class Stop(Exception):
        pass

    real = loop.make_batch
    calls = []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise Stop
        return real(*arguments)

    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(loop, "make_batch", stopping)
    with pytest.raises(Stop):
        loop.train(tmp_path / "cut", stages=("A",), options=loop.Options())
    resumed = loop.train(tmp_path / "cut", stages=("A",), options=loop.Options())
    assert len(calls) == 5
    assert resumed.read_bytes() == whole.read_bytes()


def test_an_averaged_stage_leaves_the_mean_of_its_start_and_its_end(
    training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, curriculum = training["loop"], training["curriculum"]
    first = dataclasses.replace(curriculum.STAGES[0], length=64, batch=2, steps=2, text_rows=4)
    second = dataclasses.replace(first, name="B")
    ends: dict[str, dict[str, torch.Tensor]] = {}
    for is_averaged in (False, True):
        stages = (first, dataclasses.replace(second, is_averaged=is_averaged))
        monkeypatch.setattr(loop, "STAGES", stages)
        directory = tmp_path / str(is_averaged)
        loop.train(directory, stages=("A", "B"), options=loop.Options())
        ends[f"B {is_averaged}"] = load_file(directory / "B.safetensors")
        ends["A"] = load_file(directory / "A.safetensors")
    for name, start in ends["A"].items():
        assert torch.equal(ends["B True"][name], (start + ends["B False"][name]) / 2), name
    assert not torch.equal(ends["B True"]["embed"], ends["B False"]["embed"])
