"""deepseek_v32: whole models against transformers' DeepseekV32ForCausalLM, every layer at every position."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV32ForCausalLM

from longprefill.workers.model.layers.indexer import Indexer
from longprefill.workers.model.layers.rotation import rotate

from .family_oracle import (
    MESHES,
    Case,
    Change,
    assert_agrees,
    assert_same_weights,
    replaced,
    run_ours,
    with_mixers,
    with_zeros,
)

YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
ODD: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 37, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": 21, "kv_lora_rank": 19, "qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 7,
    "index_n_heads": 17, "index_head_dim": 13, "index_topk": 8, "intermediate_size": 29, "moe_intermediate_size": 15,
    "rms_norm_eps": 1e-3,
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tiny": (333, {"rope_scaling": YARN, "max_position_embeddings": 256}),
    "odd dims, more index heads than heads": (261, ODD | {"rope_scaling": YARN, "max_position_embeddings": 256}),
    "cosines with a factor of their own": (
        200, ODD | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "max_position_embeddings": 256}
    ),
    "yarn without mscale": (
        150,
        ODD | {"rope_scaling": {name: YARN[name] for name in list(YARN)[:3]}, "max_position_embeddings": 256},
    ),
    "plain rotations, no groups, no normalisation, two shared experts": (
        200,
        ODD | {
            "rope_scaling": None, "rope_theta": 500.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
            "n_shared_experts": 2, "index_topk": 32, "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
}  # fmt: skip


def make_case(directory: Path, name: str) -> Case:
    return Case(directory, "deepseek_v32", DeepseekV32ForCausalLM, *CASES[name])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("deepseek") / "model", request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("deepseek") / "tiny", "tiny")


@pytest.mark.parametrize(("cp", "step_tokens"), MESHES)
def test_every_layer_agrees(case: Case, cp: int, step_tokens: int) -> None:
    case.assert_agrees(cp=cp, step_tokens=step_tokens)


def test_our_own_choices_are_those_of_the_class(tiny: Case) -> None:
    """Nothing is replayed: the class's choices do not prop ours up."""
    run = run_ours(tiny.directory, tiny.oracle, replay=False)
    assert_agrees(dataclasses.replace(run, rows=sum(len(rows) for rows in tiny.oracle.record.values())), tiny.oracle)


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 2)])
def test_tensor_parallel_ranks_agree(tiny: Case, cp: int, tp: int) -> None:
    tiny.assert_agrees(cp=cp, tp=tp, step_tokens=192)


def test_tokens_one_by_one_agree(tiny: Case) -> None:
    """As decode runs them, over more than a pool's and a page's border."""
    tiny.assert_agrees(step_tokens=128, single_tokens=70)


@pytest.mark.parametrize("published", [True, False], ids=["an expert a tensor", "fused experts"])
def test_both_spellings_load(tiny: Case, published: bool, tmp_path: Path) -> None:
    tiny.assert_saved_loads(tmp_path / "saved", published=published)


def test_names_without_model_and_layers_for_prediction_load(tiny: Case, tmp_path: Path) -> None:
    expected = tiny.weights
    tensors = {name.removeprefix("model."): value.contiguous() for name, value in tiny.model.state_dict().items()}
    tensors["layers.4.enorm.weight"] = torch.ones(64)
    tensors["layers.4.self_attn.q_a_proj.weight"] = torch.ones(48, 64)
    (tmp_path / "config.json").write_bytes((tiny.directory / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_weights(tmp_path, expected)


def wrong_pairing(_: int, mixer: Any) -> Any:
    rope = dataclasses.replace(mixer.indexer.rope, pairing="interleaved")
    return dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, rope=rope))


def halves_in_attention(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, pairing="half"))


def scale_without_mscale(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, scale=(mixer.nope_dim + mixer.rope_dim) ** -0.5)


def frequencies_without_yarn(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, inv_freq_scale=None))


def norms_with_another_eps(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, q_norm_eps=1e-3, kv_norm_eps=1e-3)


MUTATIONS: dict[str, Change] = {
    "indexer rotates in pairs": with_mixers(wrong_pairing),
    "attention rotates by halves": with_mixers(halves_in_attention),
    "softmax scale without mscale": with_mixers(scale_without_mscale),
    "frequencies without yarn": with_mixers(frequencies_without_yarn),
    "latent norms with rms_norm_eps": with_mixers(norms_with_another_eps),
    "no bias in the index key's norm": with_zeros("indexer.k_norm.bias"),
    "no bias in the choice of experts": with_zeros("moe.bias"),
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
def test_the_tests_can_fail(tiny: Case, change: Change) -> None:
    tiny.assert_catches(change)


def test_the_tests_can_fail_by_rotation_of_the_last_dims(tiny: Case) -> None:
    def rotate_last(self: Any, x_SHX: torch.Tensor, ctx: Any) -> torch.Tensor:
        rest, last = x_SHX.split((x_SHX.shape[-1] - self.config.rope_dim, self.config.rope_dim), dim=-1)
        turned = rotate(last, ctx.own_positions_S, self.inv_freq, self.config.rope, ctx.kernels.rope)
        return torch.cat((rest, turned), dim=-1)

    with replaced(Indexer, "_rotate", rotate_last):
        tiny.assert_catches()
