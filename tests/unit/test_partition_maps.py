"""Restore maps and conv halos against oracles that walk token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.generators import zigzag
from longprefill.partition.halo import (
    HaloSlot,
    RowSource,
    Source,
    TailSource,
    halo_exchange,
    halo_moves,
)
from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout, Slice
from longprefill.partition.restore import (
    gather_permutation,
    local_position_ranges,
    local_positions,
    restore_blocks,
    restore_permutation,
)


@st.composite
def tables(draw: st.DrawFn) -> Layout:
    """Any legal table: ragged slices, cuts on any page border, any rank for any fragment, ranks without rows."""
    num_ranks = draw(st.integers(1, 5))
    slices, fragments = [], []
    for job in draw(st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True)):
        start = draw(st.integers(0, 4) | st.integers(60, 70) | st.integers(0, 400))
        end = start + draw(st.integers(1, 5) | st.integers(1, 700))
        borders = range(start // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS, end, PAGE_TOKENS)
        cuts = sorted(draw(st.sets(st.sampled_from(borders)))) if borders else []
        slices.append(Slice(job=job, start=start, end=end))
        for order, (first, last) in enumerate(pairwise([start, *cuts, end])):
            rank = draw(st.integers(0, num_ranks - 1))
            fragments.append(Fragment(job=job, start=first, length=last - first, rank=rank, order=order))
    return Layout(num_ranks=num_ranks, slices=tuple(slices), fragments=tuple(fragments))


def local_tokens(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """(job, position) of every local row."""
    return [(f.job, position) for f in layout.fragments if f.rank == rank for position in range(f.start, f.end)]


def gathered_tokens(layout: Layout) -> list[tuple[int, int]]:
    return [token for rank in range(layout.num_ranks) for token in local_tokens(layout, rank)]


def ordered_tokens(layout: Layout) -> list[tuple[int, int]]:
    return [(piece.job, position) for piece in layout.slices for position in range(piece.start, piece.end)]


@given(tables())
def test_restore_puts_gathered_rows_in_order_and_back(layout: Layout) -> None:
    gathered, ordered = gathered_tokens(layout), ordered_tokens(layout)
    assert [gathered[row] for row in restore_permutation(layout)] == ordered
    assert [ordered[row] for row in gather_permutation(layout)] == gathered
    assert sorted(restore_permutation(layout)) == list(range(layout.num_tokens))


@given(tables())
def test_blocks_name_their_tokens_and_are_maximal(layout: Layout) -> None:
    gathered, ordered = gathered_tokens(layout), ordered_tokens(layout)
    blocks = restore_blocks(layout)
    for block in blocks:
        tokens = [(block.job, block.start + offset) for offset in range(block.length)]
        assert gathered[block.gathered_row : block.gathered_row + block.length] == tokens
        assert ordered[block.ordered_row : block.ordered_row + block.length] == tokens
    for before, after in pairwise(blocks):
        assert before.ordered_row + before.length == after.ordered_row
        assert (before.job, before.gathered_row + before.length) != (after.job, after.gathered_row)


@given(tables())
def test_local_positions(layout: Layout) -> None:
    for rank in range(layout.num_ranks):
        assert list(local_positions(layout, rank)) == [position for _, position in local_tokens(layout, rank)]
        assert len(local_position_ranges(layout, rank)) == len(layout.local(rank))


def test_the_middle_segments_of_a_zigzag_are_one_block() -> None:
    layout = zigzag([Slice(job=0, start=0, end=4 * 64)], 2)
    assert [(block.start, block.length, block.gathered_row) for block in restore_blocks(layout)] == [
        (0, 64, 0),
        (64, 128, 128),
        (192, 64, 64),
    ]


def expected_source(layout: Layout, job: int, position: int, width: int) -> Source:
    """By looking every token up in lists: what a halo row is."""
    if position < 0:
        return None
    for rank in range(layout.num_ranks):
        tokens = local_tokens(layout, rank)
        if (job, position) in tokens:
            return RowSource(rank, tokens.index((job, position)))
    start = next(piece.start for piece in layout.slices if piece.job == job)
    return TailSource(list(range(start - width, start)).index(position))


@given(tables(), st.integers(0, 4))
def test_halo_moves_against_the_oracle(layout: Layout, width: int) -> None:
    moves = iter(halo_moves(layout, width))
    for fragment in layout.fragments:
        for slot in range(width):
            move = next(moves)
            position = fragment.start - width + slot
            assert (move.fragment, move.slot, move.position) == (fragment, slot, position)
            assert move.source == expected_source(layout, fragment.job, position, width)
    assert next(moves, None) is None


@given(tables(), st.integers(0, 4))
def test_exchanged_histories_hold_the_right_tokens(layout: Layout, width: int) -> None:
    """Play the exchange: every slot of every rank's history is filled once, with the token that precedes it."""
    plans = [halo_exchange(layout, width, rank) for rank in range(layout.num_ranks)]
    starts = {piece.job: piece.start for piece in layout.slices}
    for rank, plan in enumerate(plans):
        filled: list[tuple[HaloSlot, tuple[int, int] | None]] = []
        for peer, slots in plan.receives.items():
            assert peer != rank
            sent = [local_tokens(layout, peer)[row] for row in plans[peer].sends[rank]]
            filled += zip(slots, sent, strict=True)
        filled += [(copy.target, local_tokens(layout, rank)[copy.local_row]) for copy in plan.local]
        filled += [(copy.target, (copy.job, starts[copy.job] - width + copy.tail_row)) for copy in plan.tails]
        filled += [(slot, None) for slot in plan.zeros]
        expected = {}
        for index, fragment in enumerate(layout.local(rank)):
            for slot in range(width):
                position = fragment.start - width + slot
                expected[HaloSlot(index, slot)] = (fragment.job, position) if position >= 0 else None
        assert len(filled) == len(expected)
        assert dict(filled) == expected
        assert all(plans[peer].receives.get(rank) for peer in plan.sends)


def test_a_halo_spans_fragments_of_one_and_two_tokens() -> None:
    """Resume at 63: the first fragment is one token, so the second one reads it and two rows of the tail."""
    fragments = tuple(
        Fragment(job=0, start=start, length=length, rank=rank, order=rank)
        for rank, (start, length) in enumerate([(63, 1), (64, 64), (128, 2)])
    )
    layout = Layout(num_ranks=3, slices=(Slice(job=0, start=63, end=130),), fragments=fragments)
    assert [move.source for move in halo_moves(layout, 3)] == [
        TailSource(0),
        TailSource(1),
        TailSource(2),
        TailSource(1),
        TailSource(2),
        RowSource(0, 0),
        RowSource(1, 61),
        RowSource(1, 62),
        RowSource(1, 63),
    ]


def test_wrong_calls_are_refused() -> None:
    layout = zigzag([Slice(job=0, start=0, end=64)], 2)
    with pytest.raises(ValueError, match="width=-1"):
        halo_moves(layout, -1)
    with pytest.raises(IndexError, match="rank 2"):
        halo_exchange(layout, 3, 2)
