"""Loading: hand-named hybrid checkpoints, spellings, ranges and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from longprefill.orchestrator.memory import weight_bytes
from longprefill.workers.model import weights
from longprefill.workers.model.checkpoint import DEAD_HEAD_A_LOG, write_checkpoint
from longprefill.workers.model.families.base import Part
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.parameters import FP32_PARAMETERS, parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.stored import fingerprint, read_stored_tensors
from longprefill.workers.model.weights import Piece, TensorReader, check_weights, load_weights

from .weights_cases import FULL_RAW, FULL_TENSORS, L0, L1, copy_model, hand_made, save_model, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


def test_hand_made_hybrid_loads_part_by_part(tmp_path: Path) -> None:
    stored = hand_made()
    loaded = load_weights(save_model(tmp_path / "m", FULL_RAW, stored), config_from(FULL_RAW), dtype=torch.float32)
    assert list(loaded) == list(parameter_shapes(config_from(FULL_RAW)))
    attention, mlp = "self_attn.", "mlp."
    conv = [stored[f"{L0}{attention}{letter}_conv1d.weight"].squeeze(1) for letter in "qkv"]
    experts = [
        [stored[f"{L1}mlp.experts.{number}.{word}_proj.weight"] for word in ("gate", "up", "down")]
        for number in range(3)
    ]
    expected = {
        "embed": stored["model.embed_tokens.weight"],
        "head": stored["lm_head.weight"],
        "final_res.query": stored["model.final_res.query"],
        "layers.0.kda.conv": torch.cat(conv),
        "layers.0.kda.a_log": stored[L0 + "self_attn.A_log"][:4],
        "layers.0.kda.g_proj": stored[L0 + "self_attn.g_proj.weight"],
        "layers.0.ffn.gate_up": torch.cat([stored[f"{L0}{mlp}{word}_proj.weight"] for word in ("gate", "up")]),
        "layers.0.ffn.down": stored[L0 + "mlp.down_proj.weight"],
        "layers.0.mixer_res.norm": stored[L0 + "mixer_res.norm.weight"],
        "layers.1.mla.g_proj": stored[L1 + "self_attn.g_proj.weight"],
        "layers.1.indexer.k_norm.bias": stored[L1 + "self_attn.indexer.k_norm.bias"],
        "layers.1.indexer.pool_bias": stored[L1 + "self_attn.indexer.index_kpool_compress_ape"],
        "layers.1.moe.gate_up": torch.stack([torch.cat([gate, up]) for gate, up, _ in experts]),
        "layers.1.moe.down": torch.stack([down for _, _, down in experts]),
        "layers.1.moe.latent_in": stored[L1 + "mlp.latent_in_proj.weight"],
        "layers.1.moe.latent_out": stored[L1 + "mlp.latent_out_proj.weight"],
        "layers.1.moe.shared_gate_up": torch.cat(
            [stored[f"{L1}mlp.shared_experts.{word}_proj.weight"] for word in ("gate", "up")]
        ),
    }
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def other_spelling(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model with fused experts, one conv, the forget gate as a module, A_log in four dimensions."""
    fused = {name: value for name, value in stored.items() if ".experts." not in name and "_conv1d" not in name}
    fused[L0 + "self_attn.conv1d.weight"] = torch.cat(
        [stored[f"{L0}self_attn.{letter}_conv1d.weight"] for letter in "qkv"]
    )
    for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
        fused[f"{L0}self_attn.forget_gate.{name}"] = fused.pop(f"{L0}self_attn.{name}")
    fused[L0 + "self_attn.forget_gate.A_log"] = fused[L0 + "self_attn.forget_gate.A_log"].reshape(1, 1, 7, 1)

    def stacked(word: str) -> torch.Tensor:
        return torch.stack([stored[f"{L1}mlp.experts.{number}.{word}_proj.weight"] for number in range(3)])

    fused[L1 + "mlp.experts.gate_up_proj"] = torch.cat([stacked("gate"), stacked("up")], dim=1)
    fused[L1 + "mlp.experts.down_proj"] = stacked("down")
    return fused


