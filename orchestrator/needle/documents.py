"""Documents to be asked about: facts at chosen places in text that no model was trained on, and questions.

Positions are bytes, which are tokens of a model that reads bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longprefill.orchestrator.needle.filler import Filler
from longprefill.orchestrator.needle.words import (
    Fact,
    Kind,
    Phrasing,
    Question,
    draw_names,
    plain_fact,
    question_about,
    question_about_nobody,
    section_fact,
)
from longprefill.partition.errors import UserError

SPACING = 24
"""Least text between two facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFact:
    fact: Fact
    start: int
    """First byte of the fact's text in the document."""
    question: Question

    @property
    def end(self) -> int:
        return self.start + len(self.fact.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    text: str
    facts: tuple[PlacedFact, ...]
    """In the order of the text."""
    absent: tuple[Question, ...]
    """About names that the text does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A fact and where its middle shall lie; of a section the middle of the text between header and fact."""

    kind: Kind
    middle: int
    gap: int = 0
    holds_plain: bool = False
    """A section with a plain fact in the middle between its header and its own fact."""


def spread(count: int, length: int, gaps: Sequence[int], rng: random.Random) -> list[Wanted]:
    """`count` sections and as many plain facts, a section and then a plain fact in each equal share of a document of
    `length` bytes; gaps in turn."""
    share = length / count
    wanted: list[Wanted] = []
    for number in range(count):
        gap = gaps[number % len(gaps)]
        wanted.append(Wanted(kind="section", middle=int((number + rng.uniform(0.2, 0.4)) * share), gap=gap))
        wanted.append(Wanted(kind="plain", middle=int((number + rng.uniform(0.7, 0.9)) * share)))
    return wanted


def astride(cuts: Sequence[int], *, gap: int) -> list[Wanted]:
    """A section over each cut with its header before it and its fact behind it, and a plain fact whose text is cut."""
    return [Wanted(kind="section", middle=cut, gap=gap, holds_plain=True) for cut in cuts]


def write_document(
    length: int, wanted: Sequence[Wanted], *, num_absent: int, seed: str, phrasing: Phrasing | None = None
) -> Document:
    """A document of exactly `length` bytes. Facts keep their order; one that would touch the one before it moves on.

    Raises:
        UserError: the facts do not fit.
    """
    rng = random.Random(seed)
    filler, phrasing = Filler("test"), phrasing or Phrasing()
    ordered = sorted(wanted, key=lambda one: one.middle)
    num_facts = len(ordered) + sum(one.holds_plain for one in ordered)
    names = draw_names(num_facts + num_absent, rng)
    present = iter(names)
    read_at = rng.randrange(len(filler.text))
    text = ""
    placed: list[PlacedFact] = []
    for one in ordered:
        piece, before_middle = _piece(one, present, filler, rng, phrasing)
        start = max(one.middle - before_middle, len(text) + SPACING if text else 0)
        text += filler.piece(start - len(text), read_at + len(text))
        for fact, at in piece:
            placed.append(PlacedFact(fact=fact, start=start + at, question=question_about(fact, rng, phrasing)))
        text += piece[0][0].text + " "
    if len(text) > length:
        raise UserError(f"{num_facts} facts do not fit {length} tokens: ask for fewer, or for a longer document")
    text += filler.piece(length - len(text), read_at + len(text))
    kinds: list[Kind] = [one.kind for one in ordered] or ["plain"]
    absent = tuple(question_about_nobody(rng.choice(kinds), name, rng, phrasing) for name in names[num_facts:])
    return Document(text=text, facts=tuple(placed), absent=absent)


def _piece(
    one: Wanted, names: Iterator[str], filler: Filler, rng: random.Random, phrasing: Phrasing
) -> tuple[list[tuple[Fact, int]], int]:
    """Facts with where they start in the text of the first, which holds all, and where its middle is."""
    if one.kind == "plain":
        fact = plain_fact(next(names), rng, phrasing)
        return [(fact, 0)], len(fact.text) // 2
    gap_text = filler.anywhere(one.gap, rng)
    if not one.holds_plain:
        fact = section_fact(next(names), gap_text, rng, phrasing)
        return [(fact, 0)], fact.text.index("\n", 1) + 1 + one.gap // 2
    inner = plain_fact(next(names), rng, phrasing)
    half = one.gap // 2
    fact = section_fact(next(names), f"{gap_text[:half]} {inner.text} {gap_text[half:]}", rng, phrasing)
    at = fact.text.index(inner.text)
    return [(fact, 0), (inner, at)], at + len(inner.text) // 2
