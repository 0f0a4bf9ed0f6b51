"""Bytes and messages of a layout against an exchange that is played transfer by transfer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.generators import zigzag
from longprefill.partition.halo import halo_exchange
from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout, Slice
from longprefill.partition.traffic import (
    PerRank,
    Traffic,
    boundary_traffic,
    cache_row_traffic,
    halo_traffic,
    layer_traffic,
    step_traffic,
    summary_traffic,
)
from longprefill.partition.work import DenseShape, Exchange, IndexerShape, KdaShape, LayerShape, MlaShape, ModelShape

KDA = KdaShape(num_heads=2, num_value_heads=5, key_dim=3, value_dim=7, conv_width=4, gate_rank=4, output_gate_rank=2)
E_BYTES, M_BYTES = 4 * 3 * 7, 4 * 3 * 3
"""A head's E and M."""
CONV_CHANNELS = 2 * 2 * 3 + 5 * 7
exchanges = st.sampled_from(["all_gather", "head_transposed", "relay"])


def mla(pool: int) -> MlaShape:
    return MlaShape(
        num_heads=3,
        q_lora_rank=None,
        kv_lora_rank=11,
        nope_dim=5,
        rope_dim=2,
        value_dim=7,
        row_bytes=100,
        indexer=IndexerShape(num_heads=4, head_dim=6, topk=32, pool=pool),
    )


