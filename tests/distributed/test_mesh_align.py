"""Meshes against transformers' own classes, layer by layer, and what `align` makes of a difference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longprefill.orchestrator.align.compare import compare, first_deviation, pooled
from longprefill.orchestrator.align.dequantized import write_dequantized
from longprefill.orchestrator.align.observation import EXACT, Numbers, Observation, renumbered
from longprefill.orchestrator.align.quantization import measure_paths, quantized_paths
from longprefill.orchestrator.align.report import document_of, last_line, table_of
from longprefill.orchestrator.align.request import check_oracle
from longprefill.orchestrator.align.single import SingleRank
from longprefill.partition.errors import ModelError, UserError
from longprefill.workers.choices import Swap
from longprefill.workers.model.checkpoint import write_checkpoint
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.sizes import RAW_CONFIGS

from .engine_support import prompt
from .mesh_support import Mesh, assert_agrees, mesh_config, rows_against, whole_from

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "glm5_next", "kimi_linear")
MESHES = [Mesh(cp=3), Mesh(cp=2, tp=2, ep=True)]


def write_model(directory: Path, family: str, *, fp8_block: tuple[int, int] | None = None, **text: Any) -> Path:
    raw = dict(RAW_CONFIGS[family, "tiny"])
    if family == "glm5_next":
        raw["text_config"] = raw["text_config"] | text
    else:
        raw |= text
    write_checkpoint(directory, raw, 1, torch.float32, fp8_block=fp8_block)
    return directory


def agree_with_the_class(directory: Path, num_tokens: int, mesh: Mesh) -> None:
    from longprefill.orchestrator.align.oracle import Oracle

    check_oracle(directory)
    whole = whole_from(directory)
    tokens = prompt(num_tokens, 0, whole.config.vocab_size)
    expected = Oracle(directory).run(tokens.numpy())
    assert expected.activations.keys() >= {(0, "mixer input"), (len(whole.config.layers), "logits")}
    rows = rows_against(whole, tokens, expected, 128, mesh)
    assert_agrees(rows)
    places = {row.what for row in rows}
    assert places >= {"mixer output", "feed-forward output", "final hidden", "logits", "greedy tokens"}
    is_kda = any(row.kind == "kda" for row in rows)
    assert is_kda == ("state" in places)


@pytest.fixture(autouse=True)
def _needs_transformers(request: pytest.FixtureRequest) -> None:
    if "class" in request.node.name:
        pytest.importorskip("transformers")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_of_a_family(family: str, mesh: Mesh, tmp_path: Path) -> None:
    agree_with_the_class(write_model(tmp_path / "model", family), 200, mesh)


YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn, groups": (
        "deepseek_v32",
        {"rope_scaling": YARN, "max_position_embeddings": 256, "n_group": 3, "topk_group": 2},
    ),
    "odd heads, more index heads than heads": (
        "deepseek_v32",
        {
            "qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 7, "kv_lora_rank": 19, "index_n_heads": 17,
            "index_head_dim": 13, "index_topk": 8, "moe_intermediate_size": 15, "tie_word_embeddings": True,
        },
    ),
    "k-pool of 16": ("glm5_next", {"index_kpool": 16, "index_topk": 32}),
    "recurrences alone, tied": (
        "kimi_linear",
        {
            "num_hidden_layers": 2, "tie_word_embeddings": True,
            "linear_attn_config": RAW_CONFIGS["kimi_linear", "tiny"]["linear_attn_config"]
            | {"kda_layers": [1, 2], "full_attn_layers": []},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_class(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    agree_with_the_class(write_model(tmp_path / "model", family, **fields), 150, Mesh(cp=2, tp=2))


def test_a_class_that_fails_is_one_line(tmp_path: Path) -> None:
    from longprefill.orchestrator.align.oracle import Oracle

    oracle = Oracle(write_model(tmp_path / "model", "deepseek_v32"))
    oracle.model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    message = r"DeepseekV32ForCausalLM fails on this model and prompt \(The size of .*\): use --against single$"
    with pytest.raises(UserError, match=message):
        oracle.run(np.arange(5))


@pytest.mark.parametrize("family", [*FAMILIES, "longprefill_hybrid"])
def test_fp8_aligns_with_its_twin(family: str, tmp_path: Path) -> None:
    """To 1e-6, and with ragged blocks."""
    quantized = write_model(tmp_path / "fp8", family, fp8_block=(16, 24))
    (tmp_path / "twin").mkdir()
    config = read_config(quantized)
    assert config.fp8_block == (16, 24)
    write_dequantized(quantized, tmp_path / "twin", (16, 24))
    assert read_config(tmp_path / "twin").fp8_block is None
    tokens = prompt(130, 0, config.vocab_size)
    expected = SingleRank(tmp_path / "twin", EXACT).run(tokens.numpy())
    whole = whole_from(quantized)
    rows = rows_against(whole, tokens, expected, 1 << 20, Mesh(), replay=True)
    assert first_deviation(rows) is None
    assert max(row.rms for row in rows) <= 1e-6


def test_the_class_gets_dequantized_weights(tmp_path: Path) -> None:
    agree_with_the_class(write_model(tmp_path / "model", "glm_moe_dsa", fp8_block=(16, 24)), 100, Mesh(cp=2))


def test_codes_without_scales_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantized = write_model(tmp_path / "fp8", "deepseek_v32", fp8_block=(16, 24))
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, quantized / "model.safetensors")
    (tmp_path / "twin").mkdir()
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj\.weight is FP8"):
        write_dequantized(quantized, tmp_path / "twin", (16, 24))


def test_a_class_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longprefill.orchestrator import yardstick

    directory = write_model(tmp_path / "model", "kimi_linear")
    monkeypatch.setattr(yardstick.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"transformers is not installed .*: use --against single"):
        check_oracle(directory)
    monkeypatch.undo()
    (directory / "config.json").write_text(json.dumps({"model_type": "longprefill_hybrid"}))
    with pytest.raises(UserError, match="it has no class for longprefill_hybrid"):
        check_oracle(directory)


# ---- what the comparison makes of a difference ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("align") / "model"
    write_checkpoint(directory, mesh_config(), 0, torch.float32)
    return directory


@pytest.fixture(scope="module")
def seen(model: Path) -> Observation:
    return SingleRank(model, EXACT).run(np.arange(90) % 500)


def changed(seen: Observation, layer: int, point: str, position: int, by: float = 1.0) -> Observation:
    rows = seen.activations[layer, point].clone()
    rows[position] += by
    return dataclasses.replace(seen, activations=dict(seen.activations) | {(layer, point): rows})


def choosing(seen: Observation, *swaps: Swap) -> Observation:
    num_choices = sum(rows.shape[0] for rows in seen.record.values())
    return dataclasses.replace(seen, num_choices=num_choices, swapped=swaps, keeps_own=True)


def test_a_run_agrees_with_itself(model: Path, seen: Observation) -> None:
    rows = compare(read_config(model), seen, choosing(seen))
    assert_agrees(rows)
    assert last_line(rows) == f"all {len(rows)} comparisons agree"
    assert table_of(rows, "title").row_count == len(document_of(rows)) == len(rows)


def test_choices_that_nobody_compared_are_a_deviation(model: Path, seen: Observation) -> None:
    deviation = first_deviation(compare(read_config(model), seen, seen))
    assert deviation is not None
    assert "rows of choices were compared" in deviation


@pytest.mark.parametrize(
    ("layer", "point", "place"),
    [
        (0, "mixer input", "layer 0 (kda) mixer input"),
        (3, "mixer output", "layer 3 (dsa) mixer output"),
        (2, "feed-forward output", "layer 2 (kda) feed-forward output"),
        (4, "final hidden", "final hidden"),
    ],
)
def test_the_first_place_is_named(model: Path, seen: Observation, layer: int, point: str, place: str) -> None:
    actual = changed(choosing(seen), layer, point, 7)
    if layer < 4:
        actual = changed(actual, 4, "logits", 3)
    line = last_line(compare(read_config(model), seen, actual))
    assert line.startswith(f"first deviation: {place}: ")
    assert line.endswith(" > 1e-05")


def test_what_is_not_finite_deviates(model: Path, seen: Observation) -> None:
    actual = changed(choosing(seen), 1, "mixer output", 7, float("nan"))
    rows = compare(read_config(model), seen, actual)
    assert first_deviation(rows) == "layer 1 (dsa) mixer output: not finite"
    json.dumps(document_of(rows), allow_nan=False)


def test_rows_behind_a_proven_swap_are_left_out(model: Path, seen: Observation) -> None:
    """A near tie in layer 1 at position 50: that row of layer 1, then one row, then all rows from there on."""
    config = read_config(model)
    swap = Swap("positions", 1, 0, 50, 1e-6)
    for layer, point, position, is_left_out in (
        (1, "mixer input", 50, False),
        (1, "mixer output", 50, True),
        (1, "mixer output", 51, False),
        (1, "feed-forward output", 50, True),
        (2, "mixer input", 50, True),
        (2, "mixer input", 51, False),
        (2, "mixer output", 49, False),
        (2, "mixer output", 51, True),
        (3, "feed-forward output", 89, True),
        (3, "feed-forward output", 49, False),
    ):
        actual = changed(choosing(seen, swap), layer, point, position)
        deviation = first_deviation(compare(config, seen, actual))
        assert (deviation is None) == is_left_out, (layer, point, position, deviation)
    rows = compare(config, seen, choosing(seen, swap))
    assert last_line(rows) == f"all {len(rows)} comparisons agree; 1 swapped choices"


def test_a_swap_of_experts_reaches_the_feed_forward_only(model: Path, seen: Observation) -> None:
    config = read_config(model)
    actual = choosing(seen, Swap("experts", 2, 0, 50, 1e-6))
    assert first_deviation(compare(config, seen, changed(actual, 2, "feed-forward output", 50))) is None
    assert first_deviation(compare(config, seen, changed(actual, 2, "feed-forward input", 50))) is not None


def test_an_unproven_swap_deviates_and_what_it_causes_does_not_count(model: Path, seen: Observation) -> None:
    config = read_config(model)
    unproven = Swap("positions", 1, 0, 50, 2.1e-3)
    caused = Swap("experts", 3, 0, 60, 0.3)
    rows = compare(config, seen, choosing(seen, unproven, caused))
    assert first_deviation(rows) == "layer 1 (dsa) index choices: 2.1e-03 > 1e-05"
    assert [row.place for row in rows if not row.is_ok] == ["layer 1 (dsa) index choices"]
    # replayed, an unproven swap is as bad, and no row is left out
    replayed = dataclasses.replace(choosing(seen, unproven, caused), keeps_own=False)
    bad = [row.place for row in compare(config, seen, replayed) if not row.is_ok]
    assert bad == ["layer 1 (dsa) index choices", "layer 3 (dsa) expert choices"]


def test_ranks_that_differ_are_named(model: Path, seen: Observation) -> None:
    actual = dataclasses.replace(choosing(seen), rank_differences={"layers.3.index_key": 2})
    deviation = first_deviation(compare(read_config(model), seen, actual))
    assert deviation == "layer 3 (dsa) index key: rank 2 holds other values than rank 0"


def test_growth_is_judged_by_one_rank(model: Path, seen: Observation) -> None:
    """1.25 times the error of one rank in the same numbers; over several runs the squares add up."""
    config = read_config(model)
    numbers = Numbers(dtype="bf16", latent="fp8", index="mxfp8")
    assert not numbers.is_exact
    base = SingleRank(model, numbers).run(np.arange(90) % 500, seen.record)
    base = dataclasses.replace(base, num_choices=choosing(seen).num_choices)
    rows = compare(config, seen, base, base=base)
    assert_agrees(rows)
    assert max(row.rms for row in rows) > 1e-3
    grown = {place: 2 * (rows - seen.activations[place]) + seen.activations[place] for place, rows in
             base.activations.items()}  # fmt: skip
    twice = compare(config, seen, dataclasses.replace(base, activations=grown), base=base)
    assert first_deviation(twice) is not None
    by_place = {row.place: row for row in pooled([rows, twice])}
    hidden = by_place["final hidden"]
    assert not hidden.is_ok
    assert hidden.rms / hidden.allowed == pytest.approx((5 / 2) ** 0.5 / 1.25, rel=1e-3)


def test_records_are_renumbered(seen: Observation) -> None:
    assert {key[2] for key in renumbered(seen.record, 7)} == {7}


# ---- what quantization does -----------------------------------------------------------------------------------------


def test_each_quantized_path_alone_and_both(model: Path) -> None:
    """Recalls are those of sets of positions; a cache that is not quantized, or not there, is no path."""
    numbers = Numbers(dtype="fp32", latent="fp8", index="mxfp8")
    rank, tokens = SingleRank(model, numbers), np.arange(150) % 500
    effects = measure_paths(rank, numbers, tokens)
    paths = [(effect.latent, effect.index) for effect in effects]
    assert paths == [("fp8", "fp32"), ("fp32", "mxfp8"), ("fp8", "mxfp8")]
    before, after = rank.run(tokens, numbers=EXACT), rank.run(tokens, numbers=numbers)
    common = total = 0
    for key, rows in before.record.items():
        if key[0] == "positions":
            for one, other in zip(rows.tolist(), after.record[key].tolist(), strict=True):
                common, total = common + len({*one} & {*other} - {-1}), total + len({*one} - {-1})
    assert effects[2].recall == pytest.approx(common / total)
    assert 0 < common < total
    assert effects[0].cache_bytes_per_token < effects[0].unquantized_bytes_per_token
    assert effects[0].unquantized_bytes_per_token == 2 * 4 * (32 + 8 + 16)
    assert effects[2].cache_bytes_per_token == 2 * (32 + 4 + 2 * 8 + 16 + 1)
    assert measure_paths(rank, EXACT, tokens) == []
    kimi = config_from(RAW_CONFIGS["kimi_linear", "tiny"])
    assert quantized_paths(kimi, numbers) == [Numbers(dtype="fp32", latent="fp8", index="fp32")]
