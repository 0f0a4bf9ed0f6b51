"""config.json to ModelConfig for every family, and what is refused with which words."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.errors import ModelError, PromptError, UserError
from longprefill.workers.model.config import AttnResConfig, DenseConfig, KdaConfig, MlaConfig, MoeConfig
from longprefill.workers.model.families.registry import FAMILIES, config_from, family_named, read_config
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS

HYBRID = RAW_CONFIGS["longprefill_hybrid", "tiny"]
KIMI = RAW_CONFIGS["kimi_linear", "tiny"]
REMOVED = object()


def changed(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy with fields set; `a__b` is field b of object a; REMOVED takes a field away."""
    raw = copy.deepcopy(raw)
    for name, value in fields.items():
        *path, last = name.split("__")
        place = raw
        for step in path:
            place = place[step]
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    return raw


@pytest.mark.parametrize("error", [UserError, ModelError, PromptError])
def test_errors_pickle(error: type[UserError]) -> None:
    copied = pickle.loads(pickle.dumps(error("cp=3: use 2")))
    assert type(copied) is error
    assert str(copied) == "cp=3: use 2"
    assert isinstance(copied, UserError)


def test_families_load_without_torch() -> None:
    code = "import sys, longprefill.workers.model.families.registry, longprefill.workers.model.stored; "
    code += "print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(("family", "size"), RAW_CONFIGS)
def test_every_size_is_a_config_with_a_place_for_every_parameter(family: str, size: str) -> None:
    config = config_from(RAW_CONFIGS[family, size])
    assert config.family == family
    assert config.max_tokens >= 4 << 20
    locations = FAMILIES[family].locate(config)
    shapes = parameter_shapes(config)
    assert list(locations) == list(shapes)
    names = []
    for parameter, location in locations.items():
        assert location.shape == shapes[parameter]
        for alternative in location.alternatives:
            filled = sum(math.prod(part.shape) for part in alternative)
            assert filled == math.prod(location.shape)
        names += [part.names[0] for part in location.alternatives[0]]
    assert len(names) == len(set(names))


def test_named_models_have_the_agreed_shapes() -> None:
    small = config_from(RAW_CONFIGS["longprefill_hybrid", "small"])
    assert (small.hidden, small.vocab_size, len(small.layers)) == (512, 8192, 4)
    kinds = [isinstance(layer.mixer, KdaConfig) for layer in small.layers]
    assert kinds == [True, True, True, False]
    mla = small.layers[3].mixer
    assert isinstance(mla, MlaConfig)
    assert mla.rope is not None
    assert mla.indexer is not None
    assert mla.indexer.rope is not None
    assert (mla.rope.pairing, mla.indexer.rope.pairing) == ("interleaved", "half")
    assert (mla.indexer.num_heads, mla.indexer.head_dim, mla.indexer.topk, mla.indexer.rope_dim) == (16, 64, 256, 64)
    assert isinstance(small.residual, AttnResConfig)
    assert small.residual.block_layers == 2
    bench = config_from(RAW_CONFIGS["longprefill_hybrid", "bench"])
    assert isinstance(bench.layers[0].ffn, DenseConfig)
    assert bench.layers[0].ffn.intermediate == 2816
    assert all(isinstance(layer.ffn, MoeConfig) for layer in bench.layers[1:])


