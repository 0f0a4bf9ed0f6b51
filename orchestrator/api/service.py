"""What all routes share: configuration, model, controller, callers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from longprefill.orchestrator.api.auth import Authenticator, Caller
from longprefill.orchestrator.api.body import Reader
from longprefill.orchestrator.api.errors import ApiError, invalid
from longprefill.orchestrator.api.guard import ByteBudget
from longprefill.orchestrator.api.link import PatientController
from longprefill.orchestrator.api.served_model import ServedModel
from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller.contract import UnknownJob

logger = logging.getLogger(__name__)

MAX_KEY_CHARACTERS = 200
MAX_JOB_CHARACTERS = 64
BODIES_AT_ONCE = 8
"""Bodies of the largest size that a process holds at once; smaller ones count by their bytes."""
LEFTOVER_S = 120.0
"""For what goes on after its request has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    config: ServiceConfig
    model: ServedModel
    controller: PatientController
    authenticator: Authenticator
    reader: Reader
    uploads: ByteBudget
    """Of prompts on the disk, and in memory until their jobs are accepted."""
    leftovers: set[asyncio.Task[None]] = field(default_factory=set)

    def finish_later(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        """Runs `work` to its end although the request that needs it is over."""

        async def run() -> None:
            try:
                async with asyncio.timeout(LEFTOVER_S):
                    await work
            except (ApiError, UnknownJob, TimeoutError) as error:
                logger.warning("%s: %s", what, error)

        task = asyncio.get_running_loop().create_task(run())
        self.leftovers.add(task)
        task.add_done_callback(self.leftovers.discard)


def make_service(config: ServiceConfig, model: ServedModel, controller: PatientController) -> Service:
    """The service of one process."""
    return Service(
        config=config,
        model=model,
        controller=controller,
        authenticator=Authenticator(config.keys),
        reader=Reader(ByteBudget(BODIES_AT_ONCE * config.service.max_body_bytes)),
        uploads=ByteBudget(BODIES_AT_ONCE * config.service.max_upload_bytes),
    )


bearer = HTTPBearer(auto_error=False, description="A tenant's API key, made with `longprefill key TENANT`.")


def service_of(request: Request) -> Service:
    return request.app.state.service


def caller_of(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None) -> Caller:
    """Raises ApiError (401) without a known key."""
    return service_of(request).authenticator.caller(request.headers.get("authorization"))


CurrentService = Annotated[Service, Depends(service_of)]
CurrentCaller = Annotated[Caller, Depends(caller_of)]


def idempotency_key(request: Request) -> str | None:
    """The Idempotency-Key header.

    Raises:
        ApiError: 400, too long, empty, or not printable.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii() and key.isprintable()):
        raise invalid(
            f"idempotency-key={key[:40]!r}: use 1 to {MAX_KEY_CHARACTERS} printable ASCII characters",
            param="idempotency-key",
        )
    return key


def sampling_seed(seed: int | None, temperature: float, key: str | None) -> int:
    """The seed of a request: as given, and without one a random one; the same again for the same idempotency key."""
    if seed is not None:
        return seed % 2**64
    if temperature == 0:
        return 0
    if key is not None:
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return secrets.randbits(64)


def known_job(job: str) -> str:
    """The id, if it can be one.

    Raises:
        UnknownJob: it cannot.
    """
    if len(job) > MAX_JOB_CHARACTERS or not job.isascii() or not job.isprintable():
        raise UnknownJob(f"there is no job {job[:MAX_JOB_CHARACTERS]!r}")
    return job
