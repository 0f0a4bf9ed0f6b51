"""Names, numbers and phrasings of planted facts: a plain fact names its owner, a section's fact stands under a header.

All text is ASCII. Whatever is drawn comes from the `random.Random` that is given.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "section"]

UNKNOWN = "unknown"
"""The answer about a name that the document does not have."""
NUM_DIGITS = 5
ONSETS = ("b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pr", "qu",
          "r", "s", "sh", "sk", "st", "t", "th", "tr", "v", "w", "x", "y", "z")  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ou", "y")
CODAS = ("", "", "", "", "n", "r", "l", "s", "m", "t", "ck", "nd", "x")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NOUNS = (
    "pass key",
    "key",
    "code",
    "access code",
    "secret number",
    "number",
    "password",
    "pin",
    "token",
    "serial number",
)
CONNECTIVES = ("is", "is", "is", "is", "was", "is now", "equals", "will be", "remains", "has been", "reads", "must be",
               "is still", "came to be", "=", "is set to")  # fmt: skip
ASIDES = ("as agreed", "by the way", "since last year", "for now", "we think", "in the end", "after the change",
          "if we recall", "at least here", "until further notice", "to be exact", "this time")  # fmt: skip
PLAIN_FACTS = (
    "The {noun} for {name} {verb} {digits}.",
    "The {noun} for {name} {verb} {digits}.",
    "The {noun} of {name} {verb} {digits}.",
    "Remember: the {noun} for {name} {verb} {digits}.",
    "Note that the {noun} of {name} {verb} {digits}.",
    "{name} has the {noun} {digits}.",
    "The {noun} for {name}, {aside}, {verb} {digits}.",
    "For {name} the {noun} {verb} {digits}.",
)
SHORT_FACTS = ("{name} is {digits}.", "{name}: {digits}.")
PLAIN_QUESTIONS = (
    "What is the {noun} for {name}?",
    "What is the {noun} for {name}?",
    "What is the {noun} of {name}?",
    "Which {noun} does {name} have?",
    "Question: what is the {noun} for {name}?",
    "Tell me the {noun} of {name}.",
)
SHORT_QUESTIONS = ("{name}?",)
HEADERS = ("Section {name}.", "Section {name}.", "Section {name}:", "Section {name}", "Chapter {name}.", "== {name} ==")
SECTION_FACTS = (
    "The {noun} {verb} {digits}.",
    "The {noun} {verb} {digits}.",
    "The {noun} here {verb} {digits}.",
    "This section's {noun} {verb} {digits}.",
)
SECTION_QUESTIONS = (
    "What is the {noun} of section {name}?",
    "What is the {noun} of section {name}?",
    "What is the {noun} in section {name}?",
    "Which {noun} does section {name} have?",
)
ENDINGS = (" ", "\n", " Answer: ")
"""Between a question and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number that belongs to a name. `text` goes into the document."""

    kind: Kind
    name: str
    noun: str
    digits: str
    text: str
    gap: int
    """Of a section: bytes of other text between header and fact; 0 for a plain fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`text` ends where the answer begins."""

    kind: Kind
    name: str
    text: str
    answer: str

    @property
    def is_absent(self) -> bool:
        """The name asked about has no fact."""
        return self.answer == UNKNOWN

    @property
    def task(self) -> str:
        """plain, section or absent."""
        return "absent" if self.is_absent else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrasing:
    """How free the wording is."""

    short: float = 0.0
    """Share of plain facts and questions in their shortest form: `zado: 48213.` and `zado?`."""
    varied: float = 1.0
    """Share of facts and questions whose form, noun and verb are drawn; the others have the first of each."""


def draw_digits(rng: random.Random) -> str:
    """Five digits, leading zeros allowed."""
    return f"{rng.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}"


def invent_name(rng: random.Random) -> str:
    """A pronounceable word of 4 to 9 letters; one in twenty is capitalised, one in twenty has digits in it."""
    if rng.random() < 0.05:
        return "".join(rng.choice(LETTERS + "23456789") for _ in range(rng.randint(5, 7)))
    name = ""
    while len(name) < 4 or (len(name) < 7 and rng.random() < 0.5):
        name += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    name = name[:9]
    return name.capitalize() if rng.random() < 0.05 else name


def sibling(name: str, rng: random.Random) -> str:
    """A name that differs only at its start or only at its end, in one letter or two."""
    count = 1 if rng.random() < 0.7 else 2
    letters = "".join(rng.choice(LETTERS) for _ in range(count))
    return letters + name[count:] if rng.random() < 0.5 else name[:-count] + letters


def draw_names(count: int, rng: random.Random, *, siblings: float = 0.0) -> list[str]:
    """Names that differ by more than their case; a share `siblings` of them resembles an earlier one."""
    names: list[str] = []
    taken: set[str] = set()
    while len(names) < count:
        name = sibling(rng.choice(names), rng) if names and rng.random() < siblings else invent_name(rng)
        if name.lower() not in taken:
            taken.add(name.lower())
            names.append(name)
    return names


def plain_fact(name: str, rng: random.Random, phrasing: Phrasing) -> Fact:
    """A fact that names its owner, as `The pass key for zado is 48213.`"""
    digits = draw_digits(rng)
    if rng.random() < phrasing.short:
        form, noun, verb = rng.choice(SHORT_FACTS), NOUNS[0], "is"
    else:
        form, noun, verb = _draw(PLAIN_FACTS, rng, phrasing)
    text = form.format(noun=noun, name=name, verb=verb, digits=digits, aside=rng.choice(ASIDES))
    return Fact(kind="plain", name=name, noun=noun, digits=digits, text=text, gap=0)


def section_fact(name: str, gap_text: str, rng: random.Random, phrasing: Phrasing) -> Fact:
    """A header, other text, and a fact that does not say whose it is."""
    digits = draw_digits(rng)
    form, noun, verb = _draw(SECTION_FACTS, rng, phrasing)
    header = rng.choice(HEADERS) if rng.random() < phrasing.varied else HEADERS[0]
    fact = form.format(noun=noun, verb=verb, digits=digits)
    text = f"\n{header.format(name=name)}\n{gap_text} {fact}"
    return Fact(kind="section", name=name, noun=noun, digits=digits, text=text, gap=len(gap_text))


def question_about(fact: Fact, rng: random.Random, phrasing: Phrasing) -> Question:
    """A question that the fact answers, mostly with the fact's own noun."""
    noun = fact.noun if rng.random() < 0.8 else rng.choice(NOUNS)
    return _question(fact.kind, fact.name, noun, fact.digits, rng, phrasing)


