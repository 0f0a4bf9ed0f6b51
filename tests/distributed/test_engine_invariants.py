"""One result whatever the ranks, the steps, the layout, the packing, the page table and the restarts (fp32, 1e-5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.comms.group import Group
from longprefill.comms.solo import SoloGroup
from longprefill.comms.thread_group import run_ranks
from longprefill.partition.generators import GENERATORS, LayoutKind
from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout, Slice
from longprefill.workers import prefill
from longprefill.workers.cache.pages import JobCache
from longprefill.workers.choices import Recorder, Replayer
from longprefill.workers.model.layers.state_exchange import EXCHANGES

from .engine_support import (
    TOLERANCE,
    WHOLE,
    Engine,
    Job,
    Outcome,
    assert_bitwise_equal,
    assert_equal_outcomes,
    check_against_reference,
    drive,
    generate,
    hybrid,
    leavings,
    make_engine,
    make_rank,
    open_job,
    prompt,
    reference,
    renumbered,
    run,
    steps_of,
)

HYBRID = make_engine(hybrid("kda", "dsa", "kda", "dsa"))
POOLED = make_engine(hybrid("kda", "dsa", "kda", "dsa", index_kpool=4, rope_parameters=None))
ENGINES = {"hybrid": HYBRID, "pooled": POOLED}
LENGTHS = (1, 63, 64, 65, 127, 511, 1000)
RANKS = (1, 2, 3, 4, 8)
STEPS = (64, 192, WHOLE)


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param


@pytest.mark.parametrize("step_tokens", STEPS, ids=["step64", "step192", "whole"])
@pytest.mark.parametrize("length", LENGTHS, ids="T{}".format)
@pytest.mark.parametrize("cp", RANKS, ids="cp{}".format)
def test_every_mesh_and_step_size(cp: int, length: int, step_tokens: int) -> None:
    check_against_reference(HYBRID, [length], step_tokens, cp=cp)


@pytest.mark.parametrize(
    ("cp", "length", "step_tokens"),
    [(1, 65, 64), (2, 1000, 192), (3, 127, WHOLE), (3, 1000, WHOLE), (4, 511, 64), (8, 1000, 320)],
)
@pytest.mark.parametrize("layout", sorted(GENERATORS))
@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
def test_every_layout_and_exchange(
    engine: Engine, exchange: str, layout: LayoutKind, cp: int, length: int, step_tokens: int
) -> None:
    check_against_reference(engine, [length], step_tokens, cp=cp, layout=layout, exchange=exchange)


PACKED = {
    "two": (511, 65),
    "two of a length": (200, 200),
    "five, four below a page or barely above": (1000, 1, 63, 64, 130),
    "five, longest last": (3, 65, 127, 2, 511),
}


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", sorted(GENERATORS))
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_jobs_in_one_step(engine: Engine, lengths: tuple[int, ...], layout: LayoutKind, cp: int) -> None:
    step_tokens = {1: 192, 2: WHOLE, 3: 320, 8: WHOLE}[cp]
    check_against_reference(engine, lengths, step_tokens, cp=cp, layout=layout)


@pytest.mark.parametrize("layout", sorted(GENERATORS))
@pytest.mark.parametrize("cp", RANKS)
def test_jobs_in_one_step_at_different_places(engine: Engine, cp: int, layout: LayoutKind) -> None:
    """One goes on after a page border, one after a ragged stop, one after two tokens, one begins, one ends early."""
    steps = [
        [Slice(job=0, start=0, end=192), Slice(job=1, start=0, end=100), Slice(job=2, start=0, end=2)],
        [Slice(job=2, start=2, end=65), Slice(job=0, start=192, end=511), Slice(job=3, start=0, end=63)],
        [Slice(job=1, start=100, end=103), Slice(job=0, start=511, end=512)],
        [Slice(job=4, start=0, end=1), Slice(job=1, start=103, end=300), Slice(job=0, start=512, end=700)],
    ]
    check_against_reference(engine, (700, 300, 65, 63, 1), steps, cp=cp, layout=layout)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_many_ragged_steps(engine: Engine, cp: int) -> None:
    """Steps shorter than the convolution's history and than a pool, each from the last one's states."""
    borders = (0, 1, 3, 4, 6, 63, 64, 66, 127, 191, 193, 257, 511)
    steps = [[Slice(job=0, start=start, end=end)] for start, end in pairwise(borders)]
    check_against_reference(engine, [511], steps, cp=cp)


def draw_layout(data: st.DataObject, slices: Sequence[Slice], num_ranks: int) -> Layout:
    """Any cut on the page grid, any rank for each fragment."""
    fragments: list[Fragment] = []
    for piece in slices:
        borders = range((piece.start // PAGE_TOKENS + 1) * PAGE_TOKENS, piece.end, PAGE_TOKENS)
        cuts = [border for border in borders if data.draw(st.booleans(), label=f"cut at {border}")]
        for order, (start, end) in enumerate(pairwise([piece.start, *cuts, piece.end])):
            rank = data.draw(st.integers(0, num_ranks - 1), label=f"rank of [{start}, {end})")
            fragments.append(Fragment(job=piece.job, start=start, length=end - start, rank=rank, order=order))
    return Layout(num_ranks=num_ranks, slices=tuple(slices), fragments=tuple(fragments))


@settings(max_examples=20)
@given(data=st.data(), cp=st.integers(1, 5), name=st.sampled_from(sorted(ENGINES)))
def test_any_fragment_table(data: st.DataObject, cp: int, name: str) -> None:
    lengths = (511, 129)
    steps = [
        [Slice(job=0, start=0, end=150)],
        [Slice(job=1, start=0, end=129), Slice(job=0, start=150, end=511)],
    ]
    layouts = {tuple(slices): draw_layout(data, slices, cp) for slices in steps}
    for number, length in enumerate(lengths):
        reference(ENGINES[name], length, number)  # before generated layouts are replaced
    with patch.object(prefill, "generate", lambda kind, slices, num_ranks: layouts[slices]):
        check_against_reference(ENGINES[name], lengths, steps, cp=cp)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.sampled_from((1, 2, 31, 62, 65, 100, 128, 190, 300)), min_size=1, max_size=4),
    cp=st.integers(1, 6),
    step_pages=st.integers(1, 6),
    layout=st.sampled_from(sorted(GENERATORS)),
    name=st.sampled_from(sorted(ENGINES)),
)
def test_any_jobs_and_steps(lengths: list[int], cp: int, step_pages: int, layout: LayoutKind, name: str) -> None:
    check_against_reference(ENGINES[name], lengths, step_pages * PAGE_TOKENS, cp=cp, layout=layout)


def stop_and_export(engine: Engine, job: Job, start: int, stop: int, cp: int, folder: Path) -> Path:
    """Runs [start, stop) of the job in one step on `cp` ranks; its snapshot."""
    folder.mkdir(parents=True)
    run(engine, [job], [[Slice(job=job.number, start=start, end=stop)]], cp=cp, export_to=folder,
        record=reference(engine, job.tokens.numel()).record)  # fmt: skip
    return folder / f"{job.number}.safetensors"


@pytest.mark.parametrize("stop", [1, 64, 100, 127, 192, 384, 510])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 8), (8, 1)], ids="cp{}".format)
def test_resume_on_another_mesh(engine: Engine, before: int, after: int, stop: int, tmp_path: Path) -> None:
    job = Job(number=0, tokens=prompt(511))
    snapshot = stop_and_export(engine, job, 0, stop, before, tmp_path / "first")
    check_against_reference(engine, [511], 192, cp=after, snapshots=[snapshot], starts={0: stop})


def test_a_new_mesh_after_every_step(engine: Engine, tmp_path: Path) -> None:
    borders, ranks = (0, 128, 292, 420, 640, 833), (3, 1, 8, 2, 4)
    job = Job(number=0, tokens=prompt(1000))
    for n, (cp, (start, stop)) in enumerate(zip(ranks, pairwise(borders), strict=True)):
        snapshot = stop_and_export(engine, job, start, stop, cp, tmp_path / str(n))
        job = Job(number=0, tokens=job.tokens, snapshot=snapshot)
    assert job.snapshot is not None
    check_against_reference(engine, [1000], WHOLE, cp=2, snapshots=[job.snapshot], starts={0: borders[-1]})


@pytest.mark.parametrize("length", [1, 60, 130])
def test_decode_equals_prefill_of_the_longer_prompt(engine: Engine, length: int, tmp_path: Path) -> None:
    """Each greedy token is what a prefill of the prompt and the tokens before it says; so are states and cache rows."""
    num_new = 9
    job = Job(number=0, tokens=prompt(length))
    recorder = Recorder()
    tokens, rank = generate(engine, job, WHOLE, 1, num_new, tmp_path, recorder)
    assert len(tokens) == num_new
    record = reference(engine, length).record | recorder.record
    expected: Outcome = {}
    tokens_T = torch.cat((job.tokens, torch.tensor(tokens[:-1])))
    for count in range(num_new):
        longer = Job(number=0, tokens=tokens_T[: length + count])
        result = run(engine, [longer], steps_of([longer], WHOLE), record=record)
        assert result.worst <= TOLERANCE
        expected = result.outcomes[0]
        assert int(expected.pop("logits").argmax()) == tokens[count]
    assert_equal_outcomes(leavings(rank, 0), expected)


def test_one_continuation_whatever_the_mesh(engine: Engine, tmp_path: Path) -> None:
    """Without replayed choices."""
    found: list[list[int]] = []
    for cp, step_tokens in ((1, WHOLE), (2, 192), (3, 64)):
        folder = tmp_path / str(cp)
        folder.mkdir()
        tokens, _ = generate(engine, Job(number=0, tokens=prompt(300)), step_tokens, cp, 20, folder)
        found.append(tokens)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("cp", [1, 3])
def test_pages_are_reused(engine: Engine, cp: int) -> None:
    """What a closed job left in its pages changes nothing, and an open job's pages are left alone."""
    first_table, kept_table = (7, 2, 5, 0), (1, 6, 3, 8)
    lengths = {0: 255, 1: 200, 2: 130}
    record = {}
    for number, length in lengths.items():
        record |= renumbered(reference(engine, length).record, number)

    def on_rank(group: Group) -> Mapping[int, Mapping[str, torch.Tensor]]:
        rank = make_rank(engine, group, 9, Replayer(record))
        for number, table in ((0, first_table), (1, kept_table)):
            open_job(rank, engine, Job(number=number, tokens=prompt(lengths[number])), table)
            drive(rank, [[Slice(job=number, start=0, end=lengths[number])]])
        kept = leavings(rank, 1)
        rank.close_job(0)
        open_job(rank, engine, Job(number=2, tokens=prompt(lengths[2])), first_table[1:])
        drive(rank, [[Slice(job=2, start=0, end=128)], [Slice(job=2, start=128, end=130)]])
        assert_bitwise_equal(leavings(rank, 1), kept)
        return {number: leavings(rank, number) for number in (1, 2)}

    for found in run_ranks(cp, on_rank):
        for number, outcome in found.items():
            expected = dict(reference(engine, lengths[number]).outcomes[0])
            del expected["logits"]
            assert_equal_outcomes(dict(outcome), expected)


