"""Row shards under tensor parallelism: every row once, aligned cuts, balanced index work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.generators import generate
from longprefill.partition.layout import Slice
from longprefill.partition.shards import RowShards
from longprefill.partition.work import visible_keys


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    start=st.integers(0, 200),
    cp=st.integers(1, 5),
    tp=st.integers(1, 5),
    align=st.sampled_from([1, 4, 16, 64]),
    kind=st.sampled_from(["zigzag", "contiguous"]),
)
def test_runs_cover_every_local_row_once(lengths, start, cp, tp, align, kind):
    slices = [Slice(job=job, start=start, end=start + length) for job, length in enumerate(lengths)]
    layout = generate(kind, slices, cp)
    shards = RowShards(layout=layout, num_tp=tp, align=align)
    for cp_rank in range(cp):
        rows: list[int] = []
        positions: dict[int, tuple[int, int]] = {}
        for fragment in layout.local(cp_rank):
            first = layout.local_row(fragment)
            positions |= {first + i: (fragment.job, fragment.start + i) for i in range(fragment.length)}
        for tp_rank in range(tp):
            world = cp_rank * tp + tp_rank
            for run, local in zip(shards.runs(world), shards.local_rows(world), strict=True):
                assert run.rank == world
                assert len(local) == run.length > 0
                assert [positions[row] for row in local] == [(run.job, run.start + i) for i in range(run.length)]
                borders = {piece.start for piece in layout.fragments if piece.job == run.job}
                assert run.start in borders or run.start % align == 0
                rows += local
        assert sorted(rows) == list(range(layout.num_local_rows(cp_rank)))
    assert sum(shards.row_counts) == sum(lengths)


def test_one_rank_keeps_whole_fragments():
    layout = generate("zigzag", [Slice(job=0, start=0, end=1000)], 3)
    shards = RowShards(layout=layout, num_tp=1, align=1)
    assert all(shards.runs(rank) == layout.local(rank) for rank in range(3))


def test_index_work_is_even_over_the_group():
    layout = generate("zigzag", [Slice(job=0, start=0, end=8192)], 4)
    shards = RowShards(layout=layout, num_tp=4, align=4)
    work = [sum(visible_keys(run.start, run.end) for run in shards.runs(world)) for world in range(16)]
    assert max(work) * 16 / sum(work) < 1.001


def test_refusals():
    layout = generate("zigzag", [Slice(job=0, start=0, end=100)], 2)
    with pytest.raises(ValueError, match="num_tp=0"):
        RowShards(layout=layout, num_tp=0, align=1)
    with pytest.raises(ValueError, match="align=3"):
        RowShards(layout=layout, num_tp=1, align=3)
