"""Traces of requests in the JSONL form of Mooncake: timestamp (ms), input_length, output_length, hash_ids.

A hash id stands for a block of 512 tokens and everything before it: equal ids are equal prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longprefill.partition.errors import UserError

BLOCK_TOKENS = 512


class TraceError(UserError):
    """A trace cannot be read or replayed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """One id for every 512 tokens of the input, the last block possibly partial; empty: nothing is shared."""

    @property
    def full_blocks(self) -> tuple[int, ...]:
        return self.blocks[: self.input_tokens // BLOCK_TOKENS]


def read_trace(path: Path, *, most: int | None = None) -> tuple[Request, ...]:
    """The first `most` requests (all: None), in order of their arrival.

    Raises:
        TraceError: no such file, no request, or a line that is not one, with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"--trace {path} cannot be read: {error}") from None
    requests = [_request(path, number, line) for number, line in enumerate(lines[:most], start=1) if line.strip()]
    if not requests:
        raise TraceError(f"--trace {path} has no request: one JSON object a line is needed")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Writes a trace; times are rounded to milliseconds."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            line = {
                "timestamp": round(request.arrival_s * 1000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.blocks),
            }
            file.write(json.dumps(line) + "\n")


def span_seconds(requests: Sequence[Request]) -> float:
    """From the first to the last arrival."""
    return requests[-1].arrival_s - requests[0].arrival_s


def _request(path: Path, number: int, line: str) -> Request:
    where = f"--trace {path}, line {number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where} is not an object with timestamp, input_length and output_length")
    arrival_ms = fields.get("timestamp")
    if not isinstance(arrival_ms, int | float) or isinstance(arrival_ms, bool) or not 0 <= arrival_ms < float("inf"):
        raise TraceError(f"{where}: timestamp={arrival_ms!r}: need milliseconds, 0 or more")
    lengths = []
    for name, least in (("input_length", 1), ("output_length", 0)):
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise TraceError(f"{where}: {name}={value!r}: need a whole number from {least} on")
        lengths.append(value)
    blocks = fields.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise TraceError(f"{where}: hash_ids: need a list of whole numbers")
    return Request(arrival_ms / 1000, lengths[0], lengths[1], tuple(blocks))
