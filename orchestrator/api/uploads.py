"""Prompts too large for JSON: streamed to a temporary file, read from there once.

Media types: text/plain is UTF-8 text, application/x-npy (or application/octet-stream) a .npy file of token ids,
multipart/form-data either of them as the file "prompt" with an optional field "options" (a JSON object).
"""

from __future__ import annotations

import asyncio
import mmap
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO, Any, NamedTuple

import numpy as np
from starlette.requests import ClientDisconnect, Request

from longprefill.orchestrator.api.body import check, parse
from longprefill.orchestrator.api.errors import ApiError, invalid, unavailable
from longprefill.orchestrator.api.forms import read_form
from longprefill.orchestrator.api.parameters import MAX_TOKEN, JobOptions, Prompt

NPY_MAGIC = b"\x93NUMPY"
NPY_DTYPE = re.compile(rb"""['"]descr['"]\s*:\s*['"]([<>|=][iu][1248])['"]""")
NPY_SHAPE = re.compile(rb"""['"]shape['"]\s*:\s*\(\s*([0-9]{1,15})\s*,\s*\)""")
TEXT, NPY, FORM = "text/plain", "application/x-npy", "multipart/form-data"
BINARY = (NPY, "application/octet-stream")
MEDIA_TYPES = (TEXT, *BINARY, FORM)
PIECE_BYTES = 1 << 20
LISTS = ("stop", "stop_token_ids")


class Upload(NamedTuple):
    prompt: Prompt
    options: JobOptions


async def read_upload(request: Request, media_type: str, most: int, take: Callable[[int], None]) -> Upload:
    """The prompt and the options of an upload; options come as query parameters, or in the form. `most` bytes are read,
    and `take` is told of each piece first.

    Raises:
        ApiError: 400 not what its type says, 415 an unknown type, 503 no room on the disk.
    """
    try:
        with tempfile.TemporaryFile(prefix="longprefill-upload-") as file:
            pieces = _pieces(request, most, take)
            if media_type == FORM:
                return await _read_form(request, pieces, file)
            options = options_of(request)
            async for piece in pieces:
                await asyncio.to_thread(file.write, piece)
            return Upload(await asyncio.to_thread(_prompt_of, file, media_type), options)
    except ClientDisconnect:
        raise invalid("the body ended too early", code="incomplete_body") from None
    except OSError as error:
        raise unavailable(f"the upload cannot be kept: {error.strerror or 'no room on the disk'}") from error


def options_of(request: Request) -> JobOptions:
    """Job options from query parameters, which are texts.

    Raises:
        ApiError: 400.
    """
    given: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if name not in LISTS and len(values) > 1:
            raise invalid(f"{name[:80]} is given {len(values)} times: give it once", param=name[:80])
        given[name] = values if name in LISTS else values[0]
    return check(given, JobOptions, from_texts=True)


async def _pieces(request: Request, most: int, take: Callable[[int], None]) -> AsyncIterator[bytes]:
    """The body in pieces large enough that reading keeps up with what arrives."""
    held, num_bytes = bytearray(), 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes > most:
            raise ApiError(
                413,
                f"the upload has more than {most} bytes: no prompt that this service takes is so long",
                code="context_length_exceeded",
                param="prompt",
                headers={"connection": "close"},
            )
        take(len(piece))
        held += piece
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


async def _read_form(request: Request, pieces: AsyncIterator[bytes], file: IO[bytes]) -> Upload:
    form = await read_form(request.headers["content-type"], pieces, file)
    options = options_of(request) if form.options is None else parse(form.options, JobOptions)
    is_npy = form.file_name.endswith(".npy") or form.media_type in BINARY
    return Upload(await asyncio.to_thread(_prompt_of, file, NPY if is_npy else TEXT), options)


def _prompt_of(file: IO[bytes], media_type: str) -> Prompt:
    """Text or token ids of an open file."""
    num_bytes = file.seek(0, 2)
    file.seek(0)
    if num_bytes == 0:
        raise invalid("the prompt is empty: give at least one token", param="prompt")
    if media_type in BINARY:
        return _ids(file, num_bytes)
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        try:
            return str(view, "utf-8")  # pyright: ignore[reportArgumentType, reportCallIssue] - a buffer like any other
        except UnicodeDecodeError as error:
            raise invalid(
                f"the prompt is not UTF-8 text: byte 0x{view[error.start]:02x} at offset {error.start}; token ids are "
                f"a .npy file sent as {NPY}",
                param="prompt",
            ) from None


def _ids(file: IO[bytes], num_bytes: int) -> np.ndarray:
    """Token ids int32 [T] of a .npy file. Its header is matched, not evaluated, and no more is read than is there."""
    start = file.read(len(NPY_MAGIC) + 2)
    if not start.startswith(NPY_MAGIC):
        raise invalid(f"the prompt is no .npy file: send text as {TEXT}", param="prompt")
    length_bytes = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(start[len(NPY_MAGIC) :])
    header = b"" if length_bytes is None else file.read(min(int.from_bytes(file.read(length_bytes), "little"), 4096))
    dtype, shape = NPY_DTYPE.search(header), NPY_SHAPE.search(header)
    if dtype is None or shape is None:
        raise invalid(
            f"the prompt's .npy header is {header[:80]!r}: it must say integers of one dimension, as numpy.save does",
            param="prompt",
        )
    width = np.dtype(dtype[1].decode())
    num_tokens, held = int(shape[1]), (num_bytes - file.tell()) // width.itemsize
    if not 0 < num_tokens <= held:
        raise invalid(f"the prompt's header says {num_tokens} tokens and the file holds {held}", param="prompt")
    ids_T = np.frombuffer(file.read(num_tokens * width.itemsize), dtype=width)
    if ids_T.min() < 0 or ids_T.max() > MAX_TOKEN:
        raise invalid(f"a token id is outside of 0 to {MAX_TOKEN}", param="prompt")
    return ids_T.astype(np.int32)


def unknown_media_type(media_type: str) -> ApiError:
    """415."""
    known = ", ".join(("application/json", *MEDIA_TYPES))
    return ApiError(415, f"content-type={media_type[:80]!r}: send {known}", code="unsupported_media_type")
