"""Sizing of steps: how a prompt is cut into steps, how large a step should be, and how short jobs share one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice

DEFAULT_MAX_STEP_TOKENS = 65536
"""Upper bound of a chosen step: longer steps hide nothing more and only delay hand-off, preemption and recovery."""


class StepError(UserError):
    """A step size that cannot be used, or none that fits."""


class Step(NamedTuple):
    """The tokens [start, end) of one job."""

    start: int
    end: int


def check_step_tokens(step_tokens: int) -> None:
    """Refuses a step size that would cut pages.

    Raises:
        StepError: not a positive multiple of the page.
    """
    if step_tokens > 0 and step_tokens % PAGE_TOKENS == 0:
        return
    below = max(step_tokens, 0) // PAGE_TOKENS * PAGE_TOKENS
    allowed = f"{below} or {below + PAGE_TOKENS}" if below else f"{PAGE_TOKENS}"
    raise StepError(
        f"step_tokens={step_tokens} is not a positive multiple of {PAGE_TOKENS}: use --step-tokens {allowed}"
    )


def plan_steps(num_tokens: int, step_tokens: int, start: int = 0) -> tuple[Step, ...]:
    """The steps that take a job from position `start` to `num_tokens`; none when it is already there.

    A step has at most `step_tokens` tokens and ends on a page border or with the job. So a ragged start makes the first
    step shorter by the part of its first page that is already done, and every later step is full.

    Raises:
        StepError: `step_tokens` is not a positive multiple of the page.
        ValueError: not 0 <= start <= num_tokens.
    """
    check_step_tokens(step_tokens)
    if not 0 <= start <= num_tokens:
        raise ValueError(f"start={start} of a job of num_tokens={num_tokens}: need 0 <= start <= num_tokens")
    steps: list[Step] = []
    while start < num_tokens:
        end = _step_end(start, num_tokens, step_tokens)
        steps.append(Step(start, end))
        start = end
    return tuple(steps)


def choose_step_tokens(
    num_tokens: int,
    num_ranks: int,
    *,
    bytes_per_token: int,
    budget_bytes: int,
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
) -> int:
    """The default step size for a prompt: the fewest steps that fit, all of about one length.

    It is a multiple of the page, and of 2P pages (an even zigzag) wherever a step of 2P pages fits.

    Args:
        num_tokens: tokens still to prefill.
        num_ranks: P, the ranks that share a step.
        bytes_per_token: what one token of a step costs the fullest rank (its share of activations, its gather buffers).
        budget_bytes: what that rank can give to a step.
        max_step_tokens: upper bound whatever the memory.

    Raises:
        StepError: not even one page fits.
        ValueError: a number that must be positive is not.
    """
    for name, value in {"num_tokens": num_tokens, "num_ranks": num_ranks, "bytes_per_token": bytes_per_token}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: need 1 or more")
    limit = min(budget_bytes // bytes_per_token, max_step_tokens)
    if limit < PAGE_TOKENS:
        raise StepError(
            f"a step of one page ({PAGE_TOKENS} tokens) needs {PAGE_TOKENS * bytes_per_token} bytes a rank, but "
            f"budget_bytes={budget_bytes} and max_step_tokens={max_step_tokens} allow {max(limit, 0)} tokens: "
            "free memory, or use more ranks"
        )
    even = 2 * num_ranks * PAGE_TOKENS
    unit = even if limit >= even else PAGE_TOKENS
    num_steps = _ceil_div(num_tokens, limit // unit * unit)
    return _ceil_div(_ceil_div(num_tokens, num_steps), unit) * unit


def pack_jobs(jobs: Sequence[Slice], step_tokens: int) -> Iterator[list[Slice]]:
    """The slices of each step for jobs that run one after another, each given by what is left of it.

    A step has at most `step_tokens` tokens and takes jobs in the given order, so several short jobs share a step and a
    long one takes many. A job is cut on page borders only. No step is empty.

    Raises:
        StepError: `step_tokens` is not a positive multiple of the page.
        ValueError: a job is given twice.
    """
    check_step_tokens(step_tokens)
    numbers = [piece.job for piece in jobs]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"jobs {numbers}: a job is given twice")
    return _packed(jobs, step_tokens)


def _packed(jobs: Sequence[Slice], step_tokens: int) -> Iterator[list[Slice]]:
    step: list[Slice] = []
    room = step_tokens
    for piece in jobs:
        start = piece.start
        while start < piece.end:
            end = _step_end(start, piece.end, room)
            if end > start:
                step.append(Slice(job=piece.job, start=start, end=end))
                room -= end - start
                start = end
            if start < piece.end:
                yield step
                step, room = [], step_tokens
    if step:
        yield step


def _step_end(start: int, num_tokens: int, room: int) -> int:
    """The last page border, or the job's end, that `room` tokens from `start` reach; `start` when they reach none."""
    if num_tokens - start <= room:
        return num_tokens
    return max(start, (start + room) // PAGE_TOKENS * PAGE_TOKENS)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