def question_about_nobody(kind: Kind, name: str, rng: random.Random, phrasing: Phrasing) -> Question:
    """A question about a name that the document does not have."""
    noun = rng.choice(NOUNS) if rng.random() < phrasing.varied else NOUNS[0]
    return _question(kind, name, noun, UNKNOWN, rng, phrasing)


def _question(kind: Kind, name: str, noun: str, answer: str, rng: random.Random, phrasing: Phrasing) -> Question:
    forms, ending = (PLAIN_QUESTIONS if kind == "plain" else SECTION_QUESTIONS), ENDINGS[0]
    if kind == "plain" and rng.random() < phrasing.short:
        form = rng.choice(SHORT_QUESTIONS)
    elif rng.random() < phrasing.varied:
        form, ending = rng.choice(forms), rng.choice(ENDINGS)
    else:
        form = forms[0]
    return Question(kind=kind, name=name, text=form.format(noun=noun, name=name) + ending, answer=answer)


def _draw(forms: tuple[str, ...], rng: random.Random, phrasing: Phrasing) -> tuple[str, str, str]:
    """(form, noun, verb)"""
    if rng.random() >= phrasing.varied:
        return forms[0], NOUNS[0], CONNECTIVES[0]
    noun = NOUNS[0] if rng.random() < 0.4 else rng.choice(NOUNS)
    return rng.choice(forms), noun, rng.choice(CONNECTIVES)
