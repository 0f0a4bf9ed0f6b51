"""The OpenAPI document: bodies are read by hand (body.py), so they are described by hand too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from longprefill.orchestrator.api.parameters import (
    ChatParameters,
    CompletionParameters,
    JobOptions,
    JobParameters,
    prompt_schema,
    prompts_schema,
)

if TYPE_CHECKING:
    from longprefill.orchestrator.api.service import Service

BODIES: tuple[type[BaseModel], ...] = (CompletionParameters, ChatParameters, JobOptions, JobParameters)
REFERENCE = "#/components/schemas/{model}"
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
ERROR: dict[str, Any] = {
    "description": "Refused, in OpenAI's shape.",
    "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}},
}
STREAM: dict[str, Any] = {"text/event-stream": {}}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": STREAM},
    204: {"description": "Nothing is left to come."},
}
METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")


def object_schema(name: str) -> dict[str, Any]:
    """An object of OpenAI's kind: it names itself."""
    if name == "object":
        return {"type": "object"}
    return {"type": "object", "required": ["object"], "properties": {"object": {"const": name}}}


def answers(name: str | None, *refusals: int) -> dict[int | str, dict[str, Any]]:
    """What a route answers: an object of this name, and these refusals beside those that every route may answer."""
    found: dict[int | str, dict[str, Any]] = dict.fromkeys(refusals, ERROR)
    if name is not None:
        found[200] = {"description": "OK", "content": {"application/json": {"schema": object_schema(name)}}}
    if name == "prefill.job":
        found[202] = found[200] | {"description": "Accepted: the job is on disk."}
    return found


def stream_or_json(name: str) -> dict[int | str, dict[str, Any]]:
    """A completion, whole or piece by piece."""
    content = {"application/json": {"schema": object_schema(name)}, **STREAM}
    return {200: {"description": "OK", "content": content}, **dict.fromkeys((404, 409, 413, 415, 422), ERROR)}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """A JSON body."""
    schema = {"$ref": REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def job_body() -> dict[str, Any]:
    """A job's prompt and options as JSON, or an upload."""
    body = body_of(JobParameters)
    form = {
        "type": "object",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {
            "prompt": {"type": "string", "minLength": 1, "description": "A file of text, or NAME.npy of token ids."},
            "options": {"$ref": REFERENCE.format(model=JobOptions.__name__)},
        },
    }
    npy = {"type": "string", "format": "binary", "description": "Token ids; application/octet-stream will do too."}
    text = {"type": "string", "minLength": 1, "description": "UTF-8 text; options are query parameters."}
    body["requestBody"]["content"] |= {
        "text/plain": {"schema": text},
        "application/x-npy": {"schema": npy},
        "multipart/form-data": {"schema": form, "encoding": {"options": {"contentType": "application/json"}}},
    }
    return body


def describe(app: FastAPI, service: Service) -> dict[str, Any]:
    """The document of all routes of `app`, with the limits of its model and configuration."""
    needs_key = service.authenticator.needs_key
    document = get_openapi(
        title="longprefill",
        version=version("longprefill"),
        description="Prefill of very long prompts, and what comes after it.",
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # FastAPI's own: this service answers 400 in OpenAI's shape
    _, described = models_json_schema([(model, "validation") for model in BODIES], ref_template=REFERENCE)
    schemas |= described["$defs"] | {"Error": ERROR_SCHEMA}
    _limit(schemas, service)
    for path in document["paths"].values():
        for method, operation in path.items():
            if method in METHODS:
                _complete(operation, needs_key=needs_key)
    if not needs_key:
        document["components"].pop("securitySchemes", None)
    return document


def _limit(schemas: dict[str, Any], service: Service) -> None:
    """Puts in what the types cannot know."""
    model = service.model
    most = min(model.max_new_tokens, model.max_tokens - 1)
    limits = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), most),
        "timeout_s": service.config.service.request_timeout_s,
    }
    for name in (kind.__name__ for kind in BODIES):
        properties = schemas[name]["properties"]
        for limited in limits.keys() & properties.keys():
            schema = properties[limited]
            schema.get("anyOf", [schema])[0]["maximum"] = limits[limited]
        if "prompt" in properties:
            describe_prompt = prompts_schema if name == CompletionParameters.__name__ else prompt_schema
            properties["prompt"] = describe_prompt(model.vocab_size, model.max_prompt_tokens)


def _complete(operation: dict[str, Any], *, needs_key: bool) -> None:
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    if "202" in responses and "201" not in responses:
        responses["202"].setdefault("content", responses["200"]["content"])
    if needs_key and "security" in operation:
        responses["401"] = ERROR
    if not needs_key:
        operation.pop("security", None)
    responses.setdefault("4XX", ERROR)
    responses.setdefault("5XX", ERROR)


def methods_of(document: Mapping[str, Any], path: str) -> list[str]:
    """The methods that a path has, for the header Allow."""
    found: set[str] = set()
    for template, operations in document["paths"].items():
        pattern = re.sub(r"\\\{model\\\}", ".+", re.escape(template))
        pattern = re.sub(r"\\\{[a-z_]+\\\}", "[^/]+", pattern)
        if re.fullmatch(pattern, path):
            found |= {method.upper() for method in operations if method in METHODS}
    return sorted(found)
