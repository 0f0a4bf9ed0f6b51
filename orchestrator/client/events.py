"""Server-sent events out of a response's lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Message(NamedTuple):
    name: str
    number: int | None
    data: Any


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """The messages of a stream, comments left out; an unfinished last one is not one."""
    name, number, data = "message", None, list[str]()
    for line in lines:
        if not line:
            if data:
                yield Message(name, number, json.loads("\n".join(data)))
            name, number, data = "message", None, []
        elif not line.startswith(":"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "id":
                number = int(value)
            elif field == "data":
                data.append(value)
