"""Loading: hand-named hybrid checkpoints, ranges, dtypes, and every way in which a directory can be broken."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from longprefill.partition.errors import ModelError
from longprefill.workers.model import weights
from longprefill.workers.model.checkpoint import DEAD_HEAD_A_LOG, write_checkpoint
from longprefill.workers.model.families.base import Part
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.parameters import FP32_PARAMETERS, parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.stored import StoredTensor, fingerprint, read_stored_tensors
from longprefill.workers.model.weights import Piece, TensorReader, check_weights, load_weights, weights_bytes

FULL_RAW: dict[str, Any] = {
    "model_type": "longprefill_hybrid", "vocab_size": 24, "hidden_size": 10, "intermediate_size": 14,
    "num_hidden_layers": 2, "layer_types": ["kda", "dsa"], "max_position_embeddings": 1 << 22,
    "linear_attn_config": {
        "num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 3, "use_full_rank_gate": True,
        "gate_rank": 5, "num_stored_heads": 7,
    },
    "num_attention_heads": 2, "q_lora_rank": 9, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 5, "mla_use_output_gate": True, "index_n_heads": 3, "index_head_dim": 7, "index_topk": 8,
    "index_kpool": 4, "mlp_layer_types": ["dense", "sparse"], "num_experts": 3, "num_experts_per_token": 2,
    "moe_intermediate_size": 6, "num_shared_experts": 2, "routed_expert_hidden_size": 4, "attn_res_block_size": 1,
}  # fmt: skip
"""Every optional part of the hybrid at once."""

L0, L1 = "model.layers.0.", "model.layers.1."
FULL_TENSORS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (24, 10), "model.norm.weight": (10,), "lm_head.weight": (24, 10),
    "model.final_res.query": (10,), "model.final_res.norm.weight": (10,),
    L0 + "input_layernorm.weight": (10,), L0 + "post_attention_layernorm.weight": (10,),
    L0 + "mixer_res.query": (10,), L0 + "mixer_res.norm.weight": (10,), L0 + "ffn_res.query": (10,),
    L0 + "ffn_res.norm.weight": (10,),
    L0 + "self_attn.q_proj.weight": (12, 10), L0 + "self_attn.k_proj.weight": (12, 10),
    L0 + "self_attn.v_proj.weight": (12, 10), L0 + "self_attn.q_conv1d.weight": (12, 1, 4),
    L0 + "self_attn.k_conv1d.weight": (12, 1, 4), L0 + "self_attn.v_conv1d.weight": (12, 1, 4),
    L0 + "self_attn.f_a_proj.weight": (5, 10), L0 + "self_attn.f_b_proj.weight": (24, 5),
    L0 + "self_attn.dt_bias": (24,), L0 + "self_attn.A_log": (7,), L0 + "self_attn.b_proj.weight": (4, 10),
    L0 + "self_attn.g_proj.weight": (12, 10), L0 + "self_attn.o_norm.weight": (3,),
    L0 + "self_attn.o_proj.weight": (10, 12),
    L0 + "mlp.gate_proj.weight": (14, 10), L0 + "mlp.up_proj.weight": (14, 10), L0 + "mlp.down_proj.weight": (10, 14),
    L1 + "input_layernorm.weight": (10,), L1 + "post_attention_layernorm.weight": (10,),
    L1 + "mixer_res.query": (10,), L1 + "mixer_res.norm.weight": (10,), L1 + "ffn_res.query": (10,),
    L1 + "ffn_res.norm.weight": (10,),
    L1 + "self_attn.q_a_proj.weight": (9, 10), L1 + "self_attn.q_a_layernorm.weight": (9,),
    L1 + "self_attn.q_b_proj.weight": (12, 9), L1 + "self_attn.kv_a_proj_with_mqa.weight": (10, 10),
    L1 + "self_attn.kv_a_layernorm.weight": (8,), L1 + "self_attn.kv_b_proj.weight": (18, 8),
    L1 + "self_attn.g_proj.weight": (10, 10), L1 + "self_attn.o_proj.weight": (10, 10),
    L1 + "self_attn.indexer.wq_b.weight": (21, 9), L1 + "self_attn.indexer.wk.weight": (7, 10),
    L1 + "self_attn.indexer.k_norm.weight": (7,), L1 + "self_attn.indexer.k_norm.bias": (7,),
    L1 + "self_attn.indexer.weights_proj.weight": (3, 10),
    L1 + "self_attn.indexer.index_kpool_compress_gate": (7, 10),
    L1 + "self_attn.indexer.index_kpool_compress_ape": (4, 7),
    L1 + "mlp.gate.weight": (3, 10), L1 + "mlp.gate.e_score_correction_bias": (3,),
    L1 + "mlp.latent_in_proj.weight": (4, 10), L1 + "mlp.latent_out_proj.weight": (10, 4),
    L1 + "mlp.shared_experts.gate_proj.weight": (12, 10), L1 + "mlp.shared_experts.up_proj.weight": (12, 10),
    L1 + "mlp.shared_experts.down_proj.weight": (10, 12),
}  # fmt: skip
for expert in range(3):
    FULL_TENSORS[f"{L1}mlp.experts.{expert}.gate_proj.weight"] = (6, 4)
    FULL_TENSORS[f"{L1}mlp.experts.{expert}.up_proj.weight"] = (6, 4)
    FULL_TENSORS[f"{L1}mlp.experts.{expert}.down_proj.weight"] = (4, 6)


def hand_made() -> dict[str, torch.Tensor]:
    """Random tensors under the published names of `FULL_RAW`, spelt out above."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in FULL_TENSORS.items()}


