"""Fragment tables and their generators: coverage, alignment, balance, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.generators import GENERATORS, LayoutKind, contiguous, generate, zigzag
from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout, Slice

MAX_RAGGED_TOKENS = 2 * (PAGE_TOKENS - 1)
"""What a slice's ragged first and last page lack at most."""


@st.composite
def steps(draw: st.DrawFn, max_jobs: int = 5, max_tokens: int = 3000) -> list[Slice]:
    jobs = draw(st.lists(st.integers(0, 99), min_size=1, max_size=max_jobs, unique=True))
    slices = []
    for job in jobs:
        start = draw(st.integers(0, 500))
        slices.append(Slice(job=job, start=start, end=start + draw(st.integers(1, max_tokens))))
    return slices


kinds: st.SearchStrategy[LayoutKind] = st.sampled_from(sorted(GENERATORS))


def num_pages(piece: Slice) -> int:
    return -(-piece.end // PAGE_TOKENS) - piece.start // PAGE_TOKENS


@given(steps(), st.integers(1, 9), kinds)
def test_every_token_lies_on_one_rank_and_cuts_lie_on_pages(
    slices: list[Slice], num_ranks: int, kind: LayoutKind
) -> None:
    layout = generate(kind, slices, num_ranks)
    assert layout.slices == tuple(slices)
    for piece in slices:
        chain = layout.chain(piece.job)
        tokens = [position for fragment in chain for position in range(fragment.start, fragment.end)]
        assert tokens == list(range(piece.start, piece.end))
        assert [fragment.order for fragment in chain] == list(range(len(chain)))
        assert all(fragment.start % PAGE_TOKENS == 0 for fragment in chain[1:])
        assert all(fragment.length for fragment in chain)
    assert sum(layout.row_counts) == layout.num_tokens == sum(piece.num_tokens for piece in slices)


@given(steps(), st.integers(1, 9), kinds)
def test_lookups_agree_with_the_table(slices: list[Slice], num_ranks: int, kind: LayoutKind) -> None:
    layout = generate(kind, slices, num_ranks)
    gathered = 0
    for rank in range(num_ranks):
        expected = [fragment for fragment in layout.fragments if fragment.rank == rank]
        assert list(layout.local(rank)) == expected
        row = 0
        for fragment in expected:
            assert layout.local_row(fragment) == row
            assert layout.gathered_row(fragment) == gathered + row
            assert layout.locate(fragment.job, fragment.start) == fragment
            assert layout.locate(fragment.job, fragment.end - 1) == fragment
            row += fragment.length
        assert layout.num_local_rows(rank) == layout.row_counts[rank] == row
        assert layout.row_offsets[rank] == gathered
        gathered += row
    assert layout.row_offsets[num_ranks] == gathered


@given(steps(max_jobs=1), st.integers(1, 9), kinds)
def test_pages_of_one_job_differ_by_at_most_one(slices: list[Slice], num_ranks: int, kind: LayoutKind) -> None:
    layout = generate(kind, slices, num_ranks)
    pages = [0] * num_ranks
    for fragment in layout.fragments:
        pages[fragment.rank] += num_pages(Slice(job=0, start=fragment.start, end=fragment.end))
    assert sum(pages) == num_pages(slices[0])
    assert max(pages) - min(pages) <= 1


@given(steps(max_jobs=8), st.integers(1, 9), kinds)
def test_tokens_of_a_whole_step_balance(slices: list[Slice], num_ranks: int, kind: LayoutKind) -> None:
    counts = generate(kind, slices, num_ranks).row_counts
    assert max(counts) - min(counts) <= PAGE_TOKENS + MAX_RAGGED_TOKENS


@given(steps(max_jobs=1), st.integers(1, 9))
def test_zigzag_rank_owns_a_head_and_its_mirror(slices: list[Slice], num_ranks: int) -> None:
    chain = zigzag(slices, num_ranks).chain(slices[0].job)
    if len(chain) == 2 * num_ranks:
        assert [fragment.rank for fragment in chain] == [*range(num_ranks), *reversed(range(num_ranks))]
    assert all(sum(f.rank == rank for f in chain) <= 2 for rank in range(num_ranks))


@given(st.integers(1, 9), st.integers(0, 40))
def test_contiguous_is_one_run_a_rank(num_ranks: int, pages: int) -> None:
    layout = contiguous([Slice(job=0, start=0, end=pages * PAGE_TOKENS + 5)], num_ranks)
    assert [fragment.rank for fragment in layout.fragments] == list(range(min(num_ranks, pages + 1)))


@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_five_pages_of_five_jobs_spread_over_three_ranks(kind: LayoutKind) -> None:
    layout = generate(kind, [Slice(job=job, start=0, end=PAGE_TOKENS) for job in range(5)], 3)
    assert sorted(layout.row_counts) == [PAGE_TOKENS, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS]


def test_short_jobs_fill_the_ranks_that_a_long_one_leaves_short() -> None:
    slices = [Slice(job=7, start=0, end=64), Slice(job=3, start=0, end=5 * 64), Slice(job=5, start=0, end=64)]
    layout = zigzag(slices, 7)
    assert layout.row_counts == (64,) * 7


def test_a_short_slice_uses_fewer_ranks_and_leaves_the_others_empty() -> None:
    layout = zigzag([Slice(job=0, start=0, end=130)], 4)
    assert layout.row_counts == (64, 64, 2, 0)
    assert layout.local(3) == ()


def test_a_ragged_resume_starts_where_it_starts() -> None:
    layout = zigzag([Slice(job=0, start=70, end=70 + 8 * 64)], 2)
    assert [fragment.start for fragment in layout.fragments] == [70, 256, 384, 512]
    assert layout.fragments[-1].end == 582


def test_empty_fragments_vanish_and_orders_close_up() -> None:
    layout = Layout(
        num_ranks=3,
        slices=(Slice(job=4, start=0, end=100),),
        fragments=(
            Fragment(job=4, start=64, length=36, rank=0, order=7),
            Fragment(job=4, start=64, length=0, rank=1, order=5),
            Fragment(job=4, start=0, length=64, rank=2, order=2),
        ),
    )
    assert layout.fragments == (
        Fragment(job=4, start=0, length=64, rank=2, order=0),
        Fragment(job=4, start=64, length=36, rank=0, order=1),
    )
    assert layout == replace(layout)


def one(*fragments: Fragment, slices: tuple[Slice, ...] = (Slice(job=0, start=0, end=128),)) -> Layout:
    return Layout(num_ranks=2, slices=slices, fragments=fragments)


def fragment(start: int, length: int, *, job: int = 0, rank: int = 0, order: int = 0) -> Fragment:
    return Fragment(job=job, start=start, length=length, rank=rank, order=order)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ((), "ends at 0, its slice at 128"),
        ((fragment(0, 64),), "ends at 64, its slice at 128"),
        ((fragment(0, 192),), "ends at 192, its slice at 128"),
        ((fragment(0, 128), fragment(64, 64, order=1)), "covered job 0 up to 128"),
        ((fragment(64, 64),), "covered job 0 up to 0"),
        ((fragment(0, 64, order=1), fragment(64, 64, order=0)), "starts at 64"),
        ((fragment(0, 64), fragment(64, 64)), "same place"),
        ((fragment(0, 60), fragment(60, 68, order=1)), "off the page grid"),
        ((fragment(0, 128, rank=2),), r"outside \[0, 2\)"),
        ((fragment(0, 128, rank=-1),), r"outside \[0, 2\)"),
        ((fragment(0, 128), fragment(128, -1, order=1)), "length is 0 or more"),
        ((fragment(0, 128), fragment(0, 64, job=9)), "job 9"),
    ],
)
def test_a_table_that_is_not_a_partition_is_refused(fragments: tuple[Fragment, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one(*fragments)


def test_two_slices_of_a_job_are_refused() -> None:
    slices = [Slice(job=0, start=0, end=64), Slice(job=0, start=64, end=128)]
    with pytest.raises(ValueError, match="two slices"):
        one(fragment(0, 64), fragment(64, 64, order=1), slices=tuple(slices))
    for kind in GENERATORS:
        with pytest.raises(ValueError, match="two slices"):
            generate(kind, slices, 2)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks=0"):
        zigzag([Slice(job=0, start=0, end=64)], 0)
    with pytest.raises(ValueError, match="'spiral' is unknown: use zigzag or contiguous"):
        generate("spiral", [Slice(job=0, start=0, end=64)], 2)  # pyright: ignore[reportArgumentType]
    for start, end in ((0, 0), (-1, 5), (7, 6)):
        with pytest.raises(ValueError, match="need 0 <= start < end"):
            Slice(job=0, start=start, end=end)
    with pytest.raises(ValueError, match="job=-1"):
        Slice(job=-1, start=0, end=1)
    layout = zigzag([Slice(job=0, start=64, end=128)], 2)
    with pytest.raises(IndexError, match="rank 2"):
        layout.local(2)
    with pytest.raises(IndexError, match="rank -1"):
        layout.num_local_rows(-1)
    for position in (63, 128):
        with pytest.raises(IndexError, match=f"position {position}"):
            layout.locate(0, position)
    assert layout.chain(1) == ()