@pytest.mark.parametrize("fill", [0x00, 0x3C, 0x7F])
def test_memory_that_nobody_wrote_changes_nothing(engine: Engine, fill: int) -> None:
    jobs = [Job(number=n, tokens=prompt(length, n)) for n, length in enumerate((300, 65, 1))]
    poisoned = run(engine, jobs, steps_of(jobs, 192), cp=2)
    filled = run(engine, jobs, steps_of(jobs, 192), cp=2, fill=fill)
    for job in jobs:
        assert_bitwise_equal(filled.outcomes[job.number], poisoned.outcomes[job.number])


@pytest.mark.parametrize("layout", sorted(GENERATORS))
@pytest.mark.parametrize("cp", RANKS)
def test_every_row_is_written_once(
    engine: Engine, cp: int, layout: LayoutKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[tuple[int, int, str, tuple[int, ...]], list[int]] = {}
    write = JobCache.write

    def counted(cache: JobCache, layer: int, kind, first_row: int, bytes_TB: torch.Tensor) -> None:
        rows = written.setdefault((cache.pool.buffer.data_ptr(), layer, kind, cache.table), [])
        rows.extend(range(first_row, first_row + bytes_TB.shape[0]))
        write(cache, layer, kind, first_row, bytes_TB)

    monkeypatch.setattr(JobCache, "write", counted)
    pools: list[torch.Tensor] = []  # alive, so that no two ranks' pools get one address
    jobs = [Job(number=n, tokens=prompt(length, n)) for n, length in enumerate((520, 70, 1, 130))]
    steps = [
        [Slice(job=0, start=0, end=130), Slice(job=1, start=0, end=70)],
        [Slice(job=2, start=0, end=1), Slice(job=0, start=130, end=133)],
        [Slice(job=0, start=133, end=520), Slice(job=3, start=0, end=130)],
    ]
    tables = {0: (14, 0, 13, 1, 12, 2, 11, 3, 10), 1: (4, 9), 2: (5,), 3: (8, 6, 7)}

    def on_rank(group: Group) -> None:
        rank = make_rank(engine, group, 15)
        pools.append(rank.pool.buffer)
        for job in jobs:
            open_job(rank, engine, job, tables[job.number])
        drive(rank, steps, layout=layout)

    run_ranks(cp, on_rank)
    lengths = {table: jobs[number].tokens.numel() for number, table in tables.items()}
    kinds = {(kind.layer, kind.kind): kind for kind in make_rank(engine, SoloGroup(), 1).pool.kinds}
    expected = {(pool.data_ptr(), *kind, table) for pool in pools for kind in kinds for table in lengths}
    for place in expected:
        _, layer, kind, table = place
        assert sorted(written.get(place, [])) == list(range(kinds[layer, kind].num_rows(lengths[table])))
    assert written.keys() <= expected
