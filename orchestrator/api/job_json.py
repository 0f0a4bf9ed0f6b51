"""Jobs, events and tokens as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from longprefill.orchestrator.api.completions import finite
from longprefill.orchestrator.api.link import OWN_KEY
from longprefill.orchestrator.job import JobEvent, JobRequest, JobView, TokenRecord

REQUEST_FIELDS = (
    "max_new_tokens",
    "num_samples",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stop_token_ids",
    "num_logprobs",
    "timeout_s",
    "deadline_s",
    "priority",
    "keep_snapshot",
)


def job_json(view: JobView) -> dict[str, Any]:
    """All that its owner may know of a job, but what it generated (`/result`)."""
    return {
        "id": view.id,
        "object": "prefill.job",
        "tenant": view.tenant,
        "state": view.state.value,
        "reason": view.reason,
        "created_at": view.created_at,
        "started_at": view.started_at,
        "finished_at": view.finished_at,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "position": view.position,
        "num_steps": view.num_steps,
        "num_preemptions": view.num_preemptions,
        "num_attempts": view.num_attempts,
        "generated_tokens": sum(sample.num_tokens for sample in view.samples),
        "group": view.group,
        "decode_worker": view.decode_worker,
        "estimate": None if view.estimate is None else dataclasses.asdict(view.estimate),
        "timings": dataclasses.asdict(view.timings),
        "request": _request_json(view.request),
        "snapshot": view.snapshot,
    }


def _request_json(request: JobRequest) -> dict[str, Any]:
    given = dataclasses.asdict(request)
    key = request.idempotency_key
    shown = {name: given[name] for name in REQUEST_FIELDS}
    return shown | {"idempotency_key": None if key is None or key.startswith(OWN_KEY) else key}


def event_json(item: JobEvent) -> dict[str, Any]:
    return {"job": item.job, "number": item.number, "at": item.at, "kind": item.kind, "data": dict(item.data)}


def record_json(record: TokenRecord) -> dict[str, Any]:
    """A token, with what is known of it."""
    shown: dict[str, Any] = {
        "sample": record.sample,
        "index": record.index,
        "token": record.token,
        "text": record.text,
        "finish_reason": record.finish_reason,
    }
    if record.logprob is not None:
        shown["logprob"] = finite(record.logprob)
        shown["top_logprobs"] = [[token, finite(value)] for token, value in record.top_logprobs]
    return shown


def sample_json(number: int, records: Sequence[TokenRecord]) -> dict[str, Any]:
    """A sample: its text, its tokens, why it ended."""
    own = [record for record in records if record.sample == number]
    shown: dict[str, Any] = {
        "sample": number,
        "text": "".join(record.text for record in own),
        "token_ids": [record.token for record in own],
        "finish_reason": own[-1].finish_reason if own else None,
    }
    if any(record.logprob is not None for record in own):
        shown["logprobs"] = [finite(record.logprob) for record in own]
        shown["top_logprobs"] = [[[token, finite(value)] for token, value in record.top_logprobs] for record in own]
    return shown
