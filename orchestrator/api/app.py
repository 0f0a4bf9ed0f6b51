"""The application: routes, refusals, the dashboard's files, behind the guard.

guard (sizes, hosts, times, headers) -> caller -> body -> route -> PatientController -> controller
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from longprefill.orchestrator.api import chat, completions, jobs, models, operations
from longprefill.orchestrator.api.errors import ApiError, as_api_error, invalid
from longprefill.orchestrator.api.guard import LOCAL_NAMES, Guard, Limits
from longprefill.orchestrator.api.link import PatientController
from longprefill.orchestrator.api.openapi import describe, methods_of
from longprefill.orchestrator.api.served_model import ServedModel, read_served_model
from longprefill.orchestrator.api.service import make_service
from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller.contract import ControllerApi
from longprefill.partition.errors import UserError

DASHBOARD = Path(__file__).resolve().parents[1] / "dashboard"
DASHBOARD_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def create_app(config: ServiceConfig, controller: ControllerApi, model: ServedModel | None = None) -> FastAPI:
    """The service's ASGI application over a controller, whose calls may raise ControllerAway.

    Raises:
        ModelError: the configured model cannot be read.
    """
    app = FastAPI(title="longprefill", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    service = make_service(config, model or read_served_model(config), PatientController(controller))
    app.state.service = service
    for part in (completions, chat, models, jobs, operations):
        app.include_router(part.router)
    _add_dashboard(app)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(UserError, _refuse_user)
    app.add_exception_handler(RequestValidationError, _refuse_arguments)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.openapi = functools.cache(lambda: describe(app, service))
    app.add_middleware(Guard, limits=_limits(config), upload_paths=(jobs.JOBS_PATH,))
    return app


def _limits(config: ServiceConfig) -> Limits:
    section = config.service
    is_open = section.is_loopback and not config.keys
    return Limits(
        max_body_bytes=section.max_body_bytes,
        max_upload_bytes=section.max_upload_bytes,
        body_timeout_s=section.request_timeout_s,
        local_names=LOCAL_NAMES | {section.host.lower(), f"[{section.host.lower()}]"} if is_open else None,
    )


def _add_dashboard(app: FastAPI) -> None:
    """One route for each file: what is not in the folder cannot be asked for. The page needs no key; its data does."""
    for file in sorted(DASHBOARD.glob("*")):
        if file.suffix in DASHBOARD_TYPES:
            respond = functools.partial(_file, file.read_bytes(), DASHBOARD_TYPES[file.suffix])
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.add_api_route(path, respond, methods=["GET"], include_in_schema=False)


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def _refuse_user(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return as_api_error(error).response


async def _refuse_arguments(request: Request, error: Exception) -> Response:
    """A query parameter, header or part of the path that cannot be read."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    said = first["msg"].replace("Input should", "it should")
    return invalid(f"{where[:80]}={str(first.get('input'))[:40]!r}: {said}", param=where[:80]).response


async def _refuse_route(request: Request, error: Exception) -> Response:
    """No such address, or not with this method."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.method
    if error.status_code == 405:
        allowed = ", ".join(methods_of(request.app.openapi(), path)) or "GET"
        message = f"{method[:16]} is not a method of {path[:80]}: use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed}).response
    if error.status_code == 404:
        return ApiError(404, f"there is no {path[:80]} here", code="not_found").response
    return ApiError(error.status_code, str(error.detail), code="refused").response
