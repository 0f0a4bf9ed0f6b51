"""Step plans, default step sizes and the packing of short jobs."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.steps import StepError, choose_step_tokens, pack_jobs, plan_steps

step_sizes = st.integers(1, 12).map(lambda pages: pages * PAGE_TOKENS)


@given(st.integers(0, 5000), step_sizes, st.integers(0, 5000))
def test_steps_cover_the_rest_of_a_job_once_and_end_on_pages(num_tokens: int, step_tokens: int, start: int) -> None:
    assume(start <= num_tokens)
    steps = plan_steps(num_tokens, step_tokens, start)
    assert [position for step in steps for position in range(*step)] == list(range(start, num_tokens))
    assert all(0 < end - begin <= step_tokens for begin, end in steps)
    assert all(end % PAGE_TOKENS == 0 for _, end in steps[:-1])
    assert all(end - begin == step_tokens for begin, end in steps[1:-1])
    assert bool(steps) == (start < num_tokens)


def test_a_ragged_start_shortens_the_first_step_only() -> None:
    assert plan_steps(600, 128, start=70) == ((70, 192), (192, 320), (320, 448), (448, 576), (576, 600))
    assert plan_steps(130, 128, start=70) == ((70, 130),)


@pytest.mark.parametrize(
    ("step_tokens", "advice"),
    [(100, "64 or 128"), (65, "64 or 128"), (1000, "960 or 1024"), (63, "64"), (0, "64"), (-64, "64"), (-100, "64")],
)
def test_step_sizes_off_the_page_grid_are_refused(step_tokens: int, advice: str) -> None:
    message = f"step_tokens={step_tokens} is not a positive multiple of 64: use --step-tokens {advice}"
    with pytest.raises(StepError) as refusal:
        plan_steps(1000, step_tokens)
    assert str(refusal.value) == message
    assert isinstance(refusal.value, UserError)
    assert str(pickle.loads(pickle.dumps(refusal.value))) == message
    with pytest.raises(StepError):
        pack_jobs([], step_tokens)


@pytest.mark.parametrize(("num_tokens", "start"), [(10, 11), (10, -1), (-1, 0)])
def test_starts_outside_the_job_are_refused(num_tokens: int, start: int) -> None:
    with pytest.raises(ValueError, match=f"start={start} of a job of num_tokens={num_tokens}"):
        plan_steps(num_tokens, 64, start)


@given(
    st.integers(1, 200_000), st.integers(1, 70), st.integers(1, 1000), st.integers(64_000, 10**8), st.integers(64, 9000)
)
def test_chosen_steps_fit_and_are_no_larger_than_needed(
    num_tokens: int, num_ranks: int, bytes_per_token: int, budget_bytes: int, max_step_tokens: int
) -> None:
    step_tokens = choose_step_tokens(
        num_tokens,
        num_ranks,
        bytes_per_token=bytes_per_token,
        budget_bytes=budget_bytes,
        max_step_tokens=max_step_tokens,
    )
    assert step_tokens % PAGE_TOKENS == 0
    assert step_tokens * bytes_per_token <= budget_bytes
    assert step_tokens <= max_step_tokens
    even = 2 * num_ranks * PAGE_TOKENS
    limit = min(budget_bytes // bytes_per_token, max_step_tokens)
    unit = even if limit >= even else PAGE_TOKENS
    assert step_tokens % unit == 0
    num_steps = len(plan_steps(num_tokens, step_tokens))
    assert num_steps == len(plan_steps(num_tokens, limit // unit * unit))
    if step_tokens > unit:
        assert len(plan_steps(num_tokens, step_tokens - unit)) > num_steps


def test_default_step_sizes() -> None:
    assert choose_step_tokens(1000, 2, bytes_per_token=1, budget_bytes=10**9) == 1024
    assert choose_step_tokens(32768, 2, bytes_per_token=1, budget_bytes=10**9) == 32768
    assert choose_step_tokens(1 << 20, 8, bytes_per_token=1, budget_bytes=10**9) == 65536
    assert choose_step_tokens(70_000, 8, bytes_per_token=1, budget_bytes=10**9) == 35840


@pytest.mark.parametrize(("budget_bytes", "max_step_tokens"), [(6399, 1000), (-1, 1000), (10**9, 63)])
def test_a_budget_below_a_page_is_refused(budget_bytes: int, max_step_tokens: int) -> None:
    with pytest.raises(StepError, match=r"one page \(64 tokens\) needs 6400 bytes a rank"):
        choose_step_tokens(1000, 2, bytes_per_token=100, budget_bytes=budget_bytes, max_step_tokens=max_step_tokens)


@pytest.mark.parametrize("name", ["num_tokens", "num_ranks", "bytes_per_token"])
def test_numbers_below_one_are_refused(name: str) -> None:
    numbers = {"num_tokens": 100, "num_ranks": 2, "bytes_per_token": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0: need 1 or more"):
        choose_step_tokens(**numbers, budget_bytes=10**6)


@st.composite
def queues(draw: st.DrawFn) -> list[Slice]:
    jobs = draw(st.lists(st.integers(0, 99), max_size=8, unique=True))
    starts = [draw(st.integers(0, 200)) for _ in jobs]
    return [
        Slice(job=job, start=start, end=start + draw(st.integers(1, 100) | st.integers(1, 2000)))
        for job, start in zip(jobs, starts, strict=True)
    ]


@given(queues(), step_sizes)
def test_packed_steps_lose_nothing_and_keep_the_order(jobs: list[Slice], step_tokens: int) -> None:
    steps = list(pack_jobs(jobs, step_tokens))
    packed = [(piece.job, position) for step in steps for piece in step for position in range(piece.start, piece.end)]
    assert packed == [(piece.job, position) for piece in jobs for position in range(piece.start, piece.end)]
    ends = {piece.job: piece.end for piece in jobs}
    for step in steps:
        assert 0 < sum(piece.num_tokens for piece in step) <= step_tokens
        assert len({piece.job for piece in step}) == len(step)
        assert all(piece.end == ends[piece.job] for piece in step[:-1])
        assert step[-1].end == ends[step[-1].job] or step[-1].end % PAGE_TOKENS == 0
    for step in steps[:-1]:
        assert step_tokens - sum(piece.num_tokens for piece in step) < PAGE_TOKENS


def test_short_jobs_share_a_step_and_a_long_one_takes_many() -> None:
    jobs = [Slice(job=1, start=0, end=50), Slice(job=2, start=0, end=40), Slice(job=3, start=64, end=400)]
    assert [[(piece.job, piece.start, piece.end) for piece in step] for step in pack_jobs(jobs, 192)] == [
        [(1, 0, 50), (2, 0, 40), (3, 64, 128)],
        [(3, 128, 320)],
        [(3, 320, 400)],
    ]


def test_a_job_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"jobs \[1, 1\]: a job is given twice"):
        pack_jobs([Slice(job=1, start=0, end=50), Slice(job=1, start=50, end=60)], 64)
