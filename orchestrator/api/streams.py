"""Server-sent events, and requests whose client may leave while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEARTBEAT_S = 15.0
"""A comment goes out when nothing else does, so that no proxy on the way thinks that the connection is dead."""
HEARTBEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


def event(data: Any, *, name: str | None = None, number: int | None = None) -> bytes:
    """One message. `number` is what a client sends back as Last-Event-ID."""
    head = (f"id: {number}\n" if number is not None else "") + (f"event: {name}\n" if name is not None else "")
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends the pieces of a generator as they come and closes it when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None], at_end: Callable[[], None] | None = None) -> None:
        """`at_end` is called however it ends, also when no piece was ever asked for: a generator that has not begun
        cannot clean up."""
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        finally:
            if self._at_end is not None:
                self._at_end()

    async def _send_all(self, send: Send) -> None:
        pieces = with_heartbeats(self._pieces)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            with contextlib.suppress(RuntimeError):  # it runs right now, in a task that is being cancelled
                await pieces.aclose()


async def with_heartbeats(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The pieces, and a comment whenever none came for a while."""
    waiting: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_following(pieces))
            done, _ = await asyncio.wait({waiting}, timeout=HEARTBEAT_S)
            if not done:
                yield HEARTBEAT
                continue
            piece, waiting = waiting.result(), None
            if piece is None:
                return
            yield piece
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})
            if not waiting.cancelled():
                waiting.exception()
        await pieces.aclose()


async def _following(pieces: AsyncGenerator[bytes, None]) -> bytes | None:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        return None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None once the client has left: `work` is cancelled then, and has ended."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # raised above, or of what nobody waits for any more


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """`until_disconnect` for a request whose body has been read."""
    return await until_disconnect(request.receive, work)
