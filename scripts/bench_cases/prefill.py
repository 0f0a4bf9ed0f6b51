"""What scripts/bench_prefill counts and compares with: flops by kind of layer, and tokens/s that were published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longprefill.partition.layout import Layout
from longprefill.partition.row_work import expansion_row_flops, mla_projection_flops
from longprefill.partition.shapes import KdaShape, MlaShape, ModelShape
from longprefill.partition.work import layer_flops, selected_keys, visible_keys
from longprefill.workers.model.families.registry import read_object
from longprefill.workers.model.sizes import RAW_CONFIGS

KINDS = {
    "kda": ("kda.conv", "kda.scan_first", "kda.summarize", "kda.scan"),
    "indexer": ("indexer",),
    "attention": ("attention.dense", "attention.sparse"),
    "projection": ("kda.project", "kda.output", "cache_rows", "query", "output"),
    "ffn": ("ffn.dense", "moe.route", "moe.experts", "moe.shared"),
}
"""Spans of each kind; what a layer spends outside of them is `rest` (norms, residuals, exchanges)."""

PUBLISHED_GEMM_GFLOPS = 2249.0
"""bf16 products on the two threads that the published figures were measured with."""
PUBLISHED: Mapping[str, Mapping[str, Mapping[int, float]]] = {
    "kimi_linear": {
        "llama.cpp": {2048: 710.0, 8192: 359.0, 32768: 120.0},
        "transformers eager": {2048: 238.0, 8192: 152.0},
    },
    "deepseek_v32": {
        "llama.cpp, DSA as a mask over dense attention": {2048: 445.0, 8192: 131.0, 32768: 34.0},
        "transformers eager": {2048: 664.0, 8192: 133.0},
        "vLLM-CPU, the dense twin": {2048: 8702.0, 8192: 4083.0, 32768: 1279.0},
    },
}
"""Tokens/s of the `peer` sizes by family, engine and prompt length, two threads, random bf16 weights. Where a length is
missing the engine ran out of memory."""


def published(model_dir: Path, num_tokens: int) -> dict[str, float] | None:
    """Tokens/s of other engines at this length; None: the model is not one that they were measured with."""
    raw = read_object(model_dir / "config.json")
    family = raw.get("model_type")
    size = RAW_CONFIGS.get((str(family), "peer"))
    if size is None or any(raw.get(name) != value for name, value in size.items()):
        return None
    rows = PUBLISHED[str(family)]
    return {engine: rates[num_tokens] for engine, rates in rows.items() if num_tokens in rates}


def kind_flops(layouts: Iterable[Layout], shape: ModelShape) -> Counter[str]:
    """Flops of one rank by kind, each where the span lies that runs it: the gates of KDA (with the conv) in `kda`, the
    way into the latent space and back in `attention`, and DSA rows that see at most top-k keys as the dense attention
    that they are, with the expansion of what they see. Formulae, not what a kernel does: a mask over expanded keys
    counts as the sparse attention that it replaces."""
    found: Counter[str] = Counter()
    for layout in layouts:
        for layer in shape.layers:
            flops = layer_flops(layout, layer, shape.hidden)[0]
            found["kda"] += flops.kda
            found["indexer"] += flops.indexer
            found["projection"] += flops.projection
            found["ffn"] += flops.ffn
            if isinstance(layer.mixer, KdaShape):
                gates = layout.num_tokens * kda_gate_flops(layer.mixer, shape.hidden)
                found["kda"] += gates
                found["projection"] -= gates
            elif isinstance(layer.mixer, MlaShape) and layer.mixer.indexer is not None:
                found["projection"] -= layout.num_tokens * mla_projection_flops(layer.mixer, shape.hidden).absorption
                found["attention"] += dsa_flops(layout, layer.mixer, shape.hidden)
            else:
                found["attention"] += flops.attention + flops.expansion
    return found


def kda_gate_flops(kda: KdaShape, hidden: int) -> int:
    """A row's decay and beta projections and its conv: what the span kda.conv runs of `kda_projection_flops`."""
    heads = kda.num_value_heads
    weights = hidden * kda.gate_rank + kda.gate_rank * heads * kda.key_dim + hidden * heads
    return 2 * (weights + kda.conv_width * kda.conv_channels)


def dsa_flops(layout: Layout, mla: MlaShape, hidden: int) -> int:
    """Attention of all rows of a DSA layer: expanded up to top-k visible keys, then absorbed over the selected ones."""
    assert mla.indexer is not None
    indexer, total = mla.indexer, 0
    absorption = mla_projection_flops(mla, hidden).absorption
    for fragment in layout.fragments:
        border = min(max(indexer.topk, fragment.start), fragment.end)
        if border > fragment.start:
            pair = 2 * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
            total += pair * visible_keys(fragment.start, border) + border * expansion_row_flops(mla)
        if border < fragment.end:
            selected = 2 * mla.num_heads * (2 * mla.kv_lora_rank + mla.rope_dim)
            total += selected * selected_keys(border, fragment.end, indexer.topk, indexer.pool)
            total += (fragment.end - border) * absorption
    return total


def comparison(rates: Mapping[str, float], tokens_per_s: float, bf16_gflops: float | None) -> dict[str, Any]:
    """Ours beside the published figures: as measured, and scaled to the product rate that those were measured at.

    `bf16_gflops` None, on a processor without bf16 products: nothing to scale by. Its fp32 rate is a twentieth or so of
    the published one, and what is not a bf16 product there would not be twenty times as fast.
    """
    scaled = None if bf16_gflops is None else tokens_per_s * PUBLISHED_GEMM_GFLOPS / bf16_gflops
    return {
        "gemm_gflops": PUBLISHED_GEMM_GFLOPS,
        "threads": 2,
        "scaled_tokens_per_s": scaled,
        "tokens_per_s": dict(rates),
        "times": {engine: tokens_per_s / rate for engine, rate in rates.items()},
        "scaled_times": {engine: None if scaled is None else scaled / rate for engine, rate in rates.items()},
    }
