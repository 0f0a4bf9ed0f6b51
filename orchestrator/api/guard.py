"""What every request passes first: hosts and origins, sizes, times; and what every response carries.

Plain ASGI: streams pass through as they are, nothing is buffered here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longprefill.orchestrator.api.errors import ApiError, unavailable

logger = logging.getLogger(__name__)

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
MAX_TARGET_BYTES = 8 << 10
BODY_IDLE_S = 30.0
"""A body that stands still this long is given up."""
DIGITS = re.compile(rb"[0-9]{1,18}")
PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", PAGE_POLICY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_body_bytes: int
    """Of any request but an upload."""
    max_upload_bytes: int
    body_timeout_s: float
    """For a whole body."""
    local_names: frozenset[str] | None
    """Host names that a request may carry (a service without keys, against DNS rebinding); None: any."""


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, *, limits: Limits, upload_paths: Sequence[str]) -> None:
        self._app = app
        self._limits = limits
        self._upload_paths = frozenset(upload_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send)
        try:
            body = self._admit(scope, receive)
            await self._app(scope, body, answer)
        except ApiError as error:
            await answer.refuse(error, scope)
        except Exception:  # the edge: the client gets one line and the log the rest
            number = _request_id(scope)
            logger.exception("request %s failed: %s %s", number, scope["method"], scope["path"])
            await answer.refuse(
                ApiError(500, f"this is a bug of the service: its log has request {number}", code="internal"), scope
            )

    def _admit(self, scope: Scope, receive: Receive) -> _Body:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
        if target > MAX_TARGET_BYTES:
            raise ApiError(414, f"the address has {target} bytes: use at most {MAX_TARGET_BYTES}", code="uri_too_long")
        if not scope["query_string"].isascii():
            raise ApiError(400, "the query is not ASCII: write other characters as %XX", code="invalid_query")
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            raise ApiError(
                431,
                f"{len(headers)} headers of {num_bytes} bytes: use at most {MAX_HEADERS} of {MAX_HEADER_BYTES} bytes",
                code="headers_too_large",
            )
        by_name = dict(reversed(headers))  # of a header that comes twice the first counts, as for the application
        self._check_origin(scope, by_name)
        is_json = by_name.get(b"content-type", b"").lower().startswith(b"application/json")
        is_upload = scope["path"] in self._upload_paths and not is_json
        most = self._limits.max_upload_bytes if is_upload else self._limits.max_body_bytes
        length = by_name.get(b"content-length")
        if length is not None and not DIGITS.fullmatch(length):
            raise ApiError(400, f"content-length={length[:40]!r} is not a number of bytes", code="invalid_header")
        if length is not None and int(length) > most:
            raise too_large(int(length), most)
        return _Body(receive, most, self._limits.body_timeout_s)

    def _check_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """No page of another origin reaches a service that trusts whoever can connect."""
        names = self._limits.local_names
        if names is None:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":[0-9]*$", "", host)
        if name not in names:
            raise ApiError(
                403,
                f"host {host[:80]!r} is not a name of this service: use {', '.join(sorted(names))}, or configure keys",
                code="wrong_host",
            )
        if scope["method"] in SAFE_METHODS:
            return
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        site = headers.get(b"sec-fetch-site", b"")
        if (origin and origin.partition("://")[2] != host) or site in (b"cross-site", b"same-site"):
            raise ApiError(
                403, f"pages of {origin[:80] or 'other sites'} may not use this service", code="wrong_origin"
            )


def too_large(num_bytes: int, most: int) -> ApiError:
    """413. The rest of such a body is not read, so the connection cannot be used again."""
    message = f"the body has {num_bytes} bytes or more: this service takes at most {most}"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


class _Body:
    """`receive` of the application, which counts the bytes that arrive and the time they take."""

    def __init__(self, receive: Receive, most: int, timeout_s: float) -> None:
        self._receive = receive
        self._most = most
        self._num_bytes = 0
        self._is_whole = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()  # what follows is the disconnect, which may be hours away
        left_s = min(BODY_IDLE_S, self._deadline - self._loop.time())
        try:
            async with asyncio.timeout(max(left_s, 0.001)):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive in time ({self._num_bytes} bytes so far)",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            if self._num_bytes > self._most:
                raise too_large(self._num_bytes, self._most)
        else:
            self._is_whole = True
        return message


class _Answer:
    """`send` of the application: adds the headers of every response, and knows whether one has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            given = {name for name, _ in message["headers"]}
            own = [*SECURITY_HEADERS]
            if b"cache-control" not in given:
                own.append((b"cache-control", b"no-store"))
            message["headers"] = [*message["headers"], *(pair for pair in own if pair[0] not in given)]
        await self._send(message)

    async def refuse(self, error: ApiError, scope: Scope) -> None:
        if self._has_begun:  # the stream breaks off: its reader sees that no end was sent
            raise error
        await error.response(scope, _nothing, self)


def _request_id(scope: Scope) -> str:
    """Serve's proxy numbers requests and tells the client (X-Request-ID)."""
    given = dict(reversed(scope["headers"])).get(b"x-request-id", b"").decode("latin-1")
    return given if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given) else f"req-{uuid.uuid4().hex}"


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


class ByteBudget:
    """Bytes of bodies that this process holds at once, over all requests: memory stays flat under any load."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """For one body: `take(num_bytes)` as it arrives raises ApiError (503) when too much is held already. At the end
        all of it is given back."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if num_bytes > self._left:
                raise unavailable("too many large requests are being read: ask again")
            self._left -= num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self._left += taken
