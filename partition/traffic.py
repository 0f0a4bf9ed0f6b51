"""The work model's other half: bytes and messages that a layout makes every rank send and receive, by operation.

A message is one non-empty transfer between two ranks in one layer; what stays on a rank is free. The counts are those
of direct exchanges (every rank sends its part to every peer); a ring or a tree moves the same received bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longprefill.partition.halo import RowSource, halo_moves
from longprefill.partition.layout import Layout, Slice
from longprefill.partition.shapes import GqaShape, KdaShape, LayerShape, MlaShape, ModelShape, MoeShape
from longprefill.partition.work import Exchange, chain_role, check_exchange, head_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends to and receives from other ranks."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            sent_messages=self.sent_messages + other.sent_messages,
            received_messages=self.received_messages + other.received_messages,
        )

    def times(self, factor: int) -> Traffic:
        """The same exchange `factor` times."""
        return Traffic(
            sent_bytes=factor * self.sent_bytes,
            received_bytes=factor * self.received_bytes,
            sent_messages=factor * self.sent_messages,
            received_messages=factor * self.received_messages,
        )


PerRank = tuple[Traffic, ...]


def halo_traffic(layout: Layout, *, width: int, row_bytes: int) -> PerRank:
    """Conv halo of one layer: `width` rows before every fragment, one message a pair of ranks."""
    pair_bytes: Counter[tuple[int, int]] = Counter()
    for move in halo_moves(layout, width):
        if isinstance(move.source, RowSource):
            pair_bytes[move.source.rank, move.fragment.rank] += row_bytes
    return _by_rank(layout.num_ranks, _messages(pair_bytes))


def summary_traffic(layout: Layout, kda: KdaShape, exchange: Exchange, *, head_groups: int | None = None) -> PerRank:
    """KDA states of one layer.

    all_gather: every rank receives every published summary (the first fragment's E, the middle ones' [E | M]).
    head_transposed: all-to-all of the summaries by the heads' folding rank, then of the incoming states back.
    relay: every fragment's final state to the next one, in `head_groups` messages (default: one a head).

    Raises:
        ValueError: an unknown exchange, or head_groups outside [1, value heads].
    """
    check_exchange(exchange)
    if exchange == "all_gather":
        return _gathered(published_bytes(layout, kda))
    if exchange == "head_transposed":
        return _Transposed(layout, kda).traffic()
    return _relayed(layout, kda, kda.num_value_heads if head_groups is None else head_groups)


def cache_row_traffic(layout: Layout, mla: MlaShape | GqaShape) -> PerRank:
    """The packed gather of one layer's cache rows: every row of the step, and the key of every pool that it completes,
    reaches every rank."""
    return _gathered(cache_row_bytes(layout, mla))


def cache_row_bytes(layout: Layout, mla: MlaShape | GqaShape) -> list[int]:
    """Cache rows of one layer that every rank makes in the step."""
    part_bytes = [num_rows * mla.row_bytes for num_rows in layout.row_counts]
    if isinstance(mla, MlaShape) and mla.indexer is not None:
        pool = mla.indexer.pool
        for fragment in layout.fragments:
            num_keys = fragment.end // pool - fragment.start // pool
            part_bytes[fragment.rank] += num_keys * mla.indexer.key_bytes
    return part_bytes


def boundary_bytes(piece: Slice, mixer: KdaShape | MlaShape | GqaShape, element_bytes: int) -> int:
    """What one layer leaves of a job at the end of its slice, beside cache rows. KDA: the final state and the projected
    rows of the conv tail. MLA with pooled keys: key and gate, fp32, of the tokens of the incomplete pool."""
    if isinstance(mixer, KdaShape):
        return mixer.state_bytes + max(mixer.conv_width - 1, 0) * mixer.conv_channels * element_bytes
    if isinstance(mixer, MlaShape) and mixer.indexer is not None:
        return piece.end % mixer.indexer.pool * 2 * 4 * mixer.indexer.head_dim
    return 0


def boundary_traffic(layout: Layout, mixer: KdaShape | MlaShape | GqaShape, element_bytes: int) -> PerRank:
    """The boundary state of one layer at the step's end, brought to all ranks from the owner of each chain's last
    fragment."""
    pair_bytes: Counter[tuple[int, int]] = Counter()
    for piece in layout.slices:
        sender, num_bytes = layout.chain(piece.job)[-1].rank, boundary_bytes(piece, mixer, element_bytes)
        for receiver in range(layout.num_ranks):
            pair_bytes[sender, receiver] += num_bytes
    return _by_rank(layout.num_ranks, _messages(pair_bytes))


class TensorParallelRows(NamedTuple):
    """What one row of a layer costs inside its tensor-parallel group."""

    gathers: tuple[int, ...]
    """Bytes of the row in each gather: before the mixer, for its gate, before the feed-forward."""
    selection: int
    """Bytes of the indices that the row's indexer found, gathered too."""
    num_sums: int
    """Sums of a hidden row that go back to its owner, one a part."""


