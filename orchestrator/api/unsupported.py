"""Parameters of OpenAI's interface that this service does not have: refused where they would change the result, and
left alone where they would not. docs/guide/service.md lists them; a test compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longprefill.orchestrator.api.errors import ApiError

Neutral = tuple[object, ...]

SAMPLING_NEUTRAL: Mapping[str, Neutral] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
}
"""By name: the values that leave the result as it is. null is one of them: clients send it
for "not given"."""
COMPLETION_NEUTRAL: Mapping[str, Neutral] = {**SAMPLING_NEUTRAL, "suffix": (None, ""), "best_of": (None, 1)}
CHAT_NEUTRAL: Mapping[str, Neutral] = {
    **SAMPLING_NEUTRAL,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
"""Taken and not looked at: whatever they say, the tokens are the same."""


def without_neutral(given: Mapping[str, Any], neutral: Mapping[str, Neutral]) -> dict[str, Any]:
    """The parameters that are left to look at.

    Raises:
        ApiError: 400, a parameter that this service does not have and that would change the result.
    """
    for name, values in neutral.items():
        if name in given and not any(_same(given[name], value) for value in values):
            allowed = " or ".join(_spelled(value) for value in values if value is not None)
            raise ApiError(
                400,
                f"{name} is not supported by this service: leave it out{f' or use {allowed}' if allowed else ''}",
                code="unsupported_parameter",
                param=name,
            )
    return {name: value for name, value in given.items() if name not in neutral and name not in IGNORED}


def schema_of(neutral: Mapping[str, Neutral]) -> dict[str, Any]:
    """JSON schema properties of these parameters."""
    refused = {
        name: {"enum": list(values), "description": "Not supported: only what leaves the result as it is."}
        for name, values in neutral.items()
    }
    return refused | {name: {"description": "Ignored: it cannot change the result."} for name in IGNORED}


def _same(given: object, value: object) -> bool:
    """Equal as JSON: 0 is 0.0, and false is not 0."""
    return isinstance(given, bool) == isinstance(value, bool) and given == value


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
