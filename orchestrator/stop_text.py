"""Text that ends a generation, watched for across the pieces in which text arrives."""

from __future__ import annotations

from collections.abc import Sequence

from longprefill.partition.errors import UserError


class StopText:
    """Passes text on up to the first stop text, which it swallows. What may be the beginning of one is held back.

    Raises:
        UserError: an empty stop text, which would end everything at once.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        if "" in marks:
            raise UserError("--stop '' is empty: give at least one character")
        self._marks = tuple(marks)
        self._held = ""
        self.is_reached = False

    def push(self, piece: str) -> str:
        """What may be shown now. Nothing after a stop text."""
        if self.is_reached:
            return ""
        text = self._held + piece
        found = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        if found:
            self.is_reached, self._held = True, ""
            return text[: min(found)]
        num_held = max((_overlap(text, mark) for mark in self._marks), default=0)
        shown, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return shown

    def finish(self) -> str:
        """What was held back and is no stop text after all."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, mark: str) -> int:
    """The longest end of `text` that is a beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
