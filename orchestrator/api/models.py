"""/v1/models: the one model that this service has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from longprefill.orchestrator.api.errors import ApiError
from longprefill.orchestrator.api.openapi import answers
from longprefill.orchestrator.api.served_model import ServedModel
from longprefill.orchestrator.api.service import CurrentCaller, CurrentService

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=answers("list"))
async def list_models(service: CurrentService, caller: CurrentCaller) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(service.model)]}


@router.get("/v1/models/{model:path}", responses=answers("model", 404))
async def read_model(model: str, service: CurrentService, caller: CurrentCaller) -> dict[str, Any]:
    """The model of this name."""
    check_model(service.model, model)
    return _model(service.model)


def check_model(served: ServedModel, name: str) -> None:
    """Raises ApiError (404, model_not_found) for any model but the served one."""
    if name != served.name:
        raise ApiError(
            404,
            f"the model {name[:80]!r} does not exist here: this service has {served.name!r}",
            code="model_not_found",
            param="model",
        )


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "longprefill",
        "max_model_len": model.max_tokens,
    }
