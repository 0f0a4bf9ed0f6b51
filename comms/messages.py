"""Control messages of a hand-off: msgpack maps with a version and a kind, one typed class a kind. Nothing is unpickled.

In the order of a transfer: `Manifest` (one a finished step), `Commit` (last, and only of a finished job), then from the
decode side `Ack` (everything verified; only this, or the end of a lease, frees the sender) or `Nack`.

Format 1: {"version": 1, "kind": name, "body": {field: value}}. Entries are arrays of their fields in the order of
declaration. Unknown kinds, versions and fields, missing and repeated fields are errors; so is a message above the
limit, in both directions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgpack

from .fields import (
    MAX_BYTES,
    MAX_CHECKSUM,
    MAX_TOKENS,
    MessageError,
    check_bool,
    check_choice,
    check_int,
    check_text,
    shown,
)
from .manifest import LayerCounts, LogitsEntry, Manifest, PageEntry, StateEntry, check_identity

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
"""About two million pages: a step's manifest is far smaller."""
NACK_CODES = ("checksum", "incomplete", "incompatible", "expired", "no_room", "cancelled", "unknown_transfer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The job's caches are complete: the decode side may verify and use them. Sent once, after the last manifest."""

    transfer_id: str
    attempt: int
    job: str
    position: int
    num_manifests: int
    num_pages: int
    num_states: int
    num_bytes: int
    checksum: int
    """xxh3_64 over the encoded manifests, one after another."""

    def __post_init__(self) -> None:
        check_identity(self)
        check_int(self.position, "position", 1, MAX_TOKENS)
        check_int(self.num_manifests, "num_manifests", 1, MAX_TOKENS)
        check_int(self.num_pages, "num_pages", 0, MAX_TOKENS)
        check_int(self.num_states, "num_states", 0, MAX_TOKENS)
        check_int(self.num_bytes, "num_bytes", 0, MAX_BYTES)
        check_int(self.checksum, "checksum", 0, MAX_CHECKSUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Everything arrived and was verified: the sender may free its side."""

    transfer_id: str
    attempt: int
    job: str
    position: int
    num_bytes: int

    def __post_init__(self) -> None:
        check_identity(self)
        check_int(self.position, "position", 1, MAX_TOKENS)
        check_int(self.num_bytes, "num_bytes", 0, MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """The attempt is refused; whether another one may succeed here is `may_retry`."""

    transfer_id: str
    attempt: int
    job: str
    code: str
    """One of `NACK_CODES`."""
    reason: str
    may_retry: bool

    def __post_init__(self) -> None:
        check_identity(self)
        check_choice(self.code, "code", NACK_CODES)
        check_text(self.reason, "reason")
        check_bool(self.may_retry, "may_retry")


Message = Manifest | Commit | Ack | Nack
KINDS: dict[str, type[Message]] = {"manifest": Manifest, "commit": Commit, "ack": Ack, "nack": Nack}
ENTRY_FIELDS: dict[type[Any], tuple[str, ...]] = {
    cls: tuple(field.name for field in dataclasses.fields(cls))
    for cls in (LayerCounts, PageEntry, StateEntry, LogitsEntry)
}
"""What an entry's array holds, in this order."""


def encode(message: Message, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The message as bytes; `decode` gives it back equal.

    Raises:
        MessageError: not one of the four kinds, or larger than `limit_bytes`.
    """
    kind = next((name for name, cls in KINDS.items() if type(message) is cls), None)
    if kind is None:
        raise MessageError(f"{type(message).__name__} is no message: allowed are {', '.join(KINDS)}")
    body = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    if isinstance(message, Manifest):
        body["layers"] = fields_of(message.layers)
        body["pages"] = [fields_of(page) for page in message.pages]
        body["states"] = [fields_of(state) for state in message.states]
        body["logits"] = None if message.logits is None else fields_of(message.logits)
    data: bytes = msgpack.packb({"version": VERSION, "kind": kind, "body": body})  # pyright: ignore[reportAssignmentType]
    if len(data) > limit_bytes:
        raise MessageError(
            f"a {kind} of {len(data)} bytes: at most {limit_bytes}: send a manifest a step, not one a job"
        )
    return data


def decode(data: bytes, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in `data`, every field checked.

    Raises:
        MessageError: whatever is wrong with it; no input raises anything else.
    """
    if len(data) > limit_bytes:
        raise MessageError(f"a message of {len(data)} bytes: at most {limit_bytes}")
    envelope = exact_map(unpack(data), "message", ("version", "kind", "body"))
    version, kind = envelope["version"], envelope["kind"]
    if type(version) is not int or version != VERSION:
        raise MessageError(f"version={shown(version)}: this side speaks version {VERSION}")
    if type(kind) is not str or kind not in KINDS:
        raise MessageError(f"kind={shown(kind)}: known are {', '.join(KINDS)}")
    cls = KINDS[kind]
    body = exact_map(envelope["body"], kind, tuple(field.name for field in dataclasses.fields(cls)))
    if cls is Manifest:
        body["layers"] = entry(LayerCounts, body["layers"])
        body["pages"] = tuple(entry(PageEntry, item) for item in array(body["pages"], "pages"))
        body["states"] = tuple(entry(StateEntry, item) for item in array(body["states"], "states"))
        body["logits"] = None if body["logits"] is None else entry(LogitsEntry, body["logits"])
    return cls(**body)


def unpack(data: bytes) -> object:
    """The msgpack value in `data`."""
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=unique_map, ext_hook=refuse_extension
        )
    except MessageError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"{len(data)} bytes that are no msgpack value: {type(error).__name__} {error}") from None


def unique_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map without repeated keys; msgpack itself would let the last one win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MessageError(f"a map with {len(pairs) - len(found)} repeated keys")
    return found


def refuse_extension(code: int, data: bytes) -> object:
    """No message uses msgpack's extension types."""
    raise MessageError(f"extension type {code} of {len(data)} bytes: none is allowed")


def exact_map(value: object, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """`value` when it is a map with exactly `keys`."""
    if type(value) is not dict:
        raise MessageError(f"{name}={shown(value)}: needs a map")
    missing = [key for key in keys if key not in value]
    unknown = [shown(key) for key in value if key not in keys]
    if missing or unknown:
        raise MessageError(f"{name}: missing fields {missing}, unknown fields {unknown[:8]}")
    return value


def array(value: object, name: str) -> list[Any]:
    """`value` when it is an array."""
    if type(value) is not list:
        raise MessageError(f"{name}={shown(value)}: needs an array")
    return value


def entry(cls: type[Any], value: object) -> Any:
    """An entry of class `cls` from the array of its fields."""
    names = ENTRY_FIELDS[cls]
    values = array(value, cls.__name__)
    if len(values) != len(names):
        raise MessageError(f"{cls.__name__} with {len(values)} fields: has {len(names)}: {', '.join(names)}")
    # Arrays inside entries are shapes.
    return cls(**{name: tuple(v) if type(v) is list else v for name, v in zip(names, values, strict=True)})


def fields_of(value: Any) -> list[Any]:
    """The fields of an entry in order of declaration."""
    return [getattr(value, name) for name in ENTRY_FIELDS[type(value)]]
