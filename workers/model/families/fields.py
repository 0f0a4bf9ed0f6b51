"""Read a config.json field by field: typed, bounded, with errors that name the field, its value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from longprefill.partition.errors import ModelError

REQUIRED: Final = object()
"""Default of a field that must be present."""


class Fields:
    """One JSON object of a config. Every getter takes the field's spellings, the first one present wins.

    Raises:
        ModelError: a required field is absent, or a value has the wrong type or range.
    """

    def __init__(self, raw: Mapping[str, Any], *, path: str = "") -> None:
        self._raw = raw
        self._path = path
        self._read: set[str] = set()

    def has(self, *names: str) -> bool:
        """Is one of the spellings present with a value other than null?"""
        self._read.update(names)
        return any(self._raw.get(name) is not None for name in names)

    def says(self, name: str) -> bool:
        """Is the field present, be it null?"""
        return name in self._raw

    def integer(self, *names: str, default: Any = REQUIRED, minimum: int = 1, maximum: int | None = None) -> int:
        """A whole number; true and false are not numbers, null counts as absent."""
        name, value = self._take(names, default, nullable=False)
        allowed = f"an integer from {minimum} on" if maximum is None else f"an integer from {minimum} to {maximum}"
        if type(value) is int and value >= minimum and (maximum is None or value <= maximum):
            return value
        raise self.error(name, value, allowed)

    def integer_or_none(self, *names: str, default: Any = None, minimum: int = 1) -> int | None:
        """A whole number or null."""
        _, value = self._take(names, default, nullable=True)
        return None if value is None else self.integer(*names, default=default, minimum=minimum)

    def number(self, *names: str, default: Any = REQUIRED, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        name, value = self._take(names, default, nullable=False)
        if type(value) in (int, float) and above < value < float("inf"):
            return float(value)
        raise self.error(name, value, f"a finite number above {above:g}")

    def flag(self, *names: str, default: Any = REQUIRED) -> bool:
        """true or false."""
        name, value = self._take(names, default, nullable=False)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, *names: str, among: Collection[str], default: Any = REQUIRED) -> str:
        """One of a few words."""
        name, value = self._take(names, default, nullable=False)
        if not isinstance(value, str) or value not in among:
            raise self.error(name, value, "one of " + ", ".join(sorted(among)))
        return value

    def words(self, *names: str, among: Collection[str], length: int) -> list[str]:
        """A list of `length` words, each one of a few."""
        name, value = self._take(names, REQUIRED, nullable=False)
        allowed = f"a list of {length} words, each one of " + ", ".join(sorted(among))
        if not isinstance(value, list) or len(value) != length:
            shown = f"a list of {len(value)}" if isinstance(value, list) else value
            raise self.error(name, shown, allowed)
        for index, word in enumerate(value):
            if word not in among:
                raise self.error(f"{name}[{index}]", word, "one of " + ", ".join(sorted(among)))
        return value

    def pattern(self, name: str, *, among: Collection[str], length: int) -> list[str]:
        """As `words`, or a text whose letters are the words."""
        _, value = self._take((name,), REQUIRED, nullable=False)
        if not isinstance(value, str):
            return self.words(name, among=among, length=length)
        if len(value) != length or not set(value) <= set(among):
            raise self.error(name, value, f"{length} letters or words, each one of " + ", ".join(sorted(among)))
        return list(value)

    def integers(self, *names: str, default: Any = REQUIRED) -> list[int]:
        """A list of whole numbers from 0 on."""
        name, value = self._take(names, default, nullable=False)
        if isinstance(value, list) and all(type(v) is int and v >= 0 for v in value):
            return value
        raise self.error(name, value, "a list of integers from 0 on")

    def numbers(self, *names: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        name, value = self._take(names, REQUIRED, nullable=False)
        if isinstance(value, list) and len(value) == length and all(type(v) in (int, float) and v > 0 for v in value):
            return tuple(float(v) for v in value)
        raise self.error(name, value, f"a list of {length} positive numbers")

    def token_ids(self, name: str, *, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or null."""
        _, value = self._take((name,), None, nullable=True)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise self.error(name, value, f"token ids from 0 to {vocab_size - 1} (vocab_size={vocab_size})")
        return tuple(ids)

    def section(self, name: str, *, default: Any = REQUIRED) -> Fields:
        """A nested object."""
        _, value = self._take((name,), default, nullable=False)
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(value, path=f"{self._path}{name}.")

    def refuse_unread(self, ignored: Collection[str] = ()) -> None:
        """Raise for every field that nobody has asked for: a misspelt field must not turn into a default."""
        unknown = sorted(set(self._raw) - self._read - set(ignored))
        if unknown:
            similar = difflib.get_close_matches(unknown[0], self._read, n=1, cutoff=0.5)
            advice = f"did you mean {self._path}{similar[0]}?" if similar else "remove it"
            shown = f"{self._path}{unknown[0]}={self._raw[unknown[0]]!r}"
            raise ModelError(f"config.json: unknown field {shown}: {advice} docs/guide/models.md lists the fields")

    def error(self, name: str, value: object, allowed: str) -> ModelError:
        """The error for a field of this object."""
        return ModelError(f"config.json: {self._path}{name}={value!r} is not allowed: it must be {allowed}")

    def _take(self, names: tuple[str, ...], default: Any, *, nullable: bool) -> tuple[str, Any]:
        self._read.update(names)
        for name in names:
            if name in self._raw and (nullable or self._raw[name] is not None):
                return name, self._raw[name]
        if default is REQUIRED:
            spellings = " or ".join(self._path + name for name in names)
            raise ModelError(f"config.json: field {spellings} is missing: add it")
        return names[0], default
