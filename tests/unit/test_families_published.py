"""deepseek_v32, glm_moe_dsa and glm5_next: published configs to ModelConfig, and what is refused with which words."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import (
    DenseConfig,
    HyperConnectionConfig,
    KdaConfig,
    MlaConfig,
    MoeConfig,
)
from longprefill.workers.model.families.registry import FAMILIES, config_from
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS

FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v32", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": FP8, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
"""DeepSeek-V3.2."""
DSA_LAYERS = tuple(range(3, 45, 4))
FLASH: dict[str, Any] = {
    "model_type": "glm5_next", "image_token_id": 154854, "tie_word_embeddings": False, "quantization_config": FP8,
    "vision_config": {"model_type": "glm5_next_vision", "depth": 24, "hidden_size": 1024},
    "text_config": {
        "model_type": "glm5_next_text", "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048, "n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "moe_router_dtype": "float32", "n_group": 1, "topk_group": 1, "mhc": True, "hc_mult": 4, "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20, "mla_use_nope": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 2048, "index_kpool": 4, "index_kpool_compress": True, "index_kpool_always_select_tail": True,
        "indexer_rope_interleave": True, "indexer_types": ["full"] * 45, "num_nextn_predict_layers": 1,
        "swiglu_limit": 10.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "eos_token_id": [154820, 1],
        "layer_types": ["deepseek_sparse_attention" if n in DSA_LAYERS else "linear_attention" for n in range(45)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "tie_word_embeddings": True,
        "linear_attn_config": {
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "full_attn_layers": list(DSA_LAYERS), "kda_layers": [n for n in range(45) if n not in DSA_LAYERS],
        },
    },
}  # fmt: skip
"""GLM-5.3-Flash, as copies of its config have it."""
GLM = RAW_CONFIGS["glm_moe_dsa", "tiny"]
NEXT = RAW_CONFIGS["glm5_next", "tiny"]
TINY = RAW_CONFIGS["deepseek_v32", "tiny"]


def changed(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy with fields set; `a__b` is field b of object a."""
    raw = copy.deepcopy(raw)
    for name, value in fields.items():
        *path, last = name.split("__")
        place = raw
        for step in path:
            place = place[step]
        place[last] = value
    return raw


def mla_of(raw: dict[str, Any], layer: int) -> MlaConfig:
    mixer = config_from(raw).layers[layer].mixer
    assert isinstance(mixer, MlaConfig)
    return mixer


def test_deepseek_v32_as_published() -> None:
    config = config_from(DEEPSEEK)
    assert config.fp8_block == (128, 128)
    assert [isinstance(layer.ffn, DenseConfig) for layer in config.layers] == [True] * 3 + [False] * 58
    mla = mla_of(DEEPSEEK, 60)
    assert mla.indexer is not None
    assert mla.rope is not None
    assert mla.indexer.rope is not None
    assert (mla.rope.pairing, mla.indexer.rope.pairing) == ("interleaved", "half")
    assert mla.rope.magnitude == 1.0
    assert mla.scale == pytest.approx(0.13523, abs=1e-5)
    assert (mla.indexer.rope_dim, mla.indexer.topk, mla.indexer.pool) == (64, 2048, 1)
    moe = config.layers[3].ffn
    assert isinstance(moe, MoeConfig)
    assert (moe.num_groups, moe.topk_groups, moe.weight_scale, moe.has_bias) == (8, 4, 2.5, True)
    assert parameter_shapes(config)["layers.60.moe.gate_up"] == (256, 4096, 7168)


def test_glm5_next_as_published() -> None:
    config = config_from(FLASH)
    assert config.fp8_block == (128, 128)
    assert not config.tie_embeddings
    assert config.eos_token_ids == (154820, 1)
    assert [n for n, layer in enumerate(config.layers) if isinstance(layer.mixer, MlaConfig)] == list(DSA_LAYERS)
    kda, mla = config.layers[0].mixer, mla_of(FLASH, 3)
    assert isinstance(kda, KdaConfig)
    assert (kda.num_heads, kda.key_dim, kda.lower_bound, kda.output_gate_rank) == (64, 128, -5.0, 128)
    assert (mla.rope, mla.rope_dim, mla.scale, mla.kv_norm_eps) == (None, 0, 1 / 16, 1e-5)
    assert mla.indexer is not None
    assert (mla.indexer.pool, mla.indexer.rope, mla.indexer.is_reused) == (4, None, False)
    assert config.residual == HyperConnectionConfig(num_streams=4, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-5)
    assert config.layers[3].ffn.activation_clamp == 10.0
    assert parameter_shapes(config)["layers.0.mixer_hc.projection"] == (24, 4 * 4096)