def test_unknown_family_names_it_and_the_known_ones() -> None:
    known = "deepseek_v32, glm5_next, .*, kimi_linear, longprefill_hybrid"
    with pytest.raises(ModelError, match=rf"model_type='llama' is not supported: known are {known}"):
        config_from(changed(HYBRID, model_type="llama"))
    with pytest.raises(ModelError, match="model_type=None"):
        family_named(None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": REMOVED}, "field hidden_size is missing"),
        ({"hidden_size": None}, "field hidden_size is missing"),
        ({"hidden_size": 0}, r"hidden_size=0 is not allowed: it must be an integer from 1 on"),
        ({"hidden_size": "64"}, r"hidden_size='64' is not allowed"),
        ({"hidden_size": True}, r"hidden_size=True is not allowed"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps=0 is not allowed: it must be a finite number above 0"),
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps=nan"),
        ({"hidden_sise": 64}, r"unknown field hidden_sise=64: did you mean hidden_size\?"),
        ({"layer_types": ["kda"] * 3}, r"layer_types='?a list of 3'? is not allowed: it must be a list of 4 words"),
        ({"layer_types": ["kda", "kda", "gdn", "dsa"]}, r"layer_types\[2\]='gdn' .* one of dsa, kda, mla"),
        ({"linear_attn_config": 3}, r"linear_attn_config=3 is not allowed: it must be an object"),
        (
            {"linear_attn_config__num_value_heads": 3},
            r"linear_attn_config.num_value_heads=3 .* multiple of num_heads=2",
        ),
        ({"linear_attn_config__gate_lower_bound": 1.0}, r"gate_lower_bound=1.0 .* from -5 to below 0"),
        ({"linear_attn_config__gate_lower_bound": -6.0}, r"gate_lower_bound=-6.0"),
        ({"linear_attn_config__num_stored_heads": 3}, r"num_stored_heads=3 .* from 4 on"),
        (
            {"linear_attn_config__heads": 3},
            r"unknown field linear_attn_config.heads=3: did you mean linear_attn_config.num_heads\?",
        ),
        ({"index_kpool": 3, "index_topk": 33}, r"index_kpool=3 .* divisor of the page size 64"),
        ({"index_kpool": 128, "index_topk": 128}, r"index_kpool=128"),
        ({"index_kpool": 4, "index_topk": 30}, r"index_topk=30 .* multiple of index_kpool=4"),
        ({"index_rope_head_dim": 4}, r"index_rope_head_dim=4 .* 0, or qk_rope_head_dim=8"),
        ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim=7 .* even"),
        ({"rope_parameters__rope_type": "llama3"}, r"rope_parameters.rope_type='llama3' .* default, linear, yarn"),
        ({"num_experts_per_token": 7}, r"num_experts_per_token=7 .* from 1 to 6"),
        ({"num_expert_group": 4}, r"num_expert_group=4 .* divisor of num_experts=6"),
        ({"num_expert_group": 6}, r"num_expert_group=6 .* 2 or more experts a group"),
        ({"moe_router_activation_func": "tanh"}, r"moe_router_activation_func='tanh' .* sigmoid, softmax"),
        ({"attn_res_block_size": 0}, r"attn_res_block_size=0"),
        ({"num_experts": REMOVED}, r"field num_experts is missing"),
        ({"eos_token_id": 512}, r"eos_token_id=512 .* from 0 to 511"),
        ({"hidden_act": "relu"}, r"hidden_act='relu' .* gelu, silu"),
    ],
)
def test_hybrid_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from(changed(HYBRID, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mla_use_nope": False}, r"mla_use_nope=False .* true"),
        ({"attention_bias": True}, r"attention_bias=True"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' .* silu"),
        ({"quantization_config": {"bits": 8}}, r"quantization_config.quant_method is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quant_method='awq' .* one of fp8"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"without weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, r"two integers from 1 on"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads=2 .* num_attention_heads=4"),
        ({"attn_res_block_size": 12}, r"attn_res_block_size is set: kimi_linear has no such part"),
        ({"linear_attn_config__gate_lower_bound": -5.0}, r"gate_lower_bound is set"),
        ({"linear_attn_config__kda_layers": [0, 1, 2]}, r"each layer from 1 to 4 once"),
        ({"linear_attn_config__kda_layers": [1, 2]}, r"each layer from 1 to 4 once"),
        ({"linear_attn_config__kda_layers": REMOVED}, r"linear_attn_config.kda_layers is missing"),
        ({"linear_attn_config": REMOVED}, r"field linear_head_dim is missing"),
        ({"model_max_length": REMOVED}, r"model_max_length or max_position_embeddings is missing"),
    ],
)
def test_kimi_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from(changed(KIMI, **fields))


def test_kimi_layer_lists_count_from_one_and_layer_types_go_first() -> None:
    published = changed(KIMI, linear_attn_config__kda_layers=[2, 3, 4], linear_attn_config__full_attn_layers=[1])
    assert isinstance(config_from(published).layers[0].mixer, MlaConfig)
    types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    both = changed(published, layer_types=types)
    assert [isinstance(layer.mixer, MlaConfig) for layer in config_from(both).layers] == [False, True, False, False]


def test_kimi_latent_norms_ignore_rms_norm_eps() -> None:
    mla = config_from(changed(KIMI, rms_norm_eps=1e-3, q_lora_rank=24)).layers[3].mixer
    assert isinstance(mla, MlaConfig)
    assert (mla.q_norm_eps, mla.kv_norm_eps) == (1e-6, 1e-6)
    assert mla.rope is None
    assert mla.rope_dim == 8
    assert mla.scale == (16 + 8) ** -0.5


def test_kimi_dense_layers() -> None:
    def dense(**fields: Any) -> list[bool]:
        return [isinstance(layer.ffn, DenseConfig) for layer in config_from(changed(KIMI, **fields)).layers]

    assert dense() == [True, False, False, False]
    assert dense(first_k_dense_replace=2) == [True, True, False, False]
    assert dense(moe_layer_freq=2) == [True, True, False, True]
    assert dense(mlp_layer_types=["sparse", "dense", "sparse", "dense"]) == [False, True, False, True]


def test_every_part_of_the_hybrid_can_be_asked_for() -> None:
    config = config_from(
        changed(
            HYBRID,
            layer_types=["kda", "mla", "dsa", "kda"],
            linear_attn_config={
                "num_heads": 2, "num_value_heads": 6, "head_dim": 16, "value_head_dim": 20, "short_conv_kernel_size": 3,
                "gate_rank": 8, "use_full_rank_gate": True, "norm_eps": 1e-4, "allow_neg_eigval": True,
                "num_stored_heads": 9,
            },
            q_lora_rank=None, mla_use_output_gate=True, attention_scale=0.5, q_norm_eps=1e-3, kv_norm_eps=1e-4,
            rope_parameters=None, index_kpool=4, index_norm_eps=1e-5, routed_expert_hidden_size=24,
            moe_router_bias=False, moe_router_activation_func="softmax", num_expert_group=3, topk_group=2,
            moe_renormalize=False,
            attn_res_block_size=None, tie_word_embeddings=True, eos_token_id=[1, 5],
            mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        )
    )  # fmt: skip
    kda, mla, dsa = (config.layers[index].mixer for index in (0, 1, 2))
    assert isinstance(kda, KdaConfig)
    assert isinstance(mla, MlaConfig)
    assert isinstance(dsa, MlaConfig)
    assert (kda.num_value_heads, kda.value_dim, kda.lower_bound, kda.output_gate_rank) == (6, 20, None, None)
    assert (kda.conv_width, kda.gate_rank, kda.allow_neg_eigval, kda.norm_eps) == (3, 8, True, 1e-4)
    assert mla.indexer is None
    assert dsa.indexer is not None
    assert (dsa.indexer.pool, dsa.indexer.rope_dim, dsa.indexer.rope, dsa.indexer.norm_eps) == (4, 0, None, 1e-5)
    assert (mla.gated, mla.scale, mla.rope, mla.q_lora_rank) == (True, 0.5, None, None)
    assert (mla.q_norm_eps, mla.kv_norm_eps) == (1e-3, 1e-4)
    moe = config.layers[0].ffn
    assert isinstance(moe, MoeConfig)
    assert (moe.latent_dim, moe.scoring, moe.has_bias, moe.normalize_weights) == (24, "softmax", False, False)
    assert (moe.num_groups, moe.topk_groups) == (3, 2)
    assert isinstance(config.layers[1].ffn, DenseConfig)
    assert config.residual is None
    assert config.eos_token_ids == (1, 5)
    assert "head" not in parameter_shapes(config)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    """DeepSeek-V3.2's numbers: scale 192^-0.5 times 1.3689 squared is 0.13523."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    raw = changed(HYBRID, qk_nope_head_dim=128, qk_rope_head_dim=64, index_head_dim=64, rope_parameters=yarn)
    mla = config_from(raw).layers[3].mixer
    assert isinstance(mla, MlaConfig)
    assert mla.scale == pytest.approx(0.13523, abs=1e-5)
    assert mla.rope is not None
    scale = mla.rope.inv_freq_scale
    assert scale is not None
    assert len(scale) == 32
    assert scale[0] == 1.0
    assert scale[-1] == pytest.approx(1 / 40)
    assert list(scale) == sorted(scale, reverse=True)
    with pytest.raises(ModelError, match=r"rope_parameters.mscale=0.7 .* mscale_all_dim=1"):
        config_from(changed(raw, rope_parameters__mscale=0.7))


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_pool_divides_the_page_and_the_topk(pool: int, topk: int) -> None:
    raw = changed(HYBRID, index_kpool=pool, index_topk=topk)
    if 64 % pool == 0 and topk % pool == 0:
        mla = config_from(raw).layers[3].mixer
        assert isinstance(mla, MlaConfig)
        assert mla.indexer is not None
        assert (mla.indexer.pool, mla.indexer.topk) == (pool, topk)
    else:
        with pytest.raises(ModelError, match=r"index_(kpool|topk)="):
            config_from(raw)


def test_directory_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{,}")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds a list: it must be a JSON object"):
        read_config(tmp_path)


def test_generation_config_sets_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    assert read_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_config(tmp_path).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert read_config(tmp_path).eos_token_ids == (1,)
