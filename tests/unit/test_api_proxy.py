"""What Serve's proxy answers by itself reaches a client as an answer to wait on."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path

import httpx
import pytest
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp

from longprefill.orchestrator.api.proxy import ENVIRONMENT, Front

from .api_support import Api, model_dir, run


def answered(app: ASGIApp, path: str = "/v1/models", method: str = "GET") -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Front(app)), base_url="http://127.0.0.1") as client:
            return await client.request(method, path)

    return asyncio.run(ask())


@pytest.mark.parametrize("status", [400, 404, 408, 500, 503])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_bare_refusals_of_the_proxy(status: int, method: str) -> None:
    answer = answered(PlainTextResponse("Path '/' not found", status), method=method)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert json.loads(answer.content)["error"]["code"] == "unavailable"


def test_a_refusal_in_parts_is_answered_once() -> None:
    answer = answered(StreamingResponse(iter(["not ", "found"]), 404))
    assert answer.status_code == 503
    assert json.loads(answer.content)["error"]["type"] == "service_unavailable"


def test_the_application_and_the_pages_of_the_proxy_pass(tmp_path: Path) -> None:
    assert answered(PlainTextResponse("fine")).text == "fine"
    assert answered(PlainTextResponse("no routes", 503), "/-/healthz").text == "no routes"

    async def scenario(api: Api) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Front(api.app)), base_url="http://127.0.0.1") as own:
            for path in ("/v1/prefill/jobs/none", "/nowhere", "/healthz", "/v1/models"):
                assert (await own.get(path)).json() == (await api.get(path)).json()

    run(model_dir(tmp_path), scenario)


def test_where_serve_looks_for_it() -> None:
    ((_, path),) = ENVIRONMENT.items()
    module, _, function = path.rpartition(".")
    (found,) = getattr(importlib.import_module(module), function)()
    assert isinstance(found, Middleware)
    assert found.cls is Front
