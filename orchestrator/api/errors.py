"""Refusals in the shape that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from longprefill.orchestrator.controller.contract import Busy, Conflict, Infeasible, NotReady, UnknownJob
from longprefill.partition.errors import PromptError, UserError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout",
}
"""All other refusals are the caller's: "invalid_request_error"."""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients ask again after 409 and 5xx; this tells them that the answer would be the same."""
MAX_MESSAGE_CHARACTERS = 500


class ApiError(Exception):
    """A refusal with its HTTP status. The message is one line: what, its value, what is allowed, what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        message = " ".join(str(self).split())
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]}..."
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class JobFailed(ApiError):
    """A job that ended as failed or cancelled under a request that waited for its tokens."""


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that this service cannot read or does not know: 400."""
    return ApiError(400, message, code=code, param=param)


def as_api_error(error: UserError) -> ApiError:
    """The controller's refusals by their HTTP status."""
    message = str(error)
    if isinstance(error, UnknownJob):
        return ApiError(404, message, code="job_not_found")
    if isinstance(error, Conflict):
        return ApiError(409, message, code="conflict", headers=NO_RETRY)
    if isinstance(error, Infeasible):
        return ApiError(409, message, code="infeasible", headers=NO_RETRY)
    if isinstance(error, NotReady):
        return unavailable(message)
    if isinstance(error, Busy):
        headers = {"retry-after": str(max(1, round(error.retry_after_s)))}
        if error.is_draining:
            return ApiError(503, message, code="draining", headers=headers)
        return ApiError(429, message, code="queue_full", headers=headers)
    if isinstance(error, PromptError):
        return ApiError(422, message, code="invalid_prompt", param="prompt")
    return ApiError(422, message, code="unprocessable")


def unavailable(message: str, *, retry_after_s: int = 2) -> ApiError:
    """The controller cannot be reached, or this process has its hands full: 503."""
    return ApiError(503, message, code="unavailable", headers={"retry-after": str(retry_after_s)})