def tensor_parallel_rows(layer: LayerShape, model: ModelShape) -> TensorParallelRows:
    """Gathers before each part of a layer and sums after it, a row."""
    mixer, row = layer.mixer, model.hidden * model.element_bytes
    gathers, selection, num_sums = [row], 0, 1
    if isinstance(mixer, MlaShape):
        gathers = [row if mixer.q_lora_rank is None else mixer.q_lora_rank * model.element_bytes]
        gathers += [row] * mixer.is_gated
        if mixer.indexer is not None and mixer.indexer.num_heads:
            selection = 4 * (mixer.indexer.topk + mixer.indexer.pool - 1)
    if not isinstance(layer.ffn, MoeShape) or layer.ffn.shared_intermediate:
        gathers, num_sums = [*gathers, row], 2
    return TensorParallelRows(tuple(gathers), selection, num_sums)


def layer_traffic(
    layout: Layout, layer: LayerShape, model: ModelShape, exchange: Exchange = "all_gather"
) -> dict[str, PerRank]:
    """All exchanges of one layer by operation name: halo, kda_states, cache_rows, boundary."""
    mixer = layer.mixer
    boundary = boundary_traffic(layout, mixer, model.element_bytes)
    if isinstance(mixer, KdaShape):
        row_bytes = model.hidden * model.element_bytes
        return {
            "halo": halo_traffic(layout, width=max(mixer.conv_width - 1, 0), row_bytes=row_bytes),
            "kda_states": summary_traffic(layout, mixer, exchange),
            "boundary": boundary,
        }
    return {"cache_rows": cache_row_traffic(layout, mixer), "boundary": boundary}


def step_traffic(layout: Layout, model: ModelShape, exchange: Exchange = "all_gather") -> dict[str, PerRank]:
    """All exchanges of a whole step by operation name."""
    totals: dict[str, PerRank] = {}
    for layer, repeats in Counter(model.layers).items():
        for operation, ranks in layer_traffic(layout, layer, model, exchange).items():
            before = totals.get(operation, (Traffic(),) * layout.num_ranks)
            totals[operation] = tuple(
                total + traffic.times(repeats) for total, traffic in zip(before, ranks, strict=True)
            )
    return totals


def published_bytes(layout: Layout, kda: KdaShape) -> list[int]:
    """Summary bytes that every rank publishes in one layer, all heads."""
    published, state, transition = [0] * layout.num_ranks, kda.state_bytes, kda.transition_bytes
    for piece in layout.slices:
        chain = layout.chain(piece.job)
        for fragment in chain:
            role = chain_role(fragment.order, len(chain))
            published[fragment.rank] += state * role.publishes_state + transition * role.publishes_transition
    return published


def transposed_bytes(layout: Layout, kda: KdaShape) -> list[int]:
    """What every rank receives in one layer by head_transposed: summaries of its heads, and incoming states back."""
    return _Transposed(layout, kda).received_bytes


