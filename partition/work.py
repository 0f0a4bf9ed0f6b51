"""THE work model: what a layout costs every rank, in counted flops. Bytes: `traffic.py`; shapes: `shapes.py`.

A multiply-add is 2 flops. Everything is an exact integer from closed forms, at any length. Counts follow the formulae
at the named tile; what an implementation happens to do beyond them is not counted, nor are norms, activations,
rotations, softmax and quantization. Notation: D hidden, C tile, K/V key and value dim, n visible keys of a query (its
position + 1). KDA core, per value head and token: 6KV + 2C(K+V) (arXiv 2510.26692, section on the chunkwise form,
without W); summary of a fragment + 4KV + 4K^2; a fold 2K^2 V a head. Indexer: 2 heads x dim a (query, key) pair. Sparse
attention: 2H(2r + d_r) a selected key; dense, expanded: 2H(d_n + d_r + d_v) a visible key; grouped queries 4 H d.
Hyper-connections of M streams: 2MD(M^2 + 3M + 3) a sublayer. `operations.py` has the same item by item.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

from longprefill.partition.layout import Fragment, Layout
from longprefill.partition.row_work import (
    expansion_row_flops,
    ffn_flops,
    kda_projection_flops,
    kda_row_flops,
    mla_projection_flops,
    residual_flops,
)
from longprefill.partition.shapes import (
    DenseShape,
    GqaShape,
    IndexerShape,
    KdaShape,
    LayerShape,
    MlaShape,
    ModelShape,
    MoeShape,
)

__all__ = [
    "DenseShape",
    "Exchange",
    "Flops",
    "GqaShape",
    "Imbalance",
    "IndexerShape",
    "KdaShape",
    "LayerShape",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "Role",
    "attn_res_sources",
    "chain_role",
    "check_exchange",
    "folds",
    "halo_flops",
    "head_share",
    "imbalance",
    "layer_flops",
    "selected_keys",
    "step_flops",
    "visible_keys",
    "visible_pools",
]

Exchange = Literal["all_gather", "head_transposed", "relay"]
"""How KDA states cross ranks: all summaries to every rank, summaries by heads and back, or states from rank to rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Counted flops of one rank by part."""

    kda_scan: int = 0
    kda_summary: int = 0
    kda_fold: int = 0
    indexer: int = 0
    attention: int = 0
    expansion: int = 0
    """Dense MLA: keys and values of the visible rows from their latents, once a rank and job."""
    projection: int = 0
    """Every projection of the mixers, the conv, the q and output absorption of sparse MLA, projections of halo rows."""
    ffn: int = 0
    residual: int = 0

    @property
    def kda(self) -> int:
        return self.kda_scan + self.kda_summary + self.kda_fold

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Flops) -> Flops:
        return Flops(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


class Imbalance(NamedTuple):
    """Flops of the fullest rank over the mean of all ranks, from 1.0; 1.0 where nothing of the kind is computed."""

    indexer: float
    attention: float
    kda: float
    total: float


class Role(NamedTuple):
    """What a fragment adds to its chain's exchange, beside its scan."""

    publishes_state: bool
    """E: for the chain's first fragment its true final state, which its scan yields anyway."""
    publishes_transition: bool
    """M, and an E from zero state: a summary pass of its own."""


def chain_role(order: int, num_fragments: int) -> Role:
    """The first fragment knows its incoming state and publishes its final one; the last one publishes nothing."""
    continued = order < num_fragments - 1
    return Role(publishes_state=continued, publishes_transition=continued and order > 0)


def check_exchange(exchange: Exchange) -> None:
    """Raises ValueError for an unknown exchange."""
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange={exchange!r} is unknown: use {', '.join(get_args(Exchange))}")


def head_share(num_heads: int, num_ranks: int, rank: int) -> int:
    """Heads of a rank when `num_heads` are dealt over all ranks, the first ranks taking the rest."""
    each, extra = divmod(num_heads, num_ranks)
    return each + (rank < extra)


def visible_keys(start: int, end: int) -> int:
    """(query, key) pairs of the queries [start, end): each sees every key up to and with its own."""
    return (end * (end + 1) - start * (start + 1)) // 2


def visible_pools(start: int, end: int, pool: int) -> int:
    """(query, pooled key) pairs of the queries [start, end): a pool is visible once its last token is."""
    return _sum_of_pools(end, pool) - _sum_of_pools(start, pool)


