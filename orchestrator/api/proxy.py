"""What Ray Serve's proxy answers by itself, in our words.

The proxy listens before the application's routes are known and after they are gone, and then answers a bare 404, which
a client takes for the end of its job; when a replica is lost or too busy it answers a bare 500 or 503. All of these
mean the same: ask again. Serve runs `middlewares` in the proxy's process, by the variable in ENVIRONMENT.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longprefill.orchestrator.api.errors import unavailable

ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.middlewares"}
"""Of the process that Serve starts for its proxy."""
OWN_HEADER = b"x-content-type-options"
"""Every response of the application has it (guard.py), and none of the proxy's."""
SERVE_PATHS = "/-/"
"""The proxy's own pages, which kubelets and load balancers ask for its health."""


class Front:
    """Wraps the proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(SERVE_PATHS):
            await self._app(scope, receive, send)
            return
        is_replaced = False

        async def pass_on(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                is_replaced = message["status"] >= 400 and OWN_HEADER not in names
                if is_replaced:
                    error = unavailable("the service is starting, ending or has lost a process: ask again")
                    await error.response(scope, receive, send)
            if not is_replaced:
                await send(message)

        await self._app(scope, receive, pass_on)


def middlewares() -> list[Middleware]:
    """What Serve's proxy wraps itself in."""
    return [Middleware(Front)]
