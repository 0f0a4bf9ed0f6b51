"""Prompts too large for JSON: streamed to a temporary file, read from there once.

Media types: text/plain is UTF-8 text, application/x-npy (or application/octet-stream) a .npy file of token ids,
multipart/form-data either of them as the file "prompt" with an optional field "options" (a JSON object).
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from typing import IO, Any, NamedTuple

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from longprefill.orchestrator.api.body import check, parse
from longprefill.orchestrator.api.errors import ApiError, invalid, unavailable
from longprefill.orchestrator.api.parameters import MAX_TOKEN, JobOptions, Prompt, check_prompt_text

NPY_MAGIC = b"\x93NUMPY"
TEXT, NPY, FORM = "text/plain", "application/x-npy", "multipart/form-data"
BINARY = (NPY, "application/octet-stream")
MEDIA_TYPES = (TEXT, *BINARY, FORM)
LISTS = ("stop", "stop_token_ids")
MAX_FIELD_BYTES = 1 << 20
"""Of a form's part that is no file: options, or a short prompt."""


class Upload(NamedTuple):
    prompt: Prompt
    options: JobOptions


async def read_upload(request: Request, media_type: str) -> Upload:
    """The prompt and the options of an upload; options come as query parameters, or in the form.

    Raises:
        ApiError: 400 not what its type says, 415 an unknown type, 503 no room on the disk.
    """
    try:
        if media_type == FORM:
            return await _read_form(request)
        options = options_of(request)
        with tempfile.TemporaryFile(prefix="longprefill-upload-") as file:
            async for piece in request.stream():
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


async def _read_form(request: Request) -> Upload:
    try:
        form = await request.form(max_files=1, max_fields=2, max_part_size=MAX_FIELD_BYTES)
    except HTTPException as error:
        raise invalid(f"the form cannot be read: {error.detail}", code="invalid_form") from None
    try:
        unknown = [name for name in form if name not in ("prompt", "options")]
        if unknown:
            raise invalid(f"{unknown[0][:80]} is not a part of this form: send prompt and options", param="form")
        file, options = form.get("prompt"), form.get("options")
        if file is None:
            raise invalid("the form has no prompt", param="prompt", code="missing_parameter")
        if options is None:
            parsed = options_of(request)
        elif isinstance(options, str):
            parsed = parse(options.encode("utf-8", "surrogatepass"), JobOptions)
        else:
            raise invalid("options is a file: send a JSON text", param="options")
        if isinstance(file, str):
            return Upload(check_prompt_text(file), parsed)
        is_npy = (file.filename or "").endswith(".npy") or file.content_type in BINARY
        return Upload(await asyncio.to_thread(_prompt_of, file.file, NPY if is_npy else TEXT), parsed)
    finally:
        await form.close()


def _prompt_of(file: Any, media_type: str) -> Prompt:
    """Text or token ids of an open file."""
    num_bytes = file.seek(0, 2)
    file.seek(0)
    if num_bytes == 0:
        raise invalid("the prompt is empty: give at least one token", param="prompt")
    if media_type in BINARY:
        return _ids(file, num_bytes)
    if isinstance(file, tempfile.SpooledTemporaryFile):
        file.rollover()
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
    """Token ids int32 [T] of a .npy file. Nothing is unpickled, and no more is read than is there."""
    if file.read(len(NPY_MAGIC)) != NPY_MAGIC:
        raise invalid(f"the prompt is no .npy file: send text as {TEXT}", param="prompt")
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"version {version}")
        shape, _, dtype = read_header[version](file)
    except (ValueError, TypeError, EOFError, OverflowError, RecursionError, MemoryError) as error:
        raise invalid(f"the prompt is not a .npy file that can be read: {str(error)[:120]}", param="prompt") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise invalid(
            f"the prompt holds dtype {str(dtype)[:40]} and shape {str(shape)[:40]}: it has one dimension of integers",
            param="prompt",
        )
    held = (num_bytes - file.tell()) // dtype.itemsize
    if not 0 < shape[0] <= held:
        raise invalid(f"the prompt's header says {shape[0]} tokens and the file holds {held}", param="prompt")
    ids_T = np.frombuffer(file.read(shape[0] * dtype.itemsize), dtype=dtype)
    if ids_T.min() < 0 or ids_T.max() > MAX_TOKEN:
        raise invalid(f"a token id is outside of 0 to {MAX_TOKEN}", param="prompt")
    return ids_T.astype(np.int32)


def unknown_media_type(media_type: str) -> ApiError:
    """415."""
    known = ", ".join(("application/json", *MEDIA_TYPES))
    return ApiError(415, f"content-type={media_type[:80]!r}: send {known}", code="unsupported_media_type")
