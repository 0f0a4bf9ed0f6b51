"""/v1/chat/completions: messages through the model's chat template, then as completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from longprefill.orchestrator.api.completions import CLIENT_CLOSED, finite
from longprefill.orchestrator.api.errors import ApiError, JobFailed, invalid
from longprefill.orchestrator.api.generation import Generation, Wanted
from longprefill.orchestrator.api.models import check_model
from longprefill.orchestrator.api.openapi import body_of, stream_or_json
from longprefill.orchestrator.api.parameters import ChatParameters
from longprefill.orchestrator.api.served_model import NO_TOKENIZER, ServedModel
from longprefill.orchestrator.api.service import CurrentCaller, CurrentService, idempotency_key
from longprefill.orchestrator.api.streams import DONE, EventStream, event, while_connected
from longprefill.orchestrator.api.templates import NO_TEMPLATE
from longprefill.orchestrator.job import TokenRecord

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatParameters), responses=stream_or_json("chat.completion"))
async def create_chat_completion(request: Request, service: CurrentService, caller: CurrentCaller) -> Response:
    """The assistant's next turn; `stream` sends server-sent events."""
    parameters = await service.reader.read(request, ChatParameters)
    check_model(service.model, parameters.model)
    parameters.check_together()
    key = idempotency_key(request)
    prompt = await _prompt(service.model, parameters)
    generation = Generation(service, caller, parameters.n or 1, may_return=key is not None)
    is_old_name = parameters.max_completion_tokens is None
    wanted = Wanted(
        max_tokens=parameters.max_tokens if is_old_name else parameters.max_completion_tokens,
        max_tokens_name="max_tokens" if is_old_name else "max_completion_tokens",
        default_max_tokens=service.model.max_new_tokens,
        num_logprobs=parameters.num_logprobs,
    )
    await generation.submit([prompt], parameters, wanted, key)
    answer = _Answer(service.model, parameters, generation)
    if parameters.stream:
        return EventStream(answer.stream(), at_end=generation.abandon)
    whole = await while_connected(request, answer.whole())
    return Response(status_code=CLIENT_CLOSED) if whole is None else JSONResponse(whole)


async def _prompt(model: ServedModel, parameters: ChatParameters) -> str:
    if model.template is None:
        raise invalid(NO_TEMPLATE, param="messages", code="no_chat_template")
    if model.tokenizer is None:
        raise invalid(NO_TOKENIZER, param="messages")
    messages = [message.for_template() for message in parameters.messages]
    prompt = await asyncio.to_thread(model.template.render, messages)
    if not prompt:
        raise invalid("the model's chat template makes an empty prompt of these messages", param="messages")
    return prompt


class _Answer:
    def __init__(self, model: ServedModel, parameters: ChatParameters, generation: Generation) -> None:
        self._model = model
        self._parameters = parameters
        self._generation = generation
        self._head = {
            "id": f"chatcmpl-{generation.jobs[0]}",
            "object": "chat.completion.chunk" if parameters.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self) -> dict[str, Any]:
        records, usage = await self._generation.collect()
        choices = [
            {
                "index": number,
                "message": {
                    "role": "assistant",
                    "content": "".join(record.text for record in own),
                    "refusal": None,
                },
                "logprobs": self._logprobs(own),
                "finish_reason": (own[-1].finish_reason if own else None) or "length",
            }
            for number, own in enumerate(records)
        ]
        return self._head | {"choices": choices, "usage": usage}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        num_tokens = 0
        try:
            for number in range(self._generation.num_choices):
                yield self._chunk(number, {"role": "assistant", "content": ""})
            seen: set[int] = set()
            async for choice, record in self._generation.pieces():
                num_tokens += 1
                if record.text or self._parameters.logprobs:
                    yield self._chunk(choice, {"content": record.text}, [record])
                if record.finish_reason is not None:
                    seen.add(choice)
                    yield self._chunk(choice, {}, finish_reason=record.finish_reason)
            for number in set(range(self._generation.num_choices)) - seen:  # nothing was to be generated
                yield self._chunk(number, {}, finish_reason="length")
            if self._parameters.includes_usage:
                yield event(self._head | {"choices": [], "usage": await self._generation.usage(num_tokens)})
            yield DONE
        except ApiError as error:
            self._generation.abandon(always=isinstance(error, JobFailed))
            yield event(error.body)

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        own: list[TokenRecord] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": self._logprobs(own) if own else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._parameters.includes_usage else {}
        return event(self._head | {"choices": [choice]} | usage)

    def _logprobs(self, own: list[TokenRecord]) -> dict[str, Any] | None:
        if not self._parameters.logprobs:
            return None
        content = [
            self._logprob(record.token, record.logprob)
            | {"top_logprobs": [self._logprob(token, value) for token, value in record.top_logprobs]}
            for record in own
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, value: float | None) -> dict[str, Any]:
        text, code = self._model.piece(token)
        return {"token": text, "logprob": finite(value), "bytes": code}