class _Transposed:
    """Summaries to the ranks that fold their heads, and incoming states back. Every rank meets every other one, so sums
    over peers are those over all ranks less its own part."""

    def __init__(self, layout: Layout, kda: KdaShape) -> None:
        num_ranks, num_heads = layout.num_ranks, kda.num_value_heads
        self.num_heads = num_heads
        self.shares = [head_share(num_heads, num_ranks, rank) for rank in range(num_ranks)]
        self.published = [num_bytes // num_heads for num_bytes in published_bytes(layout, kda)]
        self.wanted = [0] * num_ranks
        head_bytes = kda.state_bytes // num_heads
        for fragment in layout.fragments:
            self.wanted[fragment.rank] += (fragment.order > 0) * head_bytes

    @property
    def received_bytes(self) -> list[int]:
        """By rank."""
        published, num_heads = sum(self.published), self.num_heads
        return [
            share * (published - own) + wanted * (num_heads - share)
            for share, own, wanted in zip(self.shares, self.published, self.wanted, strict=True)
        ]

    def traffic(self) -> PerRank:
        """With what is sent, and messages."""
        num_folding, num_publishing, num_wanting = (
            sum(map(bool, counts)) for counts in (self.shares, self.published, self.wanted)
        )
        wanted, received, num_heads = sum(self.wanted), self.received_bytes, self.num_heads
        return tuple(
            Traffic(
                sent_bytes=self.published[rank] * (num_heads - share) + share * (wanted - self.wanted[rank]),
                received_bytes=received[rank],
                sent_messages=bool(self.published[rank]) * (num_folding - bool(share))
                + bool(share) * (num_wanting - bool(self.wanted[rank])),
                received_messages=bool(share) * (num_publishing - bool(self.published[rank]))
                + bool(self.wanted[rank]) * (num_folding - bool(share)),
            )
            for rank, share in enumerate(self.shares)
        )


def _relayed(layout: Layout, kda: KdaShape, head_groups: int) -> PerRank:
    if not 1 <= head_groups <= kda.num_value_heads:
        raise ValueError(f"head_groups={head_groups}: need 1 to {kda.num_value_heads}, the number of value heads")
    hops = [
        (before.rank, after.rank, kda.state_bytes, head_groups)
        for before, after in zip(layout.fragments, layout.fragments[1:], strict=False)
        if before.job == after.job and before.rank != after.rank
    ]
    return _by_rank(layout.num_ranks, hops)


def _gathered(part_bytes: Sequence[int]) -> PerRank:
    """Every rank's part to every other rank; empty parts send nothing."""
    num_ranks, total = len(part_bytes), sum(part_bytes)
    num_parts = sum(part > 0 for part in part_bytes)
    return tuple(
        Traffic(
            sent_bytes=part * (num_ranks - 1),
            received_bytes=total - part,
            sent_messages=(num_ranks - 1) * (part > 0),
            received_messages=num_parts - (part > 0),
        )
        for part in part_bytes
    )


def _messages(pair_bytes: Mapping[tuple[int, int], int]) -> Iterable[tuple[int, int, int, int]]:
    """(sender, receiver, bytes, 1) of every pair that exchanges anything."""
    for (sender, receiver), num_bytes in pair_bytes.items():
        if sender != receiver and num_bytes:
            yield sender, receiver, num_bytes, 1


def _by_rank(num_ranks: int, transfers: Iterable[tuple[int, int, int, int]]) -> PerRank:
    """Per rank sums of (sender, receiver, bytes, messages)."""
    sent_bytes, received_bytes, sent_messages, received_messages = ([0] * num_ranks for _ in range(4))
    for sender, receiver, num_bytes, num_messages in transfers:
        sent_bytes[sender] += num_bytes
        sent_messages[sender] += num_messages
        received_bytes[receiver] += num_bytes
        received_messages[receiver] += num_messages
    return tuple(
        Traffic(
            sent_bytes=sent_bytes[rank],
            received_bytes=received_bytes[rank],
            sent_messages=sent_messages[rank],
            received_messages=received_messages[rank],
        )
        for rank in range(num_ranks)
    )