def test_names_of_a_multimodal_directory() -> None:
    family = FAMILIES["glm5_next"]
    names = family.spellings("model.layers.0.hc_attn_fn")
    assert names[0] == "model.language_model.layers.0.hc_attn_fn"
    assert {"model.layers.0.hc_attn_fn", "layers.0.hc_attn_fn"} < set(names)
    assert family.spellings("lm_head.weight") == ("lm_head.weight",)
    assert FAMILIES["kimi_linear"].spellings("model.norm.weight") == ("model.norm.weight", "norm.weight")


def test_shared_layers_have_no_indexer_and_know_whose_selection_they_use() -> None:
    config = config_from(GLM)  # full, full, shared, shared
    first, second, third, fourth = (mla_of(GLM, layer) for layer in range(4))
    assert first.indexer is not None
    assert second.indexer is not None
    assert (first.indexer.is_reused, second.indexer.is_reused) == (False, True)
    for mixer in (third, fourth):
        assert mixer.indexer is None
        assert mixer.shared_selection is not None
        assert mixer.selection == dataclasses.replace(second.indexer, is_reused=False)
    shapes = parameter_shapes(config)
    assert "layers.1.indexer.wk" in shapes
    assert not any(name.startswith(("layers.2.indexer", "layers.3.indexer")) for name in shapes)


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFS"),
        ({"index_topk_pattern": "FSSFSS"}, "FSSFSS"),
        ({"index_topk_pattern": ["full", "shared"] * 3}, "FSFSFS"),
        ({"index_topk_pattern": "FSSFSS", "indexer_types": ["full"] * 6}, "FFFFFF"),
    ],
)
def test_schedules_of_indexers(fields: dict[str, Any], full: str) -> None:
    raw = changed(GLM, num_hidden_layers=6, indexer_types=None)
    layers = config_from({**raw, **fields}).layers
    found = ["F" if isinstance(m := layer.mixer, MlaConfig) and m.indexer is not None else "S" for layer in layers]
    assert "".join(found) == full


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_every_shared_layer_follows_a_kept_selection(full: list[bool]) -> None:
    raw = changed(GLM, num_hidden_layers=len(full), indexer_types=["full" if f else "shared" for f in full])
    if not full[0]:
        with pytest.raises(ModelError, match=r"indexer_types\[0\]='shared' is not allowed"):
            config_from(raw)
        return
    kept = False
    for number, is_full in enumerate(full):
        mixer = mla_of(raw, number)
        if is_full:
            assert mixer.indexer is not None
            kept = mixer.indexer.is_reused
            assert kept == (number + 1 < len(full) and not full[number + 1])
        else:
            assert kept
            assert mixer.indexer is None


def test_shared_layers_of_glm5_next_look_past_kda_layers() -> None:
    raw = changed(NEXT)
    raw["text_config"] |= {
        "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4,
        "indexer_types": ["shared", "full", "shared", "shared"],
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    }  # fmt: skip
    first, second = mla_of(raw, 1), mla_of(raw, 3)
    assert first.indexer is not None
    assert first.indexer.is_reused
    assert second.shared_selection is not None


