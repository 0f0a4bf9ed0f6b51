"""Documents to be asked about: facts at chosen places in text that no model was trained on, and questions.

Positions are bytes, which are tokens of a model that reads bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    """Something over each cut: a section with its header before it and its fact behind it, and over every third a plain
    fact whose text is cut."""
    return [
        Wanted(kind="plain", middle=cut) if number % 3 == 2 else Wanted(kind="section", middle=cut, gap=gap)
        for number, cut in enumerate(cuts)
    ]


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
    names = draw_names(len(ordered) + num_absent, rng)
    read_at = rng.randrange(len(filler.text))
    text = ""
    placed: list[PlacedFact] = []
    for one, name in zip(ordered, names, strict=False):
        if one.kind == "plain":
            fact = plain_fact(name, rng, phrasing)
            start = one.middle - len(fact.text) // 2
        else:
            fact = section_fact(name, filler.anywhere(one.gap, rng), rng, phrasing)
            start = one.middle - fact.text.index("\n", 1) - 1 - one.gap // 2
        start = max(start, len(text) + SPACING if text else 0)
        text += filler.piece(start - len(text), read_at + len(text))
        placed.append(PlacedFact(fact=fact, start=start, question=question_about(fact, rng, phrasing)))
        text += fact.text + " "
    if len(text) > length:
        raise UserError(f"{len(ordered)} facts do not fit {length} tokens: ask for fewer, or for a longer document")
    text += filler.piece(length - len(text), read_at + len(text))
    kinds: list[Kind] = [one.kind for one in ordered] or ["plain"]
    present = {*text.lower().split(), *(name.lower() for name in names[: len(ordered)])}
    strangers = _strangers(names[len(ordered) :], present, rng)
    absent = tuple(question_about_nobody(rng.choice(kinds), name, rng, phrasing) for name in strangers)
    return Document(text=text, facts=tuple(placed), absent=absent)


def _strangers(names: Sequence[str], present: set[str], rng: random.Random) -> list[str]:
    """The names, with another one for each that is a word of the text by chance, as `made` is."""
    strangers: list[str] = []
    taken = set(present)
    for drawn in names:
        name = drawn
        while name.lower() in taken:
            name = draw_names(1, rng)[0]
        taken.add(name.lower())
        strangers.append(name)
    return strangers
