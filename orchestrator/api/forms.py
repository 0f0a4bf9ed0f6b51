"""multipart/form-data with one large part, which goes to the disk as it comes, and one small one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from longprefill.orchestrator.api.errors import ApiError, invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_HEADERS, MAX_HEADER_BYTES = 20, 4096
"""Of a part."""
MAX_OPTION_BYTES = 256 << 10


@dataclass(slots=True)
class Form:
    """`prompt` is a file that its maker closes; the rest is what came with it."""

    prompt: IO[bytes]
    has_prompt: bool = False
    file_name: str = ""
    media_type: str = ""
    options: bytearray | None = None


async def read_form(content_type: str, pieces: AsyncIterator[bytes], prompt: IO[bytes]) -> Form:
    """Reads a form with the parts "prompt" (a file, or a field) and "options"; the prompt is written to `prompt`.

    Raises:
        ApiError: 400, it is no such form.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise invalid("content-type has no boundary: let the client library make the form", code="invalid_form")
    parts = _Parts(Form(prompt))
    try:
        parser = MultipartParser(boundary, parts.callbacks)
        async for piece in pieces:
            parser.write(piece)
            await parts.write()
    except FormParserError as error:
        raise _broken(str(error)) from None
    if not parts.is_over:
        raise _broken("it has no end")
    if not parts.form.has_prompt:
        raise invalid("the form has no prompt", param="prompt", code="missing_parameter")
    return parts.form


class _Parts:
    """Gathers the parser's calls: no part is kept in memory but a piece at a time."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.is_over = False
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = bytearray(), bytearray()
        self._part = ""
        self._unwritten: list[bytes] = []
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add(self._name, data[start:end]),
            "on_header_value": lambda data, start, end: self._add(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._start_part,
            "on_part_data": lambda data, start, end: self._take(data[start:end]),
            "on_end": self._end,
        }

    async def write(self) -> None:
        """Puts on the disk what has come of the prompt."""
        if self._unwritten:
            pieces, self._unwritten = self._unwritten, []
            await asyncio.to_thread(self.form.prompt.writelines, pieces)

    def _begin(self) -> None:
        self._headers = {}

    def _add(self, text: bytearray, piece: bytes) -> None:
        text += piece
        if len(self._name) + len(self._value) > MAX_HEADER_BYTES:
            raise _broken("a part's header is too long")

    def _end_header(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()
        if len(self._headers) > MAX_HEADERS:
            raise _broken("a part has too many headers")

    def _start_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        form = self.form
        if (self._part == "prompt" and form.has_prompt) or (self._part == "options" and form.options is not None):
            raise _broken(f"it has {self._part} twice")
        if self._part == "prompt":
            form.has_prompt = True
            form.file_name = options.get(b"filename", b"").decode("utf-8", "replace")
            form.media_type = (
                self._headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
            )
        elif self._part == "options":
            form.options = bytearray()
        else:
            raise _broken(f"{self._part[:80]!r} is not a part of it: send prompt and options")

    def _take(self, piece: bytes) -> None:
        if self._part == "prompt":
            self._unwritten.append(piece)
        elif self.form.options is not None:
            self.form.options += piece
            if len(self.form.options) > MAX_OPTION_BYTES:
                raise _broken(f"options have more than {MAX_OPTION_BYTES} bytes")

    def _end(self) -> None:
        self.is_over = True


def _broken(reason: str) -> ApiError:
    return invalid(f"the form cannot be read: {reason[:200]}", code="invalid_form")