@pytest.mark.parametrize(
    ("linear", "bound"),
    [
        ({"linear_attn_config": {"num_heads": 2, "head_dim": 8, "gate_lower_bound": -3.0}}, -3.0),
        ({"linear_attn_config": {"num_heads": 2, "head_dim": 8, "gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"num_heads": 2, "head_dim": 8, "gate_lower_bound": None, "safe_gate": False}}, None),
        ({"linear_attn_config": {"num_heads": 2, "head_dim": 8}}, -5.0),
        ({"linear_attn_config": None, "linear_num_heads": 2, "linear_head_dim": 8}, -5.0),
        ({"linear_attn_config": None, "linear_num_heads": 2, "linear_head_dim": 8, "linear_lower_bound": None}, None),
    ],
)
def test_lower_bounds(linear: dict[str, Any], bound: float | None) -> None:
    raw = changed(NEXT)
    raw["text_config"] |= linear
    kda = config_from(raw).layers[0].mixer
    assert isinstance(kda, KdaConfig)
    assert kda.lower_bound == bound


def test_yarn_of_published_models() -> None:
    """mscale beside mscale_all_dim: the softmax scale gets the latter's square, cosines the ratio."""
    rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    plain = mla_of(changed(DEEPSEEK, rope_scaling=rope), 0)
    assert plain.rope is not None
    assert plain.rope.magnitude == pytest.approx(1.36889, abs=1e-5)
    assert plain.scale == 192**-0.5
    both = mla_of(changed(DEEPSEEK, rope_scaling=rope | {"mscale": 0.5, "mscale_all_dim": 1.0}), 0)
    assert both.rope is not None
    assert both.rope.magnitude == pytest.approx(1.18444 / 1.36889, abs=1e-5)
    assert both.scale == pytest.approx(0.13523, abs=1e-5)
    named = mla_of(changed(DEEPSEEK, rope_scaling=rope | {"attention_factor": 1.25}), 0)
    assert named.rope is not None
    assert named.rope.magnitude == 1.25


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (TINY, {"attention_bias": True}, r"attention_bias=True .* projections without bias"),
        (TINY, {"rope_interleave": False}, r"rope_interleave=False"),
        (TINY, {"scoring_func": "softmax"}, r"scoring_func='softmax' .* one of sigmoid"),
        (TINY, {"topk_method": "greedy"}, r"topk_method='greedy'"),
        (TINY, {"num_key_value_heads": 2}, r"num_key_value_heads=2 .* num_attention_heads=4"),
        (TINY, {"qk_rope_head_dim": 7}, r"qk_rope_head_dim=7 .* even"),
        (TINY, {"index_head_dim": 6}, r"index_head_dim=6 .* at least qk_rope_head_dim=8"),
        (TINY, {"indexer_types": ["full"] * 4}, r"deepseek_v32 has no shared indexers"),
        (TINY, {"q_lora_rank": None}, r"field q_lora_rank is missing"),
        (TINY, {"n_group": 4}, r"num_expert_group=4 .* a divisor of num_experts=6"),
        (TINY, {"rope_scaling": {"type": "longrope"}}, r"rope_scaling.rope_type='longrope'|longrope"),
        (TINY, {"rope_scaling__mscal": 1.0}, r"unknown field rope_scaling.mscal=1.0"),
        (TINY, {"layer_types": ["linear_attention"] * 4}, r"layer_types\[0\]='linear_attention'"),
        (TINY, {"quantization_config": FP8 | {"activation_scheme": "static"}}, r"activation_scheme='static'"),
        (TINY, {"quantization_config": FP8 | {"bits": 4}}, r"unknown field quantization_config.bits=4"),
        (GLM, {"indexer_types": ["full"] * 3}, r"indexer_types='a list of 3'"),
        (GLM, {"indexer_types": None, "index_topk_pattern": "FSX"}, r"index_topk_pattern='FSX' .* 4 letters"),
        (NEXT, {"text_config__qk_rope_head_dim": 8}, r"qk_rope_head_dim=8 .* without positions"),
        (NEXT, {"text_config__index_kpool": 1}, r"index_kpool=1 .* from 2 on"),
        (NEXT, {"text_config__index_kpool": 12}, r"index_kpool=12 .* divisor of the page size"),
        (NEXT, {"text_config__index_topk": 34}, r"index_topk=34 .* multiple of index_kpool=4"),
        (NEXT, {"text_config__index_kpool_always_select_tail": False}, r"index_kpool_always_select_tail=False"),
        (NEXT, {"text_config__swiglu_limit": 0}, r"swiglu_limit=0 .* above 0"),
        (NEXT, {"text_config__hc_mult": 0}, r"hc_mult=0"),
        (NEXT, {"text_config__linear_attn_config__gate_lower_bound": -6.0}, r"gate_lower_bound=-6.0"),
        (NEXT, {"text_config": 3}, r"text_config=3 is not allowed: it must be an object"),
    ],
)
def test_refusals(raw: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from(changed(raw, **fields))
