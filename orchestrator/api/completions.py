"""/v1/completions: one or several prompts continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from longprefill.orchestrator.api.errors import ApiError, JobFailed
from longprefill.orchestrator.api.generation import Generation, Piece, Wanted
from longprefill.orchestrator.api.models import check_model
from longprefill.orchestrator.api.openapi import body_of, stream_or_json
from longprefill.orchestrator.api.parameters import CompletionParameters
from longprefill.orchestrator.api.served_model import ServedModel
from longprefill.orchestrator.api.service import CurrentCaller, CurrentService, idempotency_key
from longprefill.orchestrator.api.streams import DONE, EventStream, event, while_connected
from longprefill.orchestrator.job import TokenRecord

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
CLIENT_CLOSED = 499
"""Nobody reads it."""

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/completions", openapi_extra=body_of(CompletionParameters), responses=stream_or_json("text_completion")
)
async def create_completion(request: Request, service: CurrentService, caller: CurrentCaller) -> Response:
    """Continues prompts given as text or token ids; `stream` sends server-sent events."""
    parameters = await service.reader.read(request, CompletionParameters)
    check_model(service.model, parameters.model)
    parameters.check_together()
    key = idempotency_key(request)
    generation = Generation(service, caller, parameters.n or 1, may_return=key is not None)
    wanted = Wanted(
        max_tokens=parameters.max_tokens,
        max_tokens_name="max_tokens",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=parameters.logprobs,
    )
    await generation.submit(parameters.prompt, parameters, wanted, key)
    answer = _Answer(service.model, parameters, generation)
    if parameters.stream:
        return EventStream(answer.stream(), at_end=generation.abandon)
    whole = await while_connected(request, answer.whole())
    return Response(status_code=CLIENT_CLOSED) if whole is None else JSONResponse(whole)


class _Answer:
    def __init__(self, model: ServedModel, parameters: CompletionParameters, generation: Generation) -> None:
        self._model = model
        self._parameters = parameters
        self._generation = generation
        self._head = {
            "id": f"cmpl-{generation.jobs[0]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._lengths = [0] * generation.num_choices
        """Characters so far, for the offsets beside log-probabilities, which do not come with an echo."""

    async def whole(self) -> dict[str, Any]:
        records, usage = await self._generation.collect()
        choices = []
        for number, (echo, own) in enumerate(zip(await self._echoes(), records, strict=True)):
            text = "".join(record.text for record in own)
            finish_reason = (own[-1].finish_reason if own else None) or "length"
            choices.append(self._choice(number, echo + text, own, finish_reason))
        return self._head | {"choices": choices, "usage": usage}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        num_tokens = 0
        try:
            for number, echo in enumerate(await self._echoes()):
                if echo:
                    yield self._chunk(self._choice(number, echo, [], None))
            seen: set[int] = set()
            async for piece in self._generation.pieces():
                num_tokens += 1
                if piece.record.finish_reason is not None:
                    seen.add(piece.choice)
                if self._says_something(piece):
                    record = piece.record
                    yield self._chunk(self._choice(piece.choice, record.text, [record], record.finish_reason))
            for number in set(range(self._generation.num_choices)) - seen:  # nothing was to be generated
                yield self._chunk(self._choice(number, "", [], "length"))
            if self._parameters.includes_usage:
                yield event(self._head | {"choices": [], "usage": await self._generation.usage(num_tokens)})
            yield DONE
        except ApiError as error:
            self._generation.abandon(always=isinstance(error, JobFailed))
            yield event(error.body)

    async def _echoes(self) -> list[str]:
        """What comes before each choice. The text of a long prompt takes a while: it is made beside the event loop."""
        prompts = self._generation.prompts
        num_samples = self._generation.num_choices // len(prompts)
        if not self._parameters.echo:
            return [""] * self._generation.num_choices
        texts = await asyncio.to_thread(lambda: [self._model.text_of(tokens_T) for tokens_T in prompts])
        return [text for text in texts for _ in range(num_samples)]

    def _says_something(self, piece: Piece) -> bool:
        record = piece.record
        return bool(record.text) or record.finish_reason is not None or self._parameters.logprobs is not None

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._parameters.includes_usage else {}
        return event(self._head | {"choices": [choice]} | usage)

    def _choice(self, number: int, text: str, own: list[TokenRecord], finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": number,
            "text": text,
            "logprobs": self._logprobs(number, own) if self._parameters.logprobs is not None else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, number: int, own: list[TokenRecord]) -> dict[str, Any]:
        """The legacy form: parallel lists."""
        offsets = []
        for record in own:
            offsets.append(self._lengths[number])
            self._lengths[number] += len(record.text)
        return {
            "tokens": [self._model.piece(record.token)[0] for record in own],
            "token_logprobs": [finite(record.logprob) for record in own],
            "top_logprobs": [
                {self._model.piece(token)[0]: finite(value) for token, value in record.top_logprobs} for record in own
            ]
            if self._parameters.logprobs
            else None,
            "text_offset": offsets,
        }


LEAST_LOGPROB = -9999.0
"""What OpenAI reports for tokens that cannot come; JSON has no infinity."""


def finite(logprob: float | None) -> float | None:
    """A log-probability that JSON can hold."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
