"""Checks of message fields that came from outside: exact types, ranges, lengths, before anything is built of them."""

from __future__ import annotations

import re
from collections.abc import Collection

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""Ids and names: no spaces, no control characters, nothing that a log or a path could take for something else."""
MAX_TOKENS = 1 << 40
MAX_LAYERS = 1 << 16
MAX_RANKS = 1 << 20
MAX_BYTES = 1 << 48
MAX_CHECKSUM = (1 << 64) - 1
MAX_TEXT = 4096


class MessageError(ValueError):
    """A message cannot be read or built: garbage, cut short, too large, another version, a field out of range."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


def check_int(value: object, name: str, low: int, high: int) -> None:
    """Refuses what is not an int (a bool is not) in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{name}={shown(value)}: needs an int from {low} to {high}")


def check_bool(value: object, name: str) -> None:
    """Refuses what is not a bool."""
    if type(value) is not bool:
        raise MessageError(f"{name}={shown(value)}: needs a bool")


def check_name(value: object, name: str) -> None:
    """Refuses what is not an id: 1 to 128 of letters, digits and `._:/-`, a letter or digit first."""
    if type(value) is not str or NAME.fullmatch(value) is None:
        raise MessageError(f"{name}={shown(value)}: needs 1 to 128 of letters, digits and ._:/-, no sign first")


def check_text(value: object, name: str) -> None:
    """Refuses what is not a str of at most 4096 characters that UTF-8 can hold (lone surrogates it cannot)."""
    if type(value) is not str or len(value) > MAX_TEXT or any("\ud800" <= character <= "\udfff" for character in value):
        raise MessageError(f"{name}={shown(value)}: needs a str of at most {MAX_TEXT} characters without surrogates")


def check_choice(value: object, name: str, allowed: Collection[str]) -> None:
    """Refuses what is not one of the allowed strings."""
    if type(value) is not str or value not in allowed:
        raise MessageError(f"{name}={shown(value)}: allowed are {', '.join(sorted(allowed))}")


def check_tuple(value: object, name: str, of: type) -> None:
    """Refuses what is not a tuple of instances of `of`."""
    if type(value) is not tuple or any(type(item) is not of for item in value):
        raise MessageError(f"{name}={shown(value)}: needs a tuple of {of.__name__}")


def shown(value: object) -> str:
    """A short repr: what came from outside must not fill a log."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
