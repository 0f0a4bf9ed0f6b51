"""glm5_next: whole models against transformers' Glm5NextForConditionalGeneration without images."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm5NextForConditionalGeneration

from longprefill.workers.model.config import KdaConfig, LayerConfig, ModelConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.layers import indexer as indexer_layer

from .family_oracle import (
    MESHES,
    Case,
    Change,
    assert_same_weights,
    is_caught,
    replaced,
    run_ours,
    with_mixers,
    with_zeros,
)

ODD: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 37, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": 21, "kv_lora_rank": 19, "qk_nope_head_dim": 11, "v_head_dim": 7, "index_n_heads": 17,
    "index_head_dim": 13, "index_topk": 32, "index_kpool": 16, "intermediate_size": 29, "moe_intermediate_size": 15,
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse"], "hc_mult": 3, "hc_sinkhorn_iters": 3, "hc_eps": 1e-4,
    "rms_norm_eps": 1e-3, "swiglu_limit": 0.5, "n_group": 3, "topk_group": 2,
    "linear_attn_config": {"num_heads": 3, "head_dim": 11, "short_conv_kernel_size": 4, "gate_lower_bound": -3.0},
}  # fmt: skip
SPARSE_LAYERS = ["linear_attention", *["indexed_attention"] * 4]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tiny: pools of 4": (333, {}),
    "odd dims, pools of 16, gates that are cut": (261, ODD),
    "softplus gates, pools of 2": (
        200,
        {
            "linear_attn_config": {
                "num_heads": 3, "head_dim": 12, "short_conv_kernel_size": 3, "gate_lower_bound": None,
                "safe_gate": False,
            },
            "index_kpool": 2, "index_topk": 8,
        },
    ),
    "shared selections of pools": (
        200,
        ODD | {
            "num_hidden_layers": 5, "layer_types": SPARSE_LAYERS, "mlp_layer_types": ["dense"] * 5, "index_kpool": 4,
            "indexer_types": ["full", "full", "shared", "full", "shared"],
        },
    ),
}  # fmt: skip


def make_case(directory: Path, name: str) -> Case:
    return Case(directory, "glm5_next", Glm5NextForConditionalGeneration, *CASES[name])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("glm5") / "model", request.param)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("glm5") / "odd", "odd dims, pools of 16, gates that are cut")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("glm5") / "shared", "shared selections of pools")


@pytest.mark.parametrize(("cp", "step_tokens"), MESHES)
def test_every_layer_agrees(case: Case, cp: int, step_tokens: int) -> None:
    case.assert_agrees(cp=cp, step_tokens=step_tokens)


@pytest.mark.parametrize(("cp", "tp"), [(1, 3), (2, 3)])
def test_tensor_parallel_ranks_agree(shared: Case, cp: int, tp: int) -> None:
    shared.assert_agrees(cp=cp, tp=tp, step_tokens=192)


def test_tokens_one_by_one_agree(shared: Case) -> None:
    """As decode runs them, over more than a pool's and a page's border."""
    shared.assert_agrees(step_tokens=128, single_tokens=70)


@pytest.mark.parametrize("published", [True, False], ids=["an expert a tensor", "fused experts"])
def test_both_spellings_load(odd: Case, published: bool, tmp_path: Path) -> None:
    """With a vision tower, which is left alone."""
    odd.assert_saved_loads(tmp_path / "saved", published=published)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_text_model_by_itself_loads(odd: Case, prefix: str, tmp_path: Path) -> None:
    expected = odd.weights
    body = odd.model.model.language_model.state_dict()
    tensors = {prefix + name: value.contiguous() for name, value in body.items()}
    tensors["lm_head.weight"] = odd.model.lm_head.weight.detach()
    tensors[prefix + "layers.3.eh_proj.weight"] = torch.ones(37, 74)  # multi-token prediction
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(odd.model.config.text_config.to_dict(), default=str))
    assert read_config(tmp_path) == dataclasses.replace(odd.config, family="glm5_next_text")
    assert_same_weights(tmp_path, expected)


def test_a_flat_config_is_read(odd: Case, tmp_path: Path) -> None:
    raw = json.loads((odd.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw["text_config"] | {"model_type": "glm5_next"}))
    assert read_config(tmp_path) == odd.config


def one_sinkhorn(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    residual: Any = config.residual
    return dataclasses.replace(config, residual=dataclasses.replace(residual, sinkhorn_iterations=1)), weights


def uncut_gates(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    layers = [
        LayerConfig(mixer=layer.mixer, ffn=dataclasses.replace(layer.ffn, activation_clamp=None))
        for layer in config.layers
    ]
    return dataclasses.replace(config, layers=tuple(layers)), weights


def softplus_gates(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, lower_bound=None) if isinstance(mixer, KdaConfig) else mixer


def looser_bound(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, lower_bound=-4.0) if isinstance(mixer, KdaConfig) else mixer


def norms_with_another_eps(_: int, mixer: Any) -> Any:
    return mixer if isinstance(mixer, KdaConfig) else dataclasses.replace(mixer, q_norm_eps=1e-6, kv_norm_eps=1e-6)


MUTATIONS: dict[str, Change] = {
    "Sinkhorn skipped": one_sinkhorn,
    "gates not cut": uncut_gates,
    "softplus gates": with_mixers(softplus_gates),
    "another lower bound": with_mixers(looser_bound),
    "latent norms with 1e-6": with_mixers(norms_with_another_eps),
    "no bias in the index key's norm": with_zeros("indexer.k_norm.bias"),
    "no bias in the choice of experts": with_zeros("moe.bias"),
    "pools by plain averages": with_zeros("indexer.pool_gate"),
    "pools without position biases": with_zeros("indexer.pool_bias"),
    "streams mixed from zero": with_zeros("hc.base"),
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
def test_the_tests_can_fail(odd: Case, change: Change) -> None:
    odd.assert_catches(change)


def test_the_tests_can_fail_by_a_stale_selection(shared: Case) -> None:
    def stale(layer: int, mixer: Any) -> Any:
        if layer != 3:
            return mixer
        return dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, is_reused=False))

    shared.assert_catches(with_mixers(stale))


def test_the_tests_can_fail_by_a_missing_tail(odd: Case) -> None:
    """Nothing is replayed here, for the class's selections would put the tail back."""
    assert not is_caught(run_ours(odd.directory, odd.oracle, replay=False), odd.oracle)
    select = indexer_layer.Indexer._select

    def without_tail(self: Any, run: Any, first_row: int, *rest: Any) -> torch.Tensor:
        chosen_TK = select(self, run, first_row, *rest)
        positions_T = run.start + first_row + torch.arange(chosen_TK.shape[0])
        complete_T = (positions_T + 1) // self.config.pool * self.config.pool
        return chosen_TK.masked_fill(chosen_TK >= complete_T[:, None], -1)

    with replaced(indexer_layer.Indexer, "_select", without_tail):
        odd.assert_catches(replay=False)
