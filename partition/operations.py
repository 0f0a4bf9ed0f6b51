"""The work model item by item: which operations a rank runs in a layer, in which order, with what extents and counts.

Names are those of the engine's trace spans where there is one. Flops add up to `work.layer_flops` exactly; bytes are
the memory traffic of an operation that reads its weights and inputs once and writes its outputs once. Shapes are those
of one tensor-parallel rank (`shapes.py`): local rows are the rows of a context-parallel rank's fragments, own rows one
tensor-parallel rank's share of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from longprefill.partition.layout import Fragment, Layout
from longprefill.partition.row_work import (
    expansion_row_flops,
    ffn_flops,
    kda_output_flops,
    kda_projection_flops,
    kda_row_flops,
    mla_projection_flops,
    residual_flops,
)
from longprefill.partition.shapes import DenseShape, GqaShape, KdaShape, LayerShape, MlaShape, ModelShape, MoeShape
from longprefill.partition.work import (
    Exchange,
    chain_role,
    folds,
    halo_flops,
    selected_keys,
    visible_keys,
    visible_pools,
)

AXES = ("rows", "keys", "parts")
"""Extents of an operation: its rows, the keys that they see on average, and its parts: fragments or folds."""
OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "embed": "memory",
        "norms": "memory",
        "residual": "memory",
        "kda.project": "gemm",
        "kda.conv": "memory",
        "kda.scan": "scan",
        "kda.summary": "scan",
        "kda.fold": "scan",
        "kda.output": "gemm",
        "mla.rows": "gemm",
        "mla.query": "gemm",
        "mla.write": "memory",
        "indexer": "indexer",
        "attention.dense": "attention",
        "attention.short": "attention",
        "attention.sparse": "attention",
        "mla.output": "gemm",
        "ffn.dense": "gemm",
        "moe.route": "gemm",
        "moe.experts": "moe",
        "moe.shared": "gemm",
        "head": "gemm",
    }
)
"""Every operation and its class. `attention.short`: DSA rows that see at most top-k keys and take the dense form."""


class Operation(NamedTuple):
    """One operation of one rank. `flops` 0: counted by bytes."""

    name: str
    rows: int
    keys: int
    parts: int
    flops: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One rank's operations of one layer, by the exchanges between them."""

    before: tuple[Operation, ...] = ()
    """KDA: up to the exchange of states. Attention: the cache rows, before their gather starts."""
    beside: tuple[Operation, ...] = ()
    """Attention: the query side, which runs while the rows travel."""
    after: tuple[Operation, ...] = ()
    """The rest of the mixer."""
    route: tuple[Operation, ...] = ()
    """What precedes the experts' dispatch, when they are spread over ranks."""
    ffn: tuple[Operation, ...] = ()
    """The feed-forward, norms and residual mixing of the layer."""

    @property
    def all(self) -> tuple[Operation, ...]:
        return (*self.before, *self.beside, *self.after, *self.route, *self.ffn)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """What of a layer's work depends on more than its shape."""

    exchange: Exchange = "all_gather"
    num_tp: int = 1


