"""glm_moe_dsa: whole models against transformers' GlmMoeDsaForCausalLM, shared selections included."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import GlmMoeDsaForCausalLM

from longprefill.workers.model.config import MlaConfig

from .family_oracle import MESHES, Case, Change, with_mixers, with_zeros

ODD: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 37, "num_hidden_layers": 5, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": 21, "kv_lora_rank": 19, "qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 7,
    "index_n_heads": 17, "index_head_dim": 13, "index_topk": 8, "intermediate_size": 29, "moe_intermediate_size": 15,
    "indexer_types": None,
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tiny: full, full, shared, shared": (333, {}),
    "odd dims, full and shared by turns": (261, ODD | {"indexer_types": ["full", "shared", "full", "shared", "full"]}),
    "a pattern": (150, ODD | {"index_topk_pattern": "FSSFS"}),
    "a schedule": (150, ODD | {"index_topk_freq": 2, "index_skip_topk_offset": 1, "index_topk": 32}),
    "all full, groups": (200, ODD | {"n_group": 3, "topk_group": 2}),
}  # fmt: skip


def make_case(directory: Path, name: str) -> Case:
    return Case(directory, "glm_moe_dsa", GlmMoeDsaForCausalLM, *CASES[name])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("glm") / "model", request.param)


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Full and shared by turns."""
    return make_case(tmp_path_factory.mktemp("glm") / "turns", "odd dims, full and shared by turns")


@pytest.mark.parametrize(("cp", "step_tokens"), MESHES)
def test_every_layer_agrees(case: Case, cp: int, step_tokens: int) -> None:
    case.assert_agrees(cp=cp, step_tokens=step_tokens)


def test_schedules_share_what_the_class_shares(case: Case) -> None:
    """The class has no indexer where ours reads no indexer weights."""
    for layer, spec in zip(case.model.model.layers, case.config.layers, strict=True):
        assert isinstance(spec.mixer, MlaConfig)
        assert (layer.self_attn.indexer is None) == (spec.mixer.indexer is None)
        assert (spec.mixer.indexer is None) == (spec.mixer.shared_selection is not None)


@pytest.mark.parametrize(("cp", "tp"), [(1, 3), (2, 3)])
def test_tensor_parallel_ranks_agree(turns: Case, cp: int, tp: int) -> None:
    turns.assert_agrees(cp=cp, tp=tp, step_tokens=192)


def test_tokens_one_by_one_agree(turns: Case) -> None:
    """As decode runs them, over more than a pool's and a page's border."""
    turns.assert_agrees(step_tokens=128, single_tokens=70)


@pytest.mark.parametrize("published", [True, False], ids=["an expert a tensor", "fused experts"])
def test_both_spellings_load(turns: Case, published: bool, tmp_path: Path) -> None:
    turns.assert_saved_loads(tmp_path / "saved", published=published)


def by_halves(_: int, mixer: Any) -> Any:
    def halved(indexer: Any) -> Any:
        return indexer and dataclasses.replace(indexer, rope=dataclasses.replace(indexer.rope, pairing="half"))

    return dataclasses.replace(mixer, indexer=halved(mixer.indexer), shared_selection=halved(mixer.shared_selection))


def stale(layer: int, mixer: Any) -> Any:
    """Layer 2's selection is not kept, so that layer 3 finds that of layer 0."""
    if layer != 2:
        return mixer
    return dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, is_reused=False))


def dense_where_shared(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, shared_selection=None)


def norms_with_another_eps(_: int, mixer: Any) -> Any:
    return dataclasses.replace(mixer, q_norm_eps=1e-4, kv_norm_eps=1e-4)


MUTATIONS: dict[str, Change] = {
    "indexer rotates by halves": with_mixers(by_halves),
    "a stale selection": with_mixers(stale),
    "shared layers see all keys": with_mixers(dense_where_shared),
    "latent norms with another eps": with_mixers(norms_with_another_eps),
    "no bias in the index key's norm": with_zeros("indexer.k_norm.bias"),
    "no bias in the choice of experts": with_zeros("moe.bias"),
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
def test_the_tests_can_fail(turns: Case, change: Change) -> None:
    turns.assert_catches(change)
