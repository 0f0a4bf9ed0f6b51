"""What requests may say: the bodies of completions, chat and prefill jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema, model_validator

from longprefill.orchestrator.api.errors import invalid
from longprefill.orchestrator.api.unsupported import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    Neutral,
    schema_of,
    without_neutral,
)
from longprefill.orchestrator.job import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)

MAX_PROMPTS = 16
"""Prompts of one completions request; each is a job."""
MAX_MESSAGES = 4096
MAX_TOKEN = 2**31 - 1
MAX_STOP_TOKENS = 64
MAX_CHAT_LOGPROBS = 20

Prompt = str | np.ndarray
"""Text, or token ids int32 [T]."""


def prompt_schema(vocab_size: int = MAX_TOKEN + 1, max_tokens: int | None = None) -> dict[str, Any]:
    """JSON schema of a prompt."""
    ids: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    ids |= {"minItems": 1} | ({} if max_tokens is None else {"maxItems": max_tokens})
    return {"anyOf": [{"type": "string", "minLength": 1}, ids]}


def prompts_schema(vocab_size: int = MAX_TOKEN + 1, max_tokens: int | None = None) -> dict[str, Any]:
    """JSON schema of one or several prompts."""
    single = prompt_schema(vocab_size, max_tokens)["anyOf"]
    several = [{"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_PROMPTS} for kind in single]
    return {"anyOf": [*single, *several]}


def one_prompt(value: object) -> Prompt:
    """Text or token ids as JSON has them."""
    if isinstance(value, str):
        if not value:
            raise ValueError("it is empty: give at least one token")
        return value
    if not isinstance(value, list):
        raise ValueError("give a text or a list of token ids")
    if not value:
        raise ValueError("it is empty: give at least one token")
    for item in value:
        if type(item) is not int:
            raise ValueError(f"a list of token ids holds {str(item)[:40]!r}: token ids are whole numbers")
    if min(value) < 0 or max(value) > MAX_TOKEN:
        raise ValueError(f"a token id is outside of 0 to {MAX_TOKEN}")
    return np.asarray(value, dtype=np.int32)


def several_prompts(value: object) -> tuple[Prompt, ...]:
    """As OpenAI has them: a text, texts, token ids, lists of token ids."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"{len(value)} prompts: use at most {MAX_PROMPTS} in one request")
        if any(type(item) is not type(value[0]) for item in value):
            raise ValueError("prompts are all texts or all lists of token ids")
        return tuple(one_prompt(item) for item in value)
    return (one_prompt(value),)


def _extra(neutral: Mapping[str, Neutral]) -> Callable[[dict[str, Any]], None]:
    def add(schema: dict[str, Any]) -> None:
        schema["properties"] |= schema_of(neutral)

    return add


StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
StopTokens = Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
MaxTokens = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class Parameters(BaseModel):
    """Strict: a number in quotes is not a number, and what is not known is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True)


class StreamOptions(Parameters):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored."""


class Generation(Parameters):
    """What completions and chat have in common; the defaults are OpenAI's."""

    model: Annotated[str, Field(max_length=1024)]
    n: Samples | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionParameters(Generation):
    model_config = ConfigDict(json_schema_extra=_extra(COMPLETION_NEUTRAL))

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(several_prompts), WithJsonSchema(prompts_schema())]
    max_tokens: MaxTokens | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return without_neutral(given, COMPLETION_NEUTRAL)

    def check_together(self) -> None:
        """Raises ApiError (400) for values that exclude each other."""
        if self.echo and self.logprobs is not None:
            message = "echo with logprobs is not supported: the prompt's log-probabilities are not computed"
            raise invalid(message, param="echo", code="unsupported_parameter")


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Further fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        text = self.content
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        return {**(self.model_extra or {}), "role": self.role, "content": text or ""}


class ChatParameters(Generation):
    model_config = ConfigDict(json_schema_extra=_extra(CHAT_NEUTRAL))

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return without_neutral(given, CHAT_NEUTRAL)

    def check_together(self) -> None:
        """Raises ApiError (400) for values that exclude each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs = true", param="top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class JobOptions(Parameters):
    """Of a prefill job, apart from its prompt; the defaults are the command line's: prefill only, greedy."""

    max_new_tokens: MaxTokens = 0
    num_samples: Samples = 1
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    stop: StopTexts = []
    stop_token_ids: StopTokens = []
    num_logprobs: Logprobs | None = None
    timeout_s: Seconds | None = None
    deadline_s: Seconds | None = None
    priority: Annotated[float, Field(gt=0, le=MAX_PRIORITY)] = 1.0
    keep_snapshot: bool = False


class JobParameters(JobOptions):
    prompt: Annotated[Prompt, PlainValidator(one_prompt), WithJsonSchema(prompt_schema())]