def layer_operations(
    layout: Layout, layer: LayerShape, model: ModelShape, place: LayerPlace, ranks: Sequence[int] | None = None
) -> tuple[LayerWork, ...]:
    """The operations of one layer for every context-parallel rank, or the given ones: for that of its tensor-parallel
    ranks with most rows."""
    chosen = range(layout.num_ranks) if ranks is None else ranks
    ffns = cache(lambda rows: _ffn_operations(layer.ffn, model, rows, -(-rows // place.num_tp)))
    works = []
    for rank, mixer in zip(chosen, _mixer_operations(layout, layer.mixer, model, place, chosen), strict=True):
        route, ffn = ffns(layout.row_counts[rank])
        works.append(LayerWork(before=mixer.before, beside=mixer.beside, after=mixer.after, route=route, ffn=ffn))
    return tuple(works)


def operation_shape(name: str, layer: LayerShape, model: ModelShape) -> dict[str, int | str]:
    """The dimensions that an operation of this layer was or would be measured with, as profiles name them."""
    shape: dict[str, int | str] = {"hidden": model.hidden, "element_bytes": model.element_bytes}
    if name.startswith(("ffn.", "moe.")):
        return shape | _plain(layer.ffn)
    if name == "residual":
        scheme = {"streams": model.hyper_streams} if model.hyper_streams else {"attn_res_block": model.attn_res_block}
        return shape | {key: value for key, value in scheme.items() if value is not None}
    if name in ("embed", "norms"):
        return shape
    if name == "head":
        return shape | {"vocab_size": model.vocab_size}
    shape |= _plain(layer.mixer)
    if isinstance(layer.mixer, MlaShape) and layer.mixer.indexer is not None:
        shape |= {f"index_{key}": value for key, value in _plain(layer.mixer.indexer).items()}
    return shape


def edge_operations(layout: Layout, model: ModelShape, num_tp: int, num_ending: int) -> tuple[Operation, Operation]:
    """Embedding of the fullest rank's rows, and the head for the jobs whose last token is in the step."""
    own = -(-max(layout.row_counts) // num_tp)
    head_bytes = model.element_bytes * model.hidden * model.vocab_size * (num_ending > 0)
    return (
        Operation("embed", own, 0, 1, 0, 2 * own * model.hidden * model.element_bytes),
        Operation("head", num_ending, 0, 1, 2 * num_ending * model.hidden * model.vocab_size, head_bytes),
    )


def fold_operation(kda: KdaShape, num_folds: int) -> Operation:
    """States through transitions: one fold is one value head's product M S."""
    num_bytes = num_folds * 4 * kda.key_dim * (kda.key_dim + 2 * kda.value_dim)
    return Operation("kda.fold", 0, 0, num_folds, num_folds * 2 * kda.key_dim * kda.key_dim * kda.value_dim, num_bytes)


def _plain(shape: object) -> dict[str, int | str]:
    """The integer fields of a shape."""
    values = {item.name: getattr(shape, item.name) for item in fields(shape)}  # pyright: ignore[reportArgumentType]
    return {name: int(value) for name, value in values.items() if isinstance(value, int)}


def _folds_of(layout: Layout, kda: KdaShape, exchange: Exchange) -> list[int]:
    counts = [0] * layout.num_ranks
    for piece in layout.slices:
        chain = layout.chain(piece.job)
        for rank, number in enumerate(folds(chain, layout.num_ranks, kda.num_value_heads, exchange)):
            counts[rank] += number
    return counts


class _MixerWork(NamedTuple):
    before: tuple[Operation, ...]
    beside: tuple[Operation, ...]
    after: tuple[Operation, ...]


def _mixer_operations(
    layout: Layout, mixer: KdaShape | MlaShape | GqaShape, model: ModelShape, place: LayerPlace, ranks: Sequence[int]
) -> list[_MixerWork]:
    """By rank; what several ranks have in common is counted once and is one object."""
    if isinstance(mixer, KdaShape):
        num_folds = _folds_of(layout, mixer, place.exchange)
        halos = halo_flops(layout, mixer, model.hidden)
        owns = [_kda_rank(layout, rank, num_folds[rank], halos[rank], place.exchange) for rank in ranks]
        known = {own: _kda_operations(own, mixer, model) for own in set(owns)}
        return [known[own] for own in owns]
    if isinstance(mixer, MlaShape):
        projections = cache(lambda rows: _mla_projections(rows, mixer, model, place.num_tp))
        found: list[_MixerWork] = []
        for rank in ranks:
            before, beside, output = projections(layout.row_counts[rank])
            attended = _mla_attention(layout.local(rank), mixer, model, place.num_tp, layout.num_tokens)
            found.append(_MixerWork(before, beside, (*attended, *output)))
        return found
    return [_gqa_operations(layout.local(rank), mixer, model, layout.row_counts[rank]) for rank in ranks]


class _KdaRank(NamedTuple):
    """What a rank's operations of a KDA layer follow from: lengths of its fragments that begin a chain, of those that
    follow, and of those among them whose summary is published."""

    first: tuple[int, ...]
    later: tuple[int, ...]
    middle: tuple[int, ...]
    num_folds: int
    halo_flops: int


def _kda_rank(layout: Layout, rank: int, num_folds: int, halo_flops: int, exchange: Exchange) -> _KdaRank:
    local = layout.local(rank)
    later = [fragment for fragment in local if fragment.order > 0]
    middle = [
        fragment.length
        for fragment in later
        if exchange != "relay" and chain_role(fragment.order, len(layout.chain(fragment.job))).publishes_transition
    ]
    return _KdaRank(
        first=tuple(fragment.length for fragment in local if fragment.order == 0),
        later=tuple(fragment.length for fragment in later),
        middle=tuple(middle),
        num_folds=num_folds,
        halo_flops=halo_flops,
    )


def _kda_operations(own: _KdaRank, kda: KdaShape, model: ModelShape) -> _MixerWork:
    rows, num_parts = sum(own.first) + sum(own.later), len(own.first) + len(own.later)
    element, hidden = model.element_bytes, model.hidden
    value_width = kda.num_value_heads * kda.value_dim
    width = kda.conv_channels + kda.num_value_heads * kda.key_dim + value_width
    scan_flops, summary_flops = kda_row_flops(kda)
    output = kda_output_flops(kda, hidden)
    project = rows * (kda_projection_flops(kda, hidden) - output) + own.halo_flops
    scan_bytes = element * (kda.conv_channels + value_width) + 4 * kda.num_value_heads * kda.key_dim

    def scanned(name: str, lengths: Sequence[int], flops: int) -> list[Operation]:
        if not lengths:
            return []
        num_bytes = sum(lengths) * scan_bytes + len(lengths) * kda.state_bytes
        return [Operation(name, sum(lengths), 0, len(lengths), sum(lengths) * flops, num_bytes)]

    before = [
        Operation("kda.project", rows, 0, 1, project, _gemm_bytes(rows, hidden, width, element)),
        Operation("kda.conv", rows, 0, num_parts, 0, rows * 4 * kda.conv_channels * element),
        *scanned("kda.scan", own.first, scan_flops),
        *scanned("kda.summary", own.middle, summary_flops),
    ]
    after = [
        *([fold_operation(kda, own.num_folds)] if own.num_folds else []),
        *scanned("kda.scan", own.later, scan_flops),
        Operation("kda.output", rows, 0, 1, rows * output, _gemm_bytes(rows, value_width, hidden, element)),
    ]
    return _MixerWork(tuple(before), (), tuple(after))


def _mla_projections(rows: int, mla: MlaShape, model: ModelShape, num_tp: int) -> tuple[tuple[Operation, ...], ...]:
    """Cache rows; queries; output."""
    own = -(-rows // num_tp)
    element, hidden = model.element_bytes, model.hidden
    parts = mla_projection_flops(mla, hidden)
    query_width, value_width = mla.num_heads * (mla.nope_dim + mla.rope_dim), mla.num_heads * mla.value_dim
    latent = mla.kv_lora_rank + mla.rope_dim
    query_input = hidden if mla.q_lora_rank is None else mla.q_lora_rank
    cached = Operation("mla.rows", own, 0, 1, own * parts.rows, _gemm_bytes(own, hidden, latent, element))
    query_flops = rows * parts.query + own * parts.own_query
    query = Operation("mla.query", rows, 0, 1, query_flops, _gemm_bytes(rows, query_input, query_width, element))
    output_bytes = _gemm_bytes(rows, value_width, hidden, element)
    output = Operation("mla.output", rows, 0, 1, rows * parts.output, output_bytes)
    return (cached,), (query,), (output,)


def _mla_attention(
    local: Sequence[Fragment], mla: MlaShape, model: ModelShape, num_tp: int, num_written: int
) -> list[Operation]:
    """`num_written`: rows of the whole step, which every rank writes to its pages."""
    attended = [operation for fragment in local for operation in _attended(fragment, mla, model.element_bytes, num_tp)]
    row_bytes = mla.row_bytes + (0 if mla.indexer is None else mla.indexer.key_bytes // mla.indexer.pool)
    written = Operation("mla.write", num_written, 0, len(local), 0, 2 * num_written * row_bytes)
    return [written, *_expanded_once(attended, local, mla)]


def _attended(fragment: Fragment, mla: MlaShape, element: int, num_tp: int) -> list[Operation]:
    """Index and attention of one fragment; a tensor-parallel rank indexes its share of the rows."""
    start, end, rows = fragment.start, fragment.end, fragment.length
    io_bytes = rows * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim) * element
    if mla.indexer is None:
        pair = 2 * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
        num_bytes = io_bytes + end * mla.row_bytes
        return [
            Operation("attention.dense", rows, _mean_keys(start, end), 1, pair * visible_keys(start, end), num_bytes)
        ]
    indexer = mla.indexer
    absorb = 2 * mla.num_heads * mla.kv_lora_rank * (mla.nope_dim + mla.value_dim)
    pair = 2 * mla.num_heads * (2 * mla.kv_lora_rank + mla.rope_dim)
    border = min(max(indexer.topk, start), end)
    found = []
    if border > start:
        flops = pair * selected_keys(start, border, indexer.topk, indexer.pool) + (border - start) * absorb
        num_bytes = (border - start) * io_bytes // rows + border * mla.row_bytes
        found.append(Operation("attention.short", border - start, _mean_keys(start, border), 1, flops, num_bytes))
    index = 2 * indexer.num_heads * indexer.head_dim
    if index:
        pairs = -(-visible_pools(start, end, indexer.pool) // num_tp)
        own = -(-rows // num_tp)
        index_bytes = end // indexer.pool * indexer.head_dim * element + own * indexer.num_heads * indexer.head_dim
        found.append(Operation("indexer", own, _mean_keys(start, end), 1, index * pairs, index_bytes))
    if border < end:
        keys = selected_keys(border, end, indexer.topk, indexer.pool)
        num_bytes = (end - border) * io_bytes // rows + keys * mla.row_bytes
        flops = pair * keys + (end - border) * absorb
        found.append(Operation("attention.sparse", end - border, _mean_keys(border, end), 1, flops, num_bytes))
    return found


def _mean_keys(start: int, end: int) -> int:
    """Keys that the rows [start, end) see on average: a position and all before it."""
    return (start + 1 + end) // 2


def _expanded_once(attended: list[Operation], local: Sequence[Fragment], mla: MlaShape) -> list[Operation]:
    """Dense attention with the expansion of a job's visible rows, counted once a rank and job: on its last fragment."""
    if mla.indexer is not None:
        return attended
    row_flops = expansion_row_flops(mla)
    last = {fragment.job: n for n, fragment in enumerate(local)}
    return [
        operation._replace(flops=operation.flops + fragment.end * row_flops) if last[fragment.job] == n else operation
        for n, (fragment, operation) in enumerate(zip(local, attended, strict=True))
    ]


def _gqa_operations(local: Sequence[Fragment], gqa: GqaShape, model: ModelShape, rows: int) -> _MixerWork:
    element, hidden = model.element_bytes, model.hidden
    width = (gqa.num_heads + 2 * gqa.num_kv_heads) * gqa.head_dim
    inner = gqa.num_heads * gqa.head_dim
    pair = 4 * inner
    attended = [
        Operation(
            "attention.dense",
            fragment.length,
            _mean_keys(fragment.start, fragment.end),
            1,
            pair * visible_keys(fragment.start, fragment.end),
            2 * fragment.length * inner * element + fragment.end * gqa.row_bytes,
        )
        for fragment in local
    ]
    project = Operation("mla.query", rows, 0, 1, 2 * rows * hidden * width, _gemm_bytes(rows, hidden, width, element))
    output = Operation("mla.output", rows, 0, 1, 2 * rows * inner * hidden, _gemm_bytes(rows, inner, hidden, element))
    return _MixerWork((project,), (), (*attended, output))


def _ffn_operations(
    ffn: DenseShape | MoeShape, model: ModelShape, rows: int, own: int
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Routing; the rest with norms and residual mixing, but for Attention Residuals, whose sources differ by layer."""
    hidden, element = model.hidden, model.element_bytes
    mixing = residual_operations(model, own, 0)
    if isinstance(ffn, DenseShape):
        num_bytes = element * (3 * hidden * ffn.intermediate + rows * (2 * hidden + 3 * ffn.intermediate))
        return (), (Operation("ffn.dense", rows, 0, 1, rows * ffn_flops(ffn, hidden).dense, num_bytes), *mixing)
    parts = ffn_flops(ffn, hidden)
    width = hidden if ffn.latent_dim is None else ffn.latent_dim
    used = ffn.num_experts * (1.0 - (1.0 - ffn.experts_per_token / max(ffn.num_experts, 1)) ** own)
    held = ffn.num_experts if ffn.held_experts is None else ffn.held_experts
    weights = int(used * held / max(ffn.num_experts, 1)) * 3 * width * ffn.intermediate
    streams = own * ffn.experts_per_token * (2 * width + 3 * ffn.intermediate)
    route = Operation("moe.route", own, 0, 1, own * parts.route, 4 * own * (hidden + ffn.num_experts))
    experts = Operation("moe.experts", own, 0, 1, own * parts.experts, element * (weights + streams))
    if not ffn.shared_intermediate:
        return (route,), (experts, *mixing)
    shared_bytes = element * (3 * hidden * ffn.shared_intermediate + rows * (2 * hidden + 3 * ffn.shared_intermediate))
    return (route,), (experts, Operation("moe.shared", rows, 0, 1, rows * parts.shared, shared_bytes), *mixing)


def residual_operations(model: ModelShape, own: int, sources: int) -> tuple[Operation, ...]:
    """Two norms and two additions a layer, and the mixing of a residual scheme."""
    row_bytes = model.hidden * model.element_bytes
    norms = Operation("norms", own, 0, 1, 0, own * 10 * row_bytes)
    if not sources and not model.hyper_streams:
        return (norms,)
    streams = sources or 6 * model.hyper_streams
    flops = own * residual_flops(model, sources)
    return norms, Operation("residual", own, 0, 1, flops, own * streams * row_bytes)


def _gemm_bytes(rows: int, width_in: int, width_out: int, element: int) -> int:
    """A product that reads its weights and its input once and writes its output once."""
    return element * (width_in * width_out + rows * (width_in + width_out)) if rows else 0
