"""Running text between planted facts: what Python ships, split into paragraphs for training and for tests."""

from __future__ import annotations

import functools
import random
import zlib
from typing import Literal

from longprefill.workers.model.vocabulary import python_documentation

Split = Literal["training", "test"]
TEST_SHARE = 10
"""One paragraph in so many is never trained on; its checksum decides, so the split does not move with the others."""


@functools.cache
def filler_text(split: Split) -> str:
    """All paragraphs of a split, ASCII, separated by empty lines."""
    wanted = []
    for text in python_documentation():
        for paragraph in text.split("\n\n"):
            plain = paragraph.strip("\n").encode("ascii", "ignore").decode()
            is_test = zlib.crc32(plain.encode()) % TEST_SHARE == 0
            if plain.strip() and is_test == (split == "test"):
                wanted.append(plain)
    return "\n\n".join(wanted) + "\n\n"


class Filler:
    """Pieces of a split's text, from anywhere in it or one after the other."""

    def __init__(self, split: Split) -> None:
        self.text = filler_text(split)
        self._twice = self.text + self.text

    def piece(self, length: int, start: int) -> str:
        """`length` characters from the first word behind `start` (counted around the text), the last one a space."""
        if length <= 0:
            return ""
        start = self._twice.find(" ", start % len(self.text)) + 1
        text = self._twice[start : start + length]
        while len(text) < length:  # longer than twice the whole text
            text += self.text[: length - len(text)]
        return text[:-1] + " "

    def anywhere(self, length: int, rng: random.Random) -> str:
        """A piece from a random place."""
        return self.piece(length, rng.randrange(len(self.text)))