@st.composite
def tables(draw: st.DrawFn) -> Layout:
    """Any legal table: ragged slices, cuts on any page border, any rank for any fragment, ranks without rows."""
    num_ranks = draw(st.integers(1, 7))
    slices, fragments = [], []
    for job in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 4) | st.integers(60, 70) | st.integers(0, 400))
        end = start + draw(st.integers(1, 5) | st.integers(1, 700))
        borders = range(start // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS, end, PAGE_TOKENS)
        cuts = sorted(draw(st.sets(st.sampled_from(borders)))) if borders else []
        slices.append(Slice(job=job, start=start, end=end))
        for order, (first, last) in enumerate(pairwise([start, *cuts, end])):
            rank = draw(st.integers(0, num_ranks - 1))
            fragments.append(Fragment(job=job, start=first, length=last - first, rank=rank, order=order))
    return Layout(num_ranks=num_ranks, slices=tuple(slices), fragments=tuple(fragments))


class Played:
    """Transfers one by one; those of a phase between the same two ranks are one message."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_bytes: Counter[tuple[int, int]] = Counter()
        self.messages: set[tuple[str, int, int]] = set()

    def send(self, phase: str, sender: int, receiver: int, num_bytes: int) -> None:
        if sender != receiver and num_bytes:
            self.num_bytes[sender, receiver] += num_bytes
            self.messages.add((phase, sender, receiver))

    def per_rank(self) -> PerRank:
        return tuple(
            Traffic(
                sent_bytes=sum(n for (sender, _), n in self.num_bytes.items() if sender == rank),
                received_bytes=sum(n for (_, receiver), n in self.num_bytes.items() if receiver == rank),
                sent_messages=sum(sender == rank for _, sender, _ in self.messages),
                received_messages=sum(receiver == rank for _, _, receiver in self.messages),
            )
            for rank in range(self.num_ranks)
        )


def summaries(layout: Layout) -> list[tuple[Fragment, int]]:
    """Fragments that publish, with the bytes of one head."""
    published = []
    for piece in layout.slices:
        for fragment in layout.chain(piece.job)[:-1]:
            published.append((fragment, E_BYTES + (M_BYTES if fragment.order else 0)))
    return published


def heads_of(num_ranks: int) -> dict[int, int]:
    """The folding rank of every head: contiguous shares, the first ranks taking the rest."""
    shares = [5 // num_ranks + (rank < 5 % num_ranks) for rank in range(num_ranks)]
    owners = [rank for rank, share in enumerate(shares) for _ in range(share)]
    return dict(enumerate(owners))


@given(tables())
def test_all_gathered_summaries(layout: Layout) -> None:
    played = Played(layout.num_ranks)
    for fragment, head_bytes in summaries(layout):
        for receiver in range(layout.num_ranks):
            played.send("gather", fragment.rank, receiver, 5 * head_bytes)
    assert summary_traffic(layout, KDA, "all_gather") == played.per_rank()


@given(tables())
def test_head_transposed_summaries(layout: Layout) -> None:
    played = Played(layout.num_ranks)
    for head, folder in heads_of(layout.num_ranks).items():
        assert 0 <= head < 5
        for fragment, head_bytes in summaries(layout):
            played.send("there", fragment.rank, folder, head_bytes)
        for fragment in layout.fragments:
            if fragment.order:
                played.send("back", folder, fragment.rank, E_BYTES)
    assert summary_traffic(layout, KDA, "head_transposed") == played.per_rank()


@given(tables(), st.integers(1, 5))
def test_relayed_states(layout: Layout, head_groups: int) -> None:
    played = Played(layout.num_ranks)
    for piece in layout.slices:
        for before, after in pairwise(layout.chain(piece.job)):
            for group in range(head_groups):
                num_heads = len(range(group, 5, head_groups))
                played.send(f"{piece.job} {after.order} {group}", before.rank, after.rank, num_heads * E_BYTES)
    assert summary_traffic(layout, KDA, "relay", head_groups=head_groups) == played.per_rank()


@given(tables(), st.integers(0, 4))
def test_halos_are_what_the_plans_send(layout: Layout, width: int) -> None:
    played = Played(layout.num_ranks)
    for rank in range(layout.num_ranks):
        for peer, rows in halo_exchange(layout, width, rank).sends.items():
            played.send("halo", rank, peer, 80 * len(rows))
    assert halo_traffic(layout, width=width, row_bytes=80) == played.per_rank()


@given(tables())
def test_cache_rows_reach_every_rank_once(layout: Layout) -> None:
    played = Played(layout.num_ranks)
    for fragment in layout.fragments:
        for receiver in range(layout.num_ranks):
            played.send("rows", fragment.rank, receiver, 100 * fragment.length)
    assert cache_row_traffic(layout, mla(pool=4)) == played.per_rank()


@given(tables())
def test_only_complete_pools_travel(layout: Layout) -> None:
    mixer = mla(pool=4)
    assert mixer.indexer is not None
    pooled = replace(mixer, row_bytes=0, indexer=replace(mixer.indexer, key_bytes=7))
    played = Played(layout.num_ranks)
    for fragment in layout.fragments:
        for receiver in range(layout.num_ranks):
            complete = [position for position in range(fragment.start, fragment.end) if position % 4 == 3]
            played.send("rows", fragment.rank, receiver, 7 * len(complete))
    assert cache_row_traffic(layout, pooled) == played.per_rank()


@given(tables())
def test_boundary_states_reach_every_rank(layout: Layout) -> None:
    played, pooled = Played(layout.num_ranks), Played(layout.num_ranks)
    for piece in layout.slices:
        last = layout.chain(piece.job)[-1].rank
        for receiver in range(layout.num_ranks):
            played.send("boundary", last, receiver, 5 * E_BYTES)
            for _ in range(3):
                played.send("boundary", last, receiver, 2 * CONV_CHANNELS)
            for _ in range(piece.end // 4 * 4, piece.end):
                pooled.send("boundary", last, receiver, 2 * 4 * 6)
    assert boundary_traffic(layout, KDA, element_bytes=2) == played.per_rank()
    assert boundary_traffic(layout, mla(pool=4), element_bytes=2) == pooled.per_rank()
    assert boundary_traffic(layout, mla(pool=1), element_bytes=2) == (Traffic(),) * layout.num_ranks


LAYERS = tuple(
    LayerShape(mixer=mixer, ffn=DenseShape(intermediate=8)) for mixer in (KDA, mla(1), KDA, mla(4), mla(4), KDA)
)
MODEL = ModelShape(hidden=40, layers=LAYERS, element_bytes=2, attn_res_block=None)


@given(tables(), exchanges)
def test_a_step_is_the_sum_of_its_layers_and_nothing_is_lost(layout: Layout, exchange: Exchange) -> None:
    totals = step_traffic(layout, MODEL, exchange)
    assert set(totals) == {"halo", "kda_states", "cache_rows", "boundary"}
    for operation, ranks in totals.items():
        for rank, total in enumerate(ranks):
            parts = [layer_traffic(layout, layer, MODEL, exchange) for layer in LAYERS]
            assert total == sum((part[operation][rank] for part in parts if operation in part), Traffic())
        assert sum(part.sent_bytes for part in ranks) == sum(part.received_bytes for part in ranks)
        assert sum(part.sent_messages for part in ranks) == sum(part.received_messages for part in ranks)


@given(tables(), exchanges)
def test_one_rank_sends_nothing(layout: Layout, exchange: Exchange) -> None:
    alone = zigzag(layout.slices, 1)
    assert all(ranks == (Traffic(),) for ranks in step_traffic(alone, MODEL, exchange).values())


def test_bytes_of_64_ranks_and_64_heads() -> None:
    """An all-gather of summaries brings about 1 GiB to every rank, the head-transposed fold below 30 MiB."""
    kda = KdaShape(
        num_heads=64,
        num_value_heads=64,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        gate_rank=128,
        output_gate_rank=128,
    )
    layout = zigzag([Slice(job=0, start=0, end=1 << 20)], 64)
    gathered = max(rank.received_bytes for rank in summary_traffic(layout, kda, "all_gather"))
    folded = max(rank.received_bytes for rank in summary_traffic(layout, kda, "head_transposed"))
    assert 0.95 < gathered / 2**30 < 1
    assert 20 < folded / 2**20 < 30


def test_wrong_calls_are_refused() -> None:
    layout = zigzag([Slice(job=0, start=0, end=128)], 2)
    for head_groups in (0, 6):
        with pytest.raises(ValueError, match=f"head_groups={head_groups}: need 1 to 5"):
            summary_traffic(layout, KDA, "relay", head_groups=head_groups)
    with pytest.raises(ValueError, match="exchange='ring' is unknown"):
        summary_traffic(layout, KDA, "ring")  # pyright: ignore[reportArgumentType]