def save_model(directory: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A model directory with one file."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid checkpoint in three files with an index."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(directory, RAW_CONFIGS["longprefill_hybrid", "tiny"], 0, torch.bfloat16, num_files=3)
    return directory


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of `tiny` to break."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in tiny.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


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
    assert weights_bytes(config, dtype) == sum(value.nbytes for value in loaded.values())


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


def test_a_missing_file_of_the_index_is_named(broken: Path) -> None:
    (broken / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"model-00002-of-00003.safetensors is missing and model.safetensors.index.json"
    ):
        check_weights(broken, read_config(broken))


@pytest.mark.parametrize("keep", [3, 100, -1])
def test_a_truncated_file_is_named(keep: int, broken: Path) -> None:
    path = broken / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model-00001-of-00003.safetensors is truncated: it"):
        check_weights(broken, read_config(broken))


def corrupt_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_corrupt_headers_are_named(broken: Path) -> None:
    path, config = broken / "model-00001-of-00003.safetensors", read_config(broken)
    whole = path.read_bytes()

    corrupt_header(path, lambda header: header["model.embed_tokens.weight"].update(shape=[512, 65]))
    with pytest.raises(ModelError, match=r"is corrupt: .*model.embed_tokens.weight 65536 bytes, and shape \[512, 65\]"):
        check_weights(broken, config)

    path.write_bytes(whole)
    corrupt_header(path, lambda header: header["model.embed_tokens.weight"].pop("dtype"))
    with pytest.raises(ModelError, match=r"is corrupt: its header's entry for model.embed_tokens.weight"):
        check_weights(broken, config)

    path.write_bytes(b"<!doctype html>" * 1000)
    with pytest.raises(ModelError, match=r"00001-of-00003.safetensors is not a safetensors file"):
        check_weights(broken, config)

    path.write_bytes(whole + b"tail")
    with pytest.raises(ModelError, match=r"is corrupt: its header promises \d+ bytes, it has \d+"):
        check_weights(broken, config)


def test_index_errors(broken: Path) -> None:
    index, config = broken / "model.safetensors.index.json", read_config(broken)
    good = json.loads(index.read_text())

    def with_entry(name: str, file_name: object) -> None:
        bad = copy.deepcopy(good)
        bad["weight_map"][name] = file_name
        index.write_text(json.dumps(bad))

    with_entry("model.norm.weight", "../model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match="must be a plain file name"):
        check_weights(broken, config)
    with_entry("model.norm.weight", "model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"model-00001-of-00003.safetensors has no tensor model.norm.weight"):
        check_weights(broken, config)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"weight_map=None is not allowed"):
        check_weights(broken, config)


def test_without_files_or_with_doubled_tensors(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "m", FULL_RAW, hand_made())
    save_file({"model.norm.weight": torch.ones(10)}, directory / "second.safetensors")
    with pytest.raises(ModelError, match=r"tensor model.norm.weight is in model.safetensors and in second.safetensors"):
        check_weights(directory, config_from(FULL_RAW))
    for path in directory.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match=r"holds no \*.safetensors file"):
        check_weights(directory, config_from(FULL_RAW))


@pytest.mark.parametrize("name", sorted(FULL_TENSORS))
def test_every_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = hand_made()
    del tensors[name]
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=r"parameter \S+ is missing: the checkpoint has no tensor ") as caught:
        check_weights(directory, config_from(FULL_RAW))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", sorted(FULL_TENSORS))
