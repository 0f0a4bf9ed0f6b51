"""`longprefill align` as a user starts it: a mesh of actors, the table, JSON, exit codes, the last line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longprefill.workers.model.checkpoint import write_checkpoint
from longprefill.workers.model.sizes import RAW_CONFIGS

from .support.command import run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "mesh"
    write_checkpoint(directory, RAW_CONFIGS["longprefill_hybrid", "mesh"], 3, torch.float32)
    return directory


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model."""
    directory = tmp_path_factory.mktemp("models") / "other"
    write_checkpoint(directory, RAW_CONFIGS["kimi_linear", "tiny"], 3, torch.float32)
    return directory


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_mesh_agrees_with_one_rank(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "align.json"
    mesh = ("--cp", 2, "--tp", 2, "--expert-parallel", "--step-tokens", 128)
    done = run("align", "--model", model, "--tokens", 300, *mesh, "--json", report)
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(report.read_text())
    assert last_line(done.out) == document["last_line"]
    assert document["last_line"].startswith(f"all {len(document['rows'])} comparisons agree")
    assert document["agrees"]
    assert {row["layer"] for row in document["rows"]} == {0, 1, 2, 3, None}
    assert {"state", "conv", "latent", "index key", "index choices", "logits"} <= {
        row["what"] for row in document["rows"]
    }
    assert all(row["rms"] <= 1e-5 and not row["problem"] for row in document["rows"])


@pytest.mark.extended
def test_a_changed_weight_is_named(model: Path, tmp_path: Path) -> None:
    """Against a twin whose layer 2 has another output projection: exit 1, and the table goes to standard error where
    the document goes to standard output."""
    twin = shutil.copytree(model, tmp_path / "twin")
    tensors = load_file(twin / "model.safetensors")
    (name,) = [name for name in tensors if ".layers.2." in name and name.endswith("self_attn.o_proj.weight")]
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    done = run(
        "align", "--model", model, "--tokens", 130, "--tp", 2, "--against", twin, "--replay-choices", "--json", "-"
    )
    assert done.code == 1, done.err
    document = json.loads(done.out)
    assert not document["agrees"]
    assert last_line(done.err).startswith("first deviation: layer 2 (kda) mixer output: 1.0e-03 > 1e-05")
    assert document["last_line"] == last_line(done.err)


def test_bf16_and_quantized_caches_within_the_rule(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "align.json"
    formats = ("--latent-format", "fp8", "--index-format", "mxfp8")
    done = run("align", "--model", model, "--tokens", 700, "--cp", 2, "--dtype", "bf16", *formats, "--json", report)
    assert done.code == 0, last_line(done.out)
    document = json.loads(report.read_text())
    codes = [row for row in document["rows"] if row["what"].endswith("codes")]
    assert [(row["layer"], row["what"], row["rms"]) for row in codes] == [
        (layer, what, 0.0) for layer in (1, 3) for what in ("latent codes", "index key codes")
    ]
    paths = {(path["latent"], path["index"]): path for path in document["quantization"]}
    assert list(paths) == [("fp8", "bf16"), ("bf16", "mxfp8"), ("fp8", "mxfp8")]
    assert "quantized caches beside unquantized ones" in done.out
    assert all(0 < path["recall"] <= 1 and 0 < path["logits_rms"] < 1 for path in paths.values())
    # latents do not steer the first indexer
    assert paths["fp8", "bf16"]["recall_by_layer"]["1"] == 1.0 > paths["bf16", "mxfp8"]["recall_by_layer"]["1"]


@pytest.mark.extended
def test_a_grid_and_a_job_that_changes_meshes(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "grid.json"
    plan = ("--meshes", "2x1,1x2", "--lengths", "1,400", "--steps", "128,whole")
    done = run("align", "--model", model, "--grid", *plan, "--expert-parallel", "--json", report)
    assert done.code == 0, done.out + done.err
    runs = json.loads(report.read_text())["runs"]
    assert [(row["mesh"], row["tokens"], row["step"]) for row in runs] == [
        ("2x1", 1, "whole"), ("2x1", 400, "128"), ("2x1", 400, "whole"),
        ("1x2", 1, "whole"), ("1x2", 400, "128"), ("1x2", 400, "whole"),
        ("2x1>1x2>3x1", 400, "whole"),
    ]  # fmt: skip
    assert all(row["ok"] for row in runs)
    assert last_line(done.out).startswith("all 7 runs agree")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--against", "transformers"), "it has no class for longprefill_hybrid: use --against single"),
        (("--against", "fla"), "neither transformers, single nor a model directory"),
        (("--against", "{other}"), "is another model: embed is 512x64 there and 509x64 here: give a directory"),
        (("--tp", "3"), "--tp 3 does not divide the 4 KDA heads of layer 0: use 1, 2, 4"),
        (("--tokens", "0"), "the prompt is empty"),
        (("--tokens", "5", "--prompt", "x"), "--tokens and --prompt exclude each other"),
        (("--tolerance", "2"), "--tolerance 2.0: use a number between 0 and 1"),
        (("--grid", "--meshes", "2"), "use lists such as --meshes 2x1,2x2"),
        (("--grid", "--meshes", "1x3"), "--tp 3 does not divide"),
        (("--grid", "--steps", "100"), "100"),
        (("--grid", "--lengths", "0"), "--lengths 0 to 0"),
        (("--meshes", "1x2"), "--meshes, --lengths and --steps belong to --grid"),
        (("--json", "/nowhere/x.json"), "there is no directory"),
    ],
)
def test_wrong_calls(model: Path, other: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("align", "--model", model, *(argument.format(other=other) for argument in arguments))
    assert done.code == 2
    assert message in done.line
