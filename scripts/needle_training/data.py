"""Training sequences: facts in running text, and questions with their answers behind them, all in one byte sequence.

Facts that stand in sections come first and every question is asked once, in random order: with questions right behind
their sections, or asked again, a model learns to name the newest section or to repeat itself.

    B sequences, T tokens, R asked rows: those that predict answers, then rows of running text
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from longprefill.orchestrator.needle.filler import Filler
from longprefill.orchestrator.needle.words import (
    Fact,
    Phrasing,
    Question,
    draw_names,
    plain_fact,
    question_about,
    question_about_nobody,
    section_fact,
)

BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 258
"""Bytes, then two special tokens."""


INNER_GAP, INNER_SHARE = 40, 0.2
"""So many of the sections with a wider gap have a plain fact in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What the sequences of a stage are made of."""

    phrasing: Phrasing
    sections: float
    """Share of facts that stand in a section."""
    absent: float
    """Questions about names without a fact, for each fact."""
    siblings: float
    """Share of names that resemble another's."""
    max_gap: int
    """Of a section; gaps are drawn log-uniformly from 8 bytes up."""
    fill: tuple[float, float] = (0.5, 0.9)
    """Share of a sequence that facts and questions take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    ids_BT: torch.Tensor
    rows_BR: torch.Tensor
    targets_BR: torch.Tensor
    answer_BR: torch.Tensor
    """Number of the question whose answer a row predicts, from 0 in each sequence; -1: running text."""
    place_BR: torch.Tensor
    """Which byte of its answer a row predicts; -1: running text."""
    kind_BR: torch.Tensor
    """0 plain, 1 section, 2 absent; -1: running text."""


@dataclass(slots=True)
class _Sequence:
    text: bytearray = field(default_factory=bytearray)
    answers: list[tuple[int, Question]] = field(default_factory=list)
    """(first byte of the answer, question)"""

    def add_question(self, question: Question) -> None:
        self.text += question.text.encode()
        self.answers.append((len(self.text), question))
        self.text += question.answer.encode() + b"\n"


def make_batch(filler: Filler, mix: Mix, batch: int, length: int, num_text_rows: int, rng: random.Random) -> Batch:
    """`batch` sequences of `length` tokens, each with `num_text_rows` rows of running text beside its answers."""
    sequences = [_write(filler, mix, length, rng) for _ in range(batch)]
    rows: list[list[tuple[int, int, int, int, int]]] = []
    for sequence in sequences:
        entries: list[tuple[int, int, int, int, int]] = []
        for number, (start, question) in enumerate(sequence.answers):
            kind = 2 if question.is_absent else int(question.kind == "section")
            for place, target in enumerate([*question.answer.encode(), EOS_ID]):
                entries.append((start + place - 1, target, number, place, kind))
        rows.append(entries)
    num_rows = max(len(entries) for entries in rows) + num_text_rows
    for entries, sequence in zip(rows, sequences, strict=True):
        while len(entries) < num_rows:
            row = rng.randrange(length - 1)
            entries.append((row, sequence.text[row + 1], -1, -1, -1))
    table = torch.tensor(rows)
    ids_BT = torch.tensor([list(sequence.text) for sequence in sequences])
    row_BR, target_BR, answer_BR, place_BR, kind_BR = table.unbind(-1)
    return Batch(
        ids_BT=ids_BT, rows_BR=row_BR, targets_BR=target_BR, answer_BR=answer_BR, place_BR=place_BR, kind_BR=kind_BR
    )


def _write(filler: Filler, mix: Mix, length: int, rng: random.Random) -> _Sequence:
    budget = int(length * rng.uniform(*mix.fill))
    facts, questions = _draw(filler, mix, budget, rng)
    is_mixed = not any(fact.kind == "section" for fact in facts) and rng.random() < 0.5
    order: list[Fact | Question] = [*facts]
    rng.shuffle(order)
    if is_mixed:
        for fact, question in zip([*facts, *[None] * (len(questions) - len(facts))], questions, strict=True):
            first = 0 if fact is None else order.index(fact) + 1
            order.insert(rng.randint(first, len(order)), question)
    else:
        order += rng.sample(questions, len(questions))
    used = sum(_size(item) for item in order)
    # text between the items; hardly any between questions that stand together
    shares = [rng.expovariate(1.0) * (1.0 if is_mixed or isinstance(item, Fact) else 0.05) for item in order]
    shares.append(rng.expovariate(0.5))
    free, total = length - used, sum(shares)
    sequence = _Sequence()
    for item, share in zip(order, shares, strict=False):
        sequence.text += filler.anywhere(int(free * share / total), rng).encode()
        if isinstance(item, Fact):
            sequence.text += (item.text + rng.choice((" ", " ", "\n"))).encode()
        else:
            sequence.add_question(item)
    sequence.text += filler.anywhere(length - len(sequence.text), rng).encode()
    assert len(sequence.text) == length
    return sequence


def _draw(filler: Filler, mix: Mix, budget: int, rng: random.Random) -> tuple[list[Fact], list[Question]]:
    """As many facts as fit the budget with their questions, and questions about absent names."""
    facts: list[Fact] = []
    questions: list[Question] = []
    absent: list[Question] = []
    share = 0.0 if rng.random() > mix.sections * 1.25 else 0.8
    names = draw_names(budget // 25 + 2, rng, siblings=mix.siblings if rng.random() < 0.7 else 0.0)
    rng.shuffle(names)
    while len(names) > 2:
        asked: list[Question] = []
        kind = "section" if rng.random() < share else "plain"
        if kind == "section":
            gap = int(8 * (mix.max_gap / 8) ** rng.random())
            gap_text = filler.anywhere(gap, rng)
            if gap > INNER_GAP and rng.random() < INNER_SHARE:  # a fact of another's in between
                inner = plain_fact(names.pop(), rng, mix.phrasing)
                cut = rng.randrange(gap)
                gap_text = f"{gap_text[:cut]} {inner.text} {gap_text[cut:]}"
                asked.append(question_about(inner, rng, mix.phrasing))
            fact = section_fact(names.pop(), gap_text, rng, mix.phrasing)
        else:
            fact = plain_fact(names.pop(), rng, mix.phrasing)
        asked.append(question_about(fact, rng, mix.phrasing))
        nobody: list[Question] = []
        if rng.random() < mix.absent:
            nobody.append(question_about_nobody(kind, names.pop(), rng, mix.phrasing))
        budget -= sum(_size(item) for item in (fact, *asked, *nobody))
        if budget < 0 and facts:
            break
        facts.append(fact)
        questions += asked
        absent += nobody
    return facts, questions + absent


def _size(item: Fact | Question) -> int:
    return len(item.text) + 1 if isinstance(item, Fact) else len(item.text) + len(item.answer) + 1
