"""For operators: liveness, readiness, metrics, the cluster, the OpenAPI document."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from longprefill.orchestrator.api.auth import require_operator
from longprefill.orchestrator.api.errors import ApiError
from longprefill.orchestrator.api.openapi import answers
from longprefill.orchestrator.api.service import CurrentCaller, CurrentService

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["operation"])


@router.get("/healthz", responses=answers("object"))
async def health() -> dict[str, str]:
    """This process answers. It says nothing about the rest of the service: that is /readyz."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    responses={
        **answers("object"),
        503: {"description": "Not ready.", "content": {"application/json": {"schema": {"type": "object"}}}},
    },
)
async def ready(request: Request, service: CurrentService) -> Response:
    """200 when jobs can run: a prefill group and, where generation is configured, a decode worker are ready. The
    reasons, and who is asking, are for callers with a key."""
    state = await service.controller.readiness()
    answer: dict[str, Any] = {"status": "ready" if state.is_ready else "not ready"}
    try:
        caller = service.authenticator.caller(request.headers.get("authorization"))
        answer["reasons"] = list(state.reasons)
        answer["caller"] = {"tenant": caller.tenant, "operator": caller.is_operator}
    except ApiError:
        pass
    return JSONResponse(answer, 200 if state.is_ready else 503)


@router.get(
    "/metrics",
    responses={200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: CurrentService, caller: CurrentCaller) -> Response:
    """What Prometheus collects; for the operator."""
    require_operator(caller)
    return Response(await service.controller.metrics(), headers={"content-type": METRICS_TYPE})


@router.get("/v1/cluster", responses=answers("cluster", 403))
async def cluster(service: CurrentService, caller: CurrentCaller) -> dict[str, Any]:
    """Groups, workers, nodes and what they hold; for the operator."""
    require_operator(caller)
    view = await service.controller.cluster()
    return {"object": "cluster", **dataclasses.asdict(view)}


@router.get("/openapi.json", responses=answers("object"))
async def openapi(request: Request, caller: CurrentCaller) -> JSONResponse:
    """This interface as an OpenAPI document."""
    return JSONResponse(request.app.openapi())
