"""JSON bodies: read with limits, parsed without surprises, checked against a model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from longprefill.orchestrator.api.errors import ApiError, invalid
from longprefill.orchestrator.api.guard import ByteBudget

MAX_DEPTH = 32
BIG_BYTES = 64 << 10
"""Bodies above this are parsed beside the event loop."""
EXACT = 2.0**53
MAX_ERROR_CHARACTERS = 160

Parameters = TypeVar("Parameters", bound=BaseModel)


@dataclass(slots=True)
class Reader:
    """Reads the bodies of all requests of a process."""

    budget: ByteBudget
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Bodies that are parsed and tokenized at once; the others wait their turn."""

    async def read(self, request: Request, kind: type[Parameters]) -> Parameters:
        """The parameters in a JSON body.

        Raises:
            ApiError: 415 not JSON by its type, 400 not JSON or not what `kind` takes, 413 and 408 from the guard.
        """
        media_type = media_type_of(request)
        if media_type != "application/json":
            raise ApiError(
                415, f"content-type={media_type[:80]!r}: send application/json", code="unsupported_media_type"
            )
        held = bytearray()
        with self.budget.share() as take:
            try:
                async for piece in request.stream():
                    take(len(piece))
                    held += piece
            except ClientDisconnect:
                raise ApiError(400, "the body ended too early", code="incomplete_body") from None
            if len(held) <= BIG_BYTES:
                return parse(bytes(held), kind)
            async with self.slots:
                return await asyncio.to_thread(parse, held, kind)


def media_type_of(request: Request) -> str:
    """The type of a request's body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def parse(data: bytes | bytearray, kind: type[Parameters]) -> Parameters:
    """Parameters from JSON text.

    Raises:
        ApiError: 400, with the parameter that is wrong.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_number)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: offset {error.start}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise invalid(f"the body is not JSON: {_short(str(error))}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is a JSON {_kind(value)}: send an object", code="invalid_json")
    check_tree(value)
    return check(value, kind)


def check(value: dict[str, Any], kind: type[Parameters], *, from_texts: bool = False) -> Parameters:
    """Parameters from a parsed object; `from_texts`: its values are texts, as in a query.

    Raises:
        ApiError: 400 for the first thing that is wrong.
    """
    try:
        return kind.model_validate(value, strict=False if from_texts else None)
    except ValidationError as error:
        raise _as_refusal(error.errors(include_url=False, include_context=False)) from None


def _as_refusal(found: list[ErrorDetails]) -> ApiError:
    """The first thing that is wrong. Of the ways in which a value may be given, the one that came closest counts."""
    where = _parameter(found[0]["loc"])
    first = max((item for item in found if _parameter(item["loc"]) == where), key=lambda item: len(item["loc"]))
    if first["type"] == "extra_forbidden":
        name = _short(where)
        return invalid(f"{name} is not a parameter of this request", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        name = ".".join(str(part) for part in first["loc"] if _is_name(part))
        return invalid(f"{name} is missing", param=where, code="missing_parameter")
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    value = first["input"]
    given = f"={_short(repr(value), 40)}" if isinstance(value, (str, int, float, bool)) else ""
    return invalid(f"{where}{given}: {_short(said, 400)}" if where else _short(said, 400), param=where or None)


def _parameter(place: tuple[int | str, ...]) -> str:
    return str(place[0]) if place else ""


def _is_name(part: int | str) -> bool:
    """pydantic puts the names of types among those of fields."""
    return isinstance(part, int) or (part.isidentifier() and part != "str")


def check_tree(value: object) -> None:
    """Refuses what JSON can say and text or a program cannot take: half surrogate pairs, and depth without end.

    Raises:
        ApiError: 400.
    """
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        following: list[object] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for name, inner in item.items():
                    _check_text(name)
                    if not isinstance(inner, (int, float, bool, type(None))):
                        following.append(inner)
            elif isinstance(item, list):
                following += [inner for inner in item if type(inner) is not int]
        if not following:
            return
        level = following
    raise _too_deep()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            f"a text holds half of a surrogate pair, \\u{ord(text[error.start]):04x}: it is no character",
            code="invalid_text",
        ) from None


def _too_deep() -> ApiError:
    return invalid(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _number(text: str) -> int | float:
    """JSON has one kind of number: 16.0 is a whole one."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < EXACT else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _short(text: str, most: int = MAX_ERROR_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
