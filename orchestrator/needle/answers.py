"""Greedy answers to many questions about one prefilled document: each question is a job of its own that starts from the
document's boundary state and shares its full pages, so the document is prefilled once.

Legend: T tokens of the document, Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.prefill import PrefillRank, StepPlan

FIRST_JOB = 1_000_000
"""Numbers of the jobs that questions become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A document on a rank: its pages lie in the rank's pool."""

    state: BoundaryState
    table: tuple[int, ...]
    """Pages of the document, the partial last one included."""


def pages_for(longest_question: int, max_new_tokens: int) -> int:
    """Pages that one question needs beside the document's full ones."""
    return -(-(PAGE_TOKENS - 1 + longest_question + max_new_tokens) // PAGE_TOKENS)


def answer(
    rank: PrefillRank,
    document: Prefilled,
    questions: Sequence[Sequence[int]],
    *,
    spare_pages: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> list[list[int]]:
    """The tokens that follow each question, the most likely one each time, without the stop token.

    `rank` is a group of one. As many questions run side by side as `spare_pages` hold (`pages_for`).

    Raises:
        ValueError: no question fits the spare pages, or one is empty.
    """
    if not all(questions):
        raise ValueError("an empty question: give at least one token")
    if not questions:
        return []
    each = pages_for(max(map(len, questions)), max_new_tokens)
    num_together = len(spare_pages) // each
    if num_together == 0:
        raise ValueError(f"{len(spare_pages)} spare pages: a question needs {each}")
    answers: list[list[int]] = []
    for first in range(0, len(questions), num_together):
        group = questions[first : first + num_together]
        pages = [tuple(spare_pages[n * each : (n + 1) * each]) for n in range(len(group))]
        answers += _answer_together(rank, document, group, pages, max_new_tokens, frozenset(stop_token_ids))
    return answers


def _answer_together(
    rank: PrefillRank,
    document: Prefilled,
    questions: Sequence[Sequence[int]],
    pages: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    stop_token_ids: frozenset[int],
) -> list[list[int]]:
    position = document.state.position
    num_shared = position // PAGE_TOKENS
    jobs = [FIRST_JOB + number for number in range(len(questions))]
    tokens: dict[int, torch.Tensor] = {}
    for job, question, own in zip(jobs, questions, pages, strict=True):
        if position % PAGE_TOKENS:
            for kind in rank.pool.kinds:
                rows = rank.pool.pages(kind.layer, kind.kind)
                rows[own[0]] = rows[document.table[num_shared]]
        # the document's own tokens are never read again: pages that nobody touches take no memory
        tokens[job] = torch.empty(position + len(question) + max_new_tokens, dtype=torch.int64)
        tokens[job][position : position + len(question)] = torch.tensor(question)
        rank.open_job(job, tokens[job], (*document.table[:num_shared], *own), document.state)
    found: dict[int, list[int]] = {job: [] for job in jobs}
    try:
        ends = {job: position + len(question) for job, question in zip(jobs, questions, strict=True)}
        while ends:
            slices = tuple(Slice(job=job, start=rank.state(job).position, end=end) for job, end in ends.items())
            plan = StepPlan(slices=slices, layout="contiguous", exchange="all_gather", logits_of=tuple(ends))
            logits = rank.run_step(plan).logits
            following: dict[int, int] = {}
            for job, end in ends.items():
                token = int(logits[job].argmax())
                if token in stop_token_ids:
                    continue
                found[job].append(token)
                if len(found[job]) < max_new_tokens:
                    tokens[job][end] = token
                    following[job] = end + 1
            ends = following
    finally:
        for job in jobs:
            rank.close_job(job)
    return [found[job] for job in jobs]
