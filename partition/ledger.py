"""Bytes that all ranks of a CP x TP mesh send in a step, by the operation names of the ranks' ledgers: exact.

The rows that travel between experts follow from the routing and are not counted; their counts are.
"""

from __future__ import annotations

from collections import Counter

from longprefill.partition.layout import Layout
from longprefill.partition.shapes import KdaShape, ModelShape, MoeShape
from longprefill.partition.traffic import (
    boundary_bytes,
    cache_row_bytes,
    halo_traffic,
    summary_traffic,
    tensor_parallel_rows,
)
from longprefill.partition.work import Exchange


def step_ledger(
    layout: Layout,
    model: ModelShape,
    *,
    num_tp: int = 1,
    exchange: Exchange = "all_gather",
    is_expert_parallel: bool = False,
    num_ending: int = 0,
) -> dict[str, int]:
    """Sent bytes by operation, without those that send nothing. `model` is the whole model, heads and columns of all
    tensor-parallel ranks; `layout` has the context-parallel ranks.

    Raises:
        ValueError: num_tp below 1, or an unknown exchange.
    """
    if num_tp < 1:
        raise ValueError(f"num_tp={num_tp}: a tensor-parallel group has at least 1 rank")
    world = layout.num_ranks * num_tp
    sent: Counter[str] = Counter()
    for layer, repeats in Counter(model.layers).items():
        mixer = layer.mixer
        left = sum(boundary_bytes(piece, mixer, model.element_bytes) for piece in layout.slices)
        found: Counter[str] = Counter()
        if isinstance(mixer, KdaShape):
            row_bytes = model.hidden * model.element_bytes
            halo = halo_traffic(layout, width=max(mixer.conv_width - 1, 0), row_bytes=row_bytes)
            # every tensor-parallel rank projects the whole rows for its own heads
            found["kda_halo"] += num_tp * sum(rank.sent_bytes for rank in halo)
            found["kda_summaries"] += sum(rank.sent_bytes for rank in summary_traffic(layout, mixer, exchange))
            found["boundary_state"] += left * (layout.num_ranks - 1)
        else:
            found["cache_rows"] += sum(cache_row_bytes(layout, mixer)) * (world - 1)
            found["boundary_state"] += left * (world - 1)
        peers, rows = layout.num_tokens * (num_tp - 1), tensor_parallel_rows(layer, model)
        found["tp_gather"] += peers * sum(rows.gathers)
        found["tp_selection"] += peers * rows.selection
        found["tp_scatter_sum"] += peers * rows.num_sums * model.hidden * model.element_bytes
        if isinstance(layer.ffn, MoeShape) and is_expert_parallel:
            found["expert_counts"] += 8 * world * world * (world - 1)
        for name, num_bytes in found.items():
            sent[name] += repeats * num_bytes
    sent["last_rows"] += num_ending * model.hidden * model.element_bytes * (num_tp - 1)
    sent["logits"] += num_ending * model.vocab_size * 4 * (num_tp - 1)
    return {name: num_bytes for name, num_bytes in sent.items() if num_bytes}
