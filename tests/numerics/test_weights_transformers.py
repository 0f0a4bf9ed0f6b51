"""Checkpoints that transformers writes load to the numbers of its modules, and ours load in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longprefill.workers.model.checkpoint import write_checkpoint
from longprefill.workers.model.config import MlaConfig
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import check_weights, load_weights

transformers = pytest.importorskip("transformers")

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "query latent, full attention first": {
        "q_lora_rank": 10,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "wide heads, two shared experts, grouped experts": {
        "linear_num_heads": 3,
        "linear_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "num_local_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "v_head_dim": 6,
    },
    "one head, dense only": {
        "linear_num_heads": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "mlp_layer_types": ["dense", "dense", "dense"],
        "rms_norm_eps": 1e-3,
    },
}


def random_model(**fields: Any) -> Any:
    """transformers' class with every parameter and buffer at random, in fp32."""
    raw = {
        "vocab_size": 40, "hidden_size": 20, "intermediate_size": 28, "moe_intermediate_size": 12,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 14,
        "qk_rope_head_dim": 4, "v_head_dim": 10,
        "qk_nope_head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4, "linear_head_dim": 8,
        "linear_num_heads": 2, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**(raw | fields)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def module_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Canonical parameters read off the modules, each by its attribute."""
    body = model.model
    found = {"embed": body.embed_tokens.weight, "final_norm": body.norm.weight, "head": model.lm_head.weight}
    for index, layer in enumerate(body.layers):
        prefix = f"layers.{index}."
        attention, mlp = layer.self_attn, layer.mlp
        found[prefix + "mixer_norm"] = layer.input_layernorm.weight
        found[prefix + "ffn_norm"] = layer.post_attention_layernorm.weight
        if hasattr(attention, "forget_gate"):
            parts = {
                "q_proj": attention.q_proj.weight, "k_proj": attention.k_proj.weight, "v_proj": attention.v_proj.weight,
                "conv": attention.conv1d.weight.squeeze(1), "f_a": attention.forget_gate.f_a_proj.weight,
                "f_b": attention.forget_gate.f_b_proj.weight, "dt_bias": attention.forget_gate.dt_bias,
                "a_log": attention.forget_gate.A_log.flatten(), "b_proj": attention.b_proj.weight,
                "g_a": attention.g_a_proj.weight, "g_b": attention.g_b_proj.weight, "o_norm": attention.o_norm.weight,
                "o_proj": attention.o_proj.weight,
            }  # fmt: skip
            found |= {f"{prefix}kda.{name}": value for name, value in parts.items()}
        else:
            parts = {
                "kv_a": attention.kv_a_proj_with_mqa.weight, "kv_a_norm": attention.kv_a_layernorm.weight,
                "kv_b": attention.kv_b_proj.weight, "o_proj": attention.o_proj.weight,
            }  # fmt: skip
            if attention.q_proj is not None:
                parts["q_proj"] = attention.q_proj.weight
            else:
                parts |= {"q_a": attention.q_a_proj.weight, "q_a_norm": attention.q_a_layernorm.weight}
                parts["q_b"] = attention.q_b_proj.weight
            found |= {f"{prefix}mla.{name}": value for name, value in parts.items()}
        if hasattr(mlp, "experts"):
            shared = mlp.shared_experts
            parts = {
                "gate": mlp.gate.weight, "bias": mlp.gate.e_score_correction_bias, "gate_up": mlp.experts.gate_up_proj,
                "down": mlp.experts.down_proj, "shared_down": shared.down_proj.weight,
                "shared_gate_up": torch.cat([shared.gate_proj.weight, shared.up_proj.weight]),
            }  # fmt: skip
            found |= {f"{prefix}moe.{name}": value for name, value in parts.items()}
        else:
            found[prefix + "ffn.gate_up"] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            found[prefix + "ffn.down"] = mlp.down_proj.weight
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize("published", [True, False], ids=["published names", "class names"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_saved_models_load_equal(fields: dict[str, Any], published: bool, tmp_path: Path) -> None:
    model = random_model(**fields)
    model.save_pretrained(tmp_path, save_original_format=published, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = read_config(tmp_path)
    check_weights(tmp_path, config)
    loaded = load_weights(tmp_path, config, dtype=torch.float32)
    expected = module_parameters(model)
    assert list(loaded) == list(parameter_shapes(config))
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def test_the_body_alone_loads_too(tmp_path: Path) -> None:
    """A model saved without its head class has names without `model.`."""
    from safetensors.torch import save_file

    model = random_model()
    model.config.save_pretrained(tmp_path)
    state = {name.removeprefix("model."): value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path, read_config(tmp_path), dtype=torch.float32)
    for name, value in module_parameters(model).items():
        assert torch.equal(loaded[name], value), name


def test_our_checkpoints_load_in_transformers(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "kimi", RAW_CONFIGS["kimi_linear", "tiny"], 3, torch.float32)
    model, info = transformers.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "kimi", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = load_weights(tmp_path / "kimi", config, dtype=torch.float32)
    expected = module_parameters(model)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name
    with torch.no_grad():
        logits = model(torch.arange(200)[None] % config.vocab_size).logits[0]
    assert 1.5 < logits.std() < 4.0


def test_yarn_equals_transformers() -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 2048,
        "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    theirs = transformers.DeepseekV3Config(
        qk_rope_head_dim=32, max_position_embeddings=16384, rope_parameters=dict(yarn)
    )
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    assert factor == 1.0
    raw = RAW_CONFIGS["longprefill_hybrid", "tiny"]
    raw = raw | {"qk_rope_head_dim": 32, "index_head_dim": 32, "rope_parameters": yarn}
    mla = config_from(raw).layers[3].mixer
    assert isinstance(mla, MlaConfig)
    assert mla.rope is not None
    assert mla.rope.inv_freq_scale is not None
    plain = 50000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    ours = plain * torch.tensor(mla.rope.inv_freq_scale, dtype=torch.float64)
    torch.testing.assert_close(ours.float(), expected, rtol=1e-5, atol=0)
