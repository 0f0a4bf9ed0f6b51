"""scripts/bench_prefill without its runs: flops by kind where their spans lie, the peer sizes, published figures."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longprefill.orchestrator.memory import weight_bytes
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import generate
from longprefill.partition.layout import Slice
from longprefill.partition.shapes import KdaShape, MlaShape, ModelShape
from longprefill.partition.work import step_flops
from longprefill.workers.model.checkpoint import FILES_OF_SIZE
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.sizes import RAW_CONFIGS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PEERS = {"kimi_linear": (49e6, 6, 2), "deepseek_v32": (26e6, 0, 4)}
"""Parameters, KDA layers and MLA layers that were published of each shape."""


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield importlib.import_module("bench_cases.prefill")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "bench_cases":
            del sys.modules[name]


def shape_of(family: str, size: str, **fields: Any) -> ModelShape:
    return model_shape(config_from(RAW_CONFIGS[family, size] | fields), ClusterSettings(model_dir=""))


def layouts(*borders: int) -> list[Any]:
    pairs = itertools.pairwise(borders)
    return [generate("contiguous", (Slice(job=0, start=start, end=end),), 1) for start, end in pairs]


@pytest.mark.parametrize("family", PEERS)
def test_a_peer_size_is_the_published_shape(family: str) -> None:
    parameters, num_kda, num_mla = PEERS[family]
    config = config_from(RAW_CONFIGS[family, "peer"])
    assert weight_bytes(config, 2) / 2 == pytest.approx(parameters, rel=0.03)
    shape = shape_of(family, "peer")
    assert shape.hidden == 512
    mixers = [layer.mixer for layer in shape.layers]
    kda = [mixer for mixer in mixers if isinstance(mixer, KdaShape)]
    mla = [mixer for mixer in mixers if isinstance(mixer, MlaShape)]
    assert (len(kda), len(mla)) == (num_kda, num_mla)
    assert all((mixer.num_value_heads, mixer.key_dim) == (8, 128) for mixer in kda)
    assert all(mixer.kv_lora_rank == 512 for mixer in mla)
    if family == "deepseek_v32":
        indexers = [mixer.indexer for mixer in mla if mixer.indexer is not None]
        assert [(i.num_heads, i.head_dim, i.topk) for i in indexers] == [(16, 128, 512)] * 4


def test_make_checkpoint_knows_how_to_write_every_size() -> None:
    assert {size for _, size in RAW_CONFIGS} == set(FILES_OF_SIZE)


def test_kdas_gates_are_counted_where_they_run(prefill: ModuleType) -> None:
    """f_a, f_b and b_proj are in the span kda.conv: their flops move from the projections, none is lost."""
    shape, steps = shape_of("kimi_linear", "peer"), layouts(0, 700, 1000)
    found = prefill.kind_flops(steps, shape)
    counted = [step_flops(layout, shape)[0] for layout in steps]
    assert found.total() == sum(flops.total - flops.residual for flops in counted)
    hidden, gate_rank, heads, key_dim, channels, taps = 512, 128, 8, 128, 3 * 8 * 128, 4
    gates = 2 * (hidden * gate_rank + gate_rank * heads * key_dim + hidden * heads + taps * channels)
    assert found["kda"] == sum(flops.kda for flops in counted) + 6 * 1000 * gates
    assert found["attention"] == sum(flops.attention + flops.expansion for flops in counted)
    assert found["indexer"] == 0


def test_dsa_rows_count_in_the_form_that_they_run_in(prefill: ModuleType) -> None:
    """Up to top-k visible keys every query is dense and expanded; beyond, absorbed over top-k, absorption with it."""
    shape = shape_of("deepseek_v32", "peer")
    heads, rank, rope, nope, value, topk = 8, 512, 64, 128, 128, 512
    pair, expansion = 2 * heads * (nope + rope + value), 2 * rank * heads * (nope + value)
    dense = topk * (topk + 1) // 2 * pair + topk * expansion
    assert prefill.kind_flops(layouts(0, topk), shape)["attention"] == 4 * dense
    sparse_row = topk * 2 * heads * (2 * rank + rope) + 2 * heads * rank * (nope + value)
    assert prefill.kind_flops(layouts(topk, topk + 100), shape)["attention"] == 4 * 100 * sparse_row
    both = prefill.kind_flops(layouts(0, topk + 100), shape)
    assert both["attention"] == 4 * (dense + 100 * sparse_row)
    # the rest is as the work model counts it, without the absorption of every row
    counted = step_flops(layouts(0, topk + 100)[0], shape)[0]
    assert both["projection"] == counted.projection - 4 * (topk + 100) * 2 * heads * rank * (nope + value)
    assert (both["indexer"], both["ffn"], both["kda"]) == (counted.indexer, counted.ffn, 0)


def test_every_span_has_one_kind(prefill: ModuleType) -> None:
    spans = [name for names in prefill.KINDS.values() for name in names]
    assert len(spans) == len(set(spans))


def test_published_figures_belong_to_the_peer_sizes_only(prefill: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(RAW_CONFIGS["kimi_linear", "peer"] | {"dtype": "bfloat16"}))
    assert prefill.published(tmp_path, 8192) == {"llama.cpp": 359.0, "transformers eager": 152.0}
    assert prefill.published(tmp_path, 32768) == {"llama.cpp": 120.0}
    assert prefill.published(tmp_path, 4096) == {}
    config.write_text(json.dumps(RAW_CONFIGS["deepseek_v32", "peer"]))
    assert prefill.published(tmp_path, 32768)["vLLM-CPU, the dense twin"] == 1279.0
    for other in (
        RAW_CONFIGS["deepseek_v32", "small"],
        RAW_CONFIGS["deepseek_v32", "peer"] | {"index_topk": 64},
        RAW_CONFIGS["longprefill_hybrid", "tiny"],
    ):
        config.write_text(json.dumps(other))
        assert prefill.published(tmp_path, 8192) is None


def test_ours_is_scaled_by_the_product_rate_of_the_run(prefill: ModuleType) -> None:
    found = prefill.comparison({"llama.cpp": 359.0}, tokens_per_s=1000.0, bf16_gflops=2249.0 / 4)
    assert found["scaled_tokens_per_s"] == pytest.approx(4000.0)
    assert found["scaled_times"]["llama.cpp"] == pytest.approx(4000.0 / 359.0)
    assert found["times"]["llama.cpp"] == pytest.approx(1000.0 / 359.0)


def test_nothing_is_scaled_where_there_is_no_bf16_product(prefill: ModuleType) -> None:
    found = prefill.comparison({"llama.cpp": 359.0}, tokens_per_s=1000.0, bf16_gflops=None)
    assert found["scaled_tokens_per_s"] is None
    assert found["scaled_times"] == {"llama.cpp": None}
    assert found["times"]["llama.cpp"] == pytest.approx(1000.0 / 359.0)