def numbered_spelling(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model with Kimi's expert names."""
    renamed = {}
    for name, value in stored.items():
        name = name.replace(L1 + "mlp.", L1 + "block_sparse_moe.")
        for word, number in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            if ".experts." in name:
                name = name.replace(f"{word}_proj", number)
        renamed[name] = value
    return renamed


@pytest.mark.parametrize("spelling", [other_spelling, numbered_spelling])
def test_spellings_load_the_same(spelling: Callable[..., dict[str, torch.Tensor]], tmp_path: Path) -> None:
    stored, config = hand_made(), config_from(FULL_RAW)
    expected = load_weights(save_model(tmp_path / "a", FULL_RAW, stored), config, dtype=torch.float32)
    renamed = spelling(stored)
    assert renamed.keys() != stored.keys()
    loaded = load_weights(save_model(tmp_path / "b", FULL_RAW, renamed), config, dtype=torch.float32)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_written_names_are_the_published_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", FULL_RAW, 0, torch.float32)
    written = load_file(tmp_path / "m" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in written.items()} == FULL_TENSORS
    assert written[L0 + "self_attn.A_log"][4:].tolist() == [DEAD_HEAD_A_LOG] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, tiny: Path) -> None:
    config = read_config(tiny)
    loaded = load_weights(tiny, config, dtype=dtype)
    for name, value in loaded.items():
        assert value.dtype == (torch.float32 if name.endswith(FP32_PARAMETERS) else dtype), name
        assert value.is_contiguous()
        assert torch.isfinite(value).all()
    assert weight_bytes(config, dtype.itemsize) == sum(value.nbytes for value in loaded.values())


def test_small_slabs_and_reopened_files_change_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(tiny)
    expected = load_weights(tiny, config, dtype=torch.bfloat16)
    monkeypatch.setattr(weights, "SLAB_BYTES", 1000)
    monkeypatch.setattr(weights, "REOPEN_BYTES", 5000)
    loaded = load_weights(tiny, config, dtype=torch.bfloat16)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_any_range_of_any_dimension_can_be_read(data: st.DataObject, tiny: Path) -> None:
    stored = read_stored_tensors(tiny)
    name = data.draw(st.sampled_from(sorted(stored)))
    shape = stored[name].shape
    bare = tuple(size for size in shape if size != 1)
    block = []
    for size in bare:
        first, last = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        block.append(slice(first, last))
    with TensorReader() as reader:
        piece = Piece("parameter", Part(names=(name,), shape=bare, row=0), name, stored[name])
        read = reader.read_block(piece, block).clone()
    whole = load_file(stored[name].path)[name].reshape(bare)
    assert torch.equal(read, whole[tuple(block)])


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    raw = FULL_RAW | {"tie_word_embeddings": True}
    tensors = hand_made()
    check_weights(save_model(tmp_path / "a", raw, tensors), config_from(raw))
    del tensors["lm_head.weight"]
    loaded = load_weights(save_model(tmp_path / "b", raw, tensors), config_from(raw), dtype=torch.float32)
    assert "head" not in loaded


def test_fingerprint(tiny: Path, tmp_path: Path) -> None:
    original = fingerprint(tiny)
    broken = copy_model(tiny, tmp_path / "copy")
    assert original == fingerprint(broken)
    assert len(original) == 16
    assert int(original, 16) >= 0
    (broken / "config.json").write_text((broken / "config.json").read_text().replace("1e-05", "1e-06"))
    assert fingerprint(broken) != original
    write_checkpoint(tmp_path / "seed", RAW_CONFIGS["longprefill_hybrid", "tiny"], 1, torch.bfloat16, num_files=3)
    assert fingerprint(tmp_path / "seed") != original
    write_checkpoint(tmp_path / "dtype", RAW_CONFIGS["longprefill_hybrid", "tiny"], 0, torch.float32, num_files=3)
    assert fingerprint(tmp_path / "dtype") != original


def test_weights_bytes_of_a_published_model() -> None:
    """Kimi-Linear-48B-A3B: 49 billion parameters."""
    raw = RAW_CONFIGS["kimi_linear", "tiny"] | {
        "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        },
    }  # fmt: skip
    config = config_from(raw)
    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    assert parameters == pytest.approx(49.1e9, rel=0.005)
    assert weight_bytes(config, 2) == pytest.approx(2 * parameters, rel=1e-4)
