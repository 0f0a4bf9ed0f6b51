"""Seeded checkpoints: the same bytes for a seed, every parameter away from its neutral value, and the script."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longprefill.partition.errors import ModelError
from longprefill.workers.model.checkpoint import make_checkpoint, write_checkpoint
from longprefill.workers.model.config import KdaConfig, MlaConfig
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.tokenizer import Tokenizer, read_prompt
from longprefill.workers.model.weights import check_weights, load_weights

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_checkpoint"
HYBRID = RAW_CONFIGS["longprefill_hybrid", "tiny"]


def digests(directory: Path) -> dict[str, str]:
    """A hash of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), *(str(argument) for argument in arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=os.environ | environment
    )


@pytest.mark.parametrize("family", ["longprefill_hybrid", "kimi_linear"])
def test_a_seed_gives_the_same_bytes_in_any_process(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, "tiny", tmp_path / "here", seed=5)
    run = run_script(family, "tiny", tmp_path / "there", "--seed", 5, PYTHONHASHSEED="1", OMP_NUM_THREADS="2")
    assert run.returncode == 0, run.stderr
    assert f"{family} tiny" in run.stdout
    assert digests(tmp_path / "here") == digests(tmp_path / "there")
    other = make_checkpoint(family, "tiny", tmp_path / "other", seed=6)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(tmp_path / "here")["model.safetensors"]
    assert digests(tmp_path / "other")["tokenizer.json"] == digests(tmp_path / "here")["tokenizer.json"]
    assert Tokenizer(tmp_path / "here").vocab_size == other.vocab_size
    (tmp_path / "prompt").write_text("def prefill(tokens): return 'done 😀'")
    assert read_prompt(tmp_path / "prompt", tmp_path / "here").max() < other.vocab_size


def test_the_directory_looks_published(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "m", HYBRID, 0, torch.float32, num_files=4)
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    sizes = [(tmp_path / "m" / name).stat().st_size for name in files]
    assert max(sizes) < 2 * min(sizes)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(4 * math.prod(shape) for shape in parameter_shapes(config).values())
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "float32"
    assert read_config(tmp_path / "m") == config == config_from(HYBRID)
    check_weights(tmp_path / "m", config)


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ModelError, match="is not empty: give a new directory"):
        make_checkpoint("kimi_linear", "tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model kimi_linear huge: known are .*kimi_linear tiny"):
        make_checkpoint("kimi_linear", "huge", tmp_path / "m")
    with pytest.raises(ModelError, match=r"dtype='fp4' is not supported: use one of bf16, fp32, fp8"):
        make_checkpoint("kimi_linear", "tiny", tmp_path / "m", dtype="fp4")
    assert not (tmp_path / "m").exists()


def test_the_script_says_no_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    run = run_script("kimi_linear", "tiny", tmp_path)
    assert run.returncode == 2
    assert run.stderr == f"make_checkpoint: {tmp_path} is not empty: give a new directory\n"


def test_the_script_changes_fields(tmp_path: Path) -> None:
    """In the text model, and inside an object; beside the text model where the field is there."""
    sets = ["index_kpool=16", 'linear_attn_config={"head_dim": 12}', "vocab_size=301", "tie_word_embeddings=true"]
    run = run_script("glm5_next", "tiny", tmp_path / "m", *[word for value in sets for word in ("--set", value)])
    assert run.returncode == 0, run.stderr
    config = read_config(tmp_path / "m")
    mixers = [layer.mixer for layer in config.layers]
    assert isinstance(mixers[0], KdaConfig)
    assert isinstance(mixers[3], MlaConfig)
    assert mixers[3].indexer is not None
    assert (mixers[3].indexer.pool, mixers[0].key_dim, mixers[0].num_heads) == (16, 12, 4)
    assert (config.vocab_size, config.tie_embeddings) == (301, True)


def test_fields_that_cannot_be(tmp_path: Path) -> None:
    for fields, message in (
        ({"index_topkk": 8}, "index_topkk=8 changes nothing of this model: check its name and value"),
        ({"index_topk": 0}, "index_topk"),
    ):
        with pytest.raises(ModelError, match=message):
            make_checkpoint("deepseek_v32", "tiny", tmp_path / "m", fields=fields)
    run = run_script("deepseek_v32", "tiny", tmp_path / "m", "--set", "index_topk")
    assert run.returncode == 2
    assert "'index_topk' is not FIELD=JSON, for example index_topk=32" in run.stderr.splitlines()[-1]
    assert not (tmp_path / "m").exists()


def test_no_parameter_is_neutral(tmp_path: Path) -> None:
    """Zeros, ones and repeated values hide what is left out, swapped or read from the wrong place."""
    config = write_checkpoint(tmp_path / "m", HYBRID | {"index_kpool": 4}, 0, torch.float32)
    for name, value in load_weights(tmp_path / "m", config, dtype=torch.float32).items():
        assert (value != 0).all(), name
        assert value.unique().numel() > 0.9 * value.numel(), name
        assert value.std() > 0.01, name


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
def test_decays_are_spread_over_slow_and_fast(lower_bound: float | None) -> None:
    linear: dict[str, Any] = HYBRID["linear_attn_config"] | {"num_heads": 16, "num_value_heads": 32, "head_dim": 64}
    config = config_from(HYBRID | {"linear_attn_config": linear | {"gate_lower_bound": lower_bound}})
    kda = config.layers[0].mixer
    assert isinstance(kda, KdaConfig)
    shapes = parameter_shapes(config)
    a_log_G, dt_bias = (
        initial_parameter(name, shapes[name], config, 0) for name in ("layers.0.kda.a_log", "layers.0.kda.dt_bias")
    )
    dt_GK = dt_bias.view(kda.num_value_heads, kda.key_dim)
    slope_G1 = a_log_G.exp()[:, None]
    if lower_bound is None:
        decay_GK = slope_G1 * torch.nn.functional.softplus(dt_GK)
        assert 1.0 <= slope_G1.min() < 4.0 < 12.0 < slope_G1.max() <= 16.0
        low, high = 1e-3, 1.6
    else:
        decay_GK = -lower_bound * torch.sigmoid(slope_G1 * dt_GK)
        low, high = 0.005, min(1.0, -0.9 * lower_bound)
    assert decay_GK.min() >= low * 0.999
    assert decay_GK.max() <= high * 1.001
    assert decay_GK.max() / decay_GK.min() > 50
    assert a_log_G.unique().numel() == kda.num_value_heads