def selected_keys(start: int, end: int, topk: int, pool: int = 1) -> int:
    """(query, selected key) pairs of the queries [start, end).

    A query takes min(topk // pool, visible pools) pools and the tokens of its incomplete pool, its own among them;
    without pooling min(topk, n) keys.
    """
    return _sum_of_selected(end, topk, pool) - _sum_of_selected(start, topk, pool)


def attn_res_sources(num_layers: int, block_layers: int) -> int:
    """Sources that all sites of a model mix: two a layer and a last one.

    A site mixes the embedding, every finished block, and the running block unless it is still empty.
    """
    mixers = sum(1 + -(-layer // block_layers) for layer in range(num_layers))
    ffns = sum(2 + layer // block_layers for layer in range(num_layers))
    return mixers + ffns + 1 + -(-num_layers // block_layers)


def layer_flops(layout: Layout, layer: LayerShape, hidden: int, exchange: Exchange = "all_gather") -> tuple[Flops, ...]:
    """Flops of one layer for every rank, without its residual mixing.

    `exchange` decides what KDA does beside its scan: both kinds of fold need summaries of the chain's middle fragments.

    Raises:
        ValueError: an unknown exchange.
    """
    check_exchange(exchange)
    counts = [Flops() for _ in range(layout.num_ranks)]
    if isinstance(layer.mixer, KdaShape):
        parts = _kda_flops(layout, layer.mixer, hidden, exchange)
    elif isinstance(layer.mixer, MlaShape):
        parts = _mla_flops(layout, layer.mixer, hidden)
    else:
        parts = _gqa_flops(layout, layer.mixer, hidden)
    for rank, part in parts:
        counts[rank] += part
    ffn = sum(ffn_flops(layer.ffn, hidden))
    for rank, num_rows in enumerate(layout.row_counts):
        counts[rank] += Flops(ffn=num_rows * ffn)
    return tuple(counts)


def step_flops(layout: Layout, model: ModelShape, exchange: Exchange = "all_gather") -> tuple[Flops, ...]:
    """Flops of a whole step for every rank: all layers and the residual mixing, without the head (one row a job)."""
    counts = [Flops() for _ in range(layout.num_ranks)]
    for layer, repeats in Counter(model.layers).items():
        for rank, flops in enumerate(layer_flops(layout, layer, model.hidden, exchange)):
            counts[rank] += _times(flops, repeats)
    residual = len(model.layers) * residual_flops(model, 0)
    if model.attn_res_block is not None:
        residual = residual_flops(model, attn_res_sources(len(model.layers), model.attn_res_block))
    if residual:
        for rank, num_rows in enumerate(layout.row_counts):
            counts[rank] += Flops(residual=num_rows * residual)
    return tuple(counts)


def imbalance(layouts: Layout | Sequence[Layout], model: ModelShape, exchange: Exchange = "all_gather") -> Imbalance:
    """Load imbalance of one step, or of several together: max over mean of all ranks of the flops summed over them.

    Raises:
        ValueError: no layout, or layouts of different numbers of ranks.
    """
    steps = (layouts,) if isinstance(layouts, Layout) else tuple(layouts)
    if len({layout.num_ranks for layout in steps}) != 1:
        raise ValueError(f"imbalance needs layouts of one number of ranks: {[layout.num_ranks for layout in steps]}")
    ranks = [Flops()] * steps[0].num_ranks
    for layout in steps:
        ranks = [before + flops for before, flops in zip(ranks, step_flops(layout, model, exchange), strict=True)]
    return Imbalance(
        indexer=_max_over_mean([flops.indexer for flops in ranks]),
        attention=_max_over_mean([flops.attention for flops in ranks]),
        kda=_max_over_mean([flops.kda for flops in ranks]),
        total=_max_over_mean([flops.total for flops in ranks]),
    )


def halo_flops(layout: Layout, kda: KdaShape, hidden: int) -> list[int]:
    """Projections of the halo rows that lie in this step, for every rank: the W - 1 rows before each fragment, fewer
    behind the slice's start (what lies before that comes projected, from the boundary state)."""
    counts = [0] * layout.num_ranks
    width, row_flops = max(kda.conv_width - 1, 0), 2 * hidden * kda.conv_channels
    for piece in layout.slices:
        for fragment in layout.chain(piece.job):
            counts[fragment.rank] += min(width, fragment.start - piece.start) * row_flops
    return counts


def folds(chain: Sequence[Fragment], num_ranks: int, num_heads: int, exchange: Exchange) -> list[int]:
    """Products M S of every rank, over heads. The first fragment publishes a true state: the fold starts behind it."""
    if exchange == "relay":
        return [0] * num_ranks
    if exchange == "head_transposed":
        return [max(len(chain) - 2, 0) * head_share(num_heads, num_ranks, rank) for rank in range(num_ranks)]
    last_order = [0] * num_ranks
    for fragment in chain:
        last_order[fragment.rank] = fragment.order
    return [max(order - 1, 0) * num_heads for order in last_order]


def _kda_flops(layout: Layout, kda: KdaShape, hidden: int, exchange: Exchange) -> Iterable[tuple[int, Flops]]:
    scan, summary = kda_row_flops(kda)
    fold = 2 * kda.key_dim * kda.key_dim * kda.value_dim
    projection = kda_projection_flops(kda, hidden)
    for piece in layout.slices:
        chain = layout.chain(piece.job)
        for fragment in chain:
            has_summary = exchange != "relay" and chain_role(fragment.order, len(chain)).publishes_transition
            yield (
                fragment.rank,
                Flops(
                    kda_scan=fragment.length * scan,
                    kda_summary=fragment.length * summary * has_summary,
                    projection=fragment.length * projection,
                ),
            )
        for rank, num_folds in enumerate(folds(chain, layout.num_ranks, kda.num_value_heads, exchange)):
            yield rank, Flops(kda_fold=num_folds * fold)
    for rank, flops in enumerate(halo_flops(layout, kda, hidden)):
        yield rank, Flops(projection=flops)


def _mla_flops(layout: Layout, mla: MlaShape, hidden: int) -> Iterable[tuple[int, Flops]]:
    projection = sum(mla_projection_flops(mla, hidden))
    for fragment in layout.fragments:
        yield fragment.rank, Flops(projection=fragment.length * projection)
    if mla.indexer is None:
        yield from _dense_flops(layout, mla)
        return
    indexer = mla.indexer
    pair = 2 * indexer.num_heads * indexer.head_dim
    selected = 2 * mla.num_heads * (2 * mla.kv_lora_rank + mla.rope_dim)
    for fragment in layout.fragments:
        start, end = fragment.start, fragment.end
        yield (
            fragment.rank,
            Flops(
                indexer=pair * visible_pools(start, end, indexer.pool),
                attention=selected * selected_keys(start, end, indexer.topk, indexer.pool),
            ),
        )


def _dense_flops(layout: Layout, mla: MlaShape) -> Iterable[tuple[int, Flops]]:
    pair = 2 * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    expanded_row = expansion_row_flops(mla)
    num_expanded: dict[tuple[int, int], int] = {}
    for fragment in layout.fragments:
        yield fragment.rank, Flops(attention=pair * visible_keys(fragment.start, fragment.end))
        num_expanded[fragment.rank, fragment.job] = fragment.end
    for (rank, _), num_rows in num_expanded.items():
        yield rank, Flops(expansion=num_rows * expanded_row)


def _gqa_flops(layout: Layout, gqa: GqaShape, hidden: int) -> Iterable[tuple[int, Flops]]:
    inner = gqa.num_heads * gqa.head_dim
    projection = 2 * hidden * (2 * inner + 2 * gqa.num_kv_heads * gqa.head_dim)
    for fragment in layout.fragments:
        pairs = visible_keys(fragment.start, fragment.end)
        yield fragment.rank, Flops(attention=4 * inner * pairs, projection=fragment.length * projection)


def _sum_of_pools(end: int, pool: int) -> int:
    """sum of n // pool for n = 1 .. end."""
    full, rest = divmod(end, pool)
    return pool * full * (full - 1) // 2 + full * (rest + 1)


def _sum_of_selected(end: int, topk: int, pool: int) -> int:
    """sum of min(topk // pool, n // pool) * pool + n % pool for n = 1 .. end."""
    most = topk // pool
    growing = min(end, most * pool)
    num_pools = _sum_of_pools(growing, pool) + (end - growing) * most
    full, rest = divmod(end, pool)
    return num_pools * pool + full * pool * (pool - 1) // 2 + rest * (rest + 1) // 2


def _times(flops: Flops, factor: int) -> Flops:
    return Flops(**{field.name: factor * getattr(flops, field.name) for field in fields(flops)})


def _max_over_mean(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