def test_every_wrong_shape_is_named(name: str, tmp_path: Path) -> None:
    tensors = hand_made()
    tensors[name] = torch.zeros([*tensors[name].shape[:-1], tensors[name].shape[-1] + 1])
    if name.endswith("A_log"):
        tensors[name] = torch.zeros(3)
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=r"has shape \[.*\], and \S+ needs \[.*\]: config.json and weights") as caught:
        load_weights(directory, config_from(FULL_RAW), dtype=torch.float32)
    assert f"tensor {name} has shape {list(tensors[name].shape)}" in str(caught.value)


def test_a_transposed_tensor_is_refused(tmp_path: Path) -> None:
    tensors = hand_made()
    name = L0 + "self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=r"has shape \[10, 12\], and layers.0.kda.q_proj needs \[12, 10\]"):
        check_weights(directory, config_from(FULL_RAW))


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    tensors = hand_made()
    name = L1 + "self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=rf"tensor {name} has dtype F8_E4M3: it must be one of BF16, F16, F32, F64"):
        check_weights(directory, config_from(FULL_RAW))


def test_unknown_tensors_are_refused_except_harmless_ones(tmp_path: Path) -> None:
    config = config_from(FULL_RAW)
    harmless = hand_made() | {
        "model.layers.2.self_attn.q_proj.weight": torch.ones(3),
        L1 + "self_attn.rotary_emb.inv_freq": torch.ones(1),
    }
    check_weights(save_model(tmp_path / "a", FULL_RAW, harmless), config)
    biased = hand_made() | {L0 + "self_attn.q_proj.bias": torch.ones(12)}
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn.q_proj.bias \[12\] is unknown to family longprefill_hybrid"
    ):
        check_weights(save_model(tmp_path / "b", FULL_RAW, biased), config)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    raw = FULL_RAW | {"tie_word_embeddings": True}
    tensors = hand_made()
    check_weights(save_model(tmp_path / "a", raw, tensors), config_from(raw))
    del tensors["lm_head.weight"]
    loaded = load_weights(save_model(tmp_path / "b", raw, tensors), config_from(raw), dtype=torch.float32)
    assert "head" not in loaded


def test_a_file_that_vanishes_after_the_check(tmp_path: Path) -> None:
    gone = StoredTensor(tmp_path / "gone.safetensors", "F32", (2,))
    piece = Piece("embed", Part(names=("x",), shape=(2,), row=0), "x", gone)
    with TensorReader() as reader, pytest.raises(ModelError, match=r"gone.safetensors cannot be read: tensor x"):
        reader.read_block(piece, (slice(0, 2),))


def test_fingerprint(tiny: Path, broken: Path, tmp_path: Path) -> None:
    original = fingerprint(tiny)
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
    assert weights_bytes(config, torch.bfloat16) == pytest.approx(2 * parameters, rel=1e-4)
