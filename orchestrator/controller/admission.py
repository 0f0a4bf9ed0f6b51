"""Whether a job is taken: checks that need no disk, in the order in which a client can do something about them."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from longprefill.orchestrator.controller.contract import Busy, Infeasible
from longprefill.orchestrator.controller.core import Core
from longprefill.orchestrator.job import JobRequest
from longprefill.orchestrator.journal.schema import request_text
from longprefill.orchestrator.plan import check_prompt_length
from longprefill.partition.errors import PromptError, UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.tokenizer import check_prompt

MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0


def fingerprint(request: JobRequest, tokens_T: np.ndarray) -> str:
    """What an idempotency key stands for."""
    digest = hashlib.sha256(request_text(dataclasses.replace(request, idempotency_key=None)).encode())
    digest.update(np.ascontiguousarray(tokens_T, dtype="<i4").tobytes())
    return digest.hexdigest()


def check_request(core: Core, request: JobRequest, tokens_T: np.ndarray) -> None:
    """Refuses what this service can never do.

    Raises:
        PromptError: the model cannot take the prompt.
        UserError: beyond a limit of the configuration.
        Infeasible: no group or worker can hold it.
    """
    service, model = core.config.service, core.model
    if tokens_T.ndim != 1 or not np.issubdtype(tokens_T.dtype, np.integer):
        raise PromptError(f"a prompt is a list of integer token ids, got {tokens_T.dtype} with shape {tokens_T.shape}")
    check_prompt(tokens_T, model)
    check_prompt_length(model, len(tokens_T), request.max_new_tokens)
    if service.max_prompt_tokens is not None and len(tokens_T) > service.max_prompt_tokens:
        raise PromptError(
            f"the prompt has {len(tokens_T)} tokens: this service takes at most {service.max_prompt_tokens}"
        )
    if request.max_new_tokens > service.max_new_tokens:
        raise UserError(f"max_tokens={request.max_new_tokens}: this service generates at most {service.max_new_tokens}")
    if request.timeout_s is not None and request.timeout_s > service.request_timeout_s:
        raise UserError(f"timeout_s={request.timeout_s:g}: this service allows at most {service.request_timeout_s:g}")
    if request.stop and core.tokenizer is None:
        raise UserError("stop: this model has no tokenizer.json: use stop_token_ids")
    outside = [token for token in request.stop_token_ids if not 0 <= token < model.vocab_size]
    if outside:
        raise UserError(f"stop_token_ids: {outside[0]} is outside of the vocabulary of {model.vocab_size}")
    _check_capacity(core, request, len(tokens_T))


def _check_capacity(core: Core, request: JobRequest, num_tokens: int) -> None:
    most = core.config.prefill[0].max_tokens
    if num_tokens > most:
        raise Infeasible(
            f"the prompt has {num_tokens} tokens and a prefill group of this service holds {most}: shorten it, or "
            "raise max_tokens of the [[prefill]] pools"
        )
    if request.max_new_tokens == 0:
        return
    if not core.config.decode:
        raise Infeasible(
            f"max_tokens={request.max_new_tokens}: this service has no decode workers, it only prefills: use 0"
        )
    pages = _pages(num_tokens) + request.num_samples * _pages(request.max_new_tokens)
    holds = max(pool.max_tokens for pool in core.config.decode)
    if pages > _pages(holds) + request.num_samples:  # a page of its own for every sample's ragged end
        raise Infeasible(
            f"the prompt's {num_tokens} tokens and n={request.num_samples} times max_tokens={request.max_new_tokens} "
            f"exceed the {holds} tokens that a decode worker of this service holds: ask for less"
        )


def check_queue(core: Core, request: JobRequest, num_reserved: int, num_reserved_of_tenant: int) -> None:
    """Refuses what there is no room for now. `num_reserved`: jobs that are being written to disk.

    Raises:
        Busy: the queue or the tenant's share of it is full.
    """
    most, own = core.config.service.max_queued, core.config.tenant_limit(request.tenant)
    num_queued = core.num_queued() + num_reserved
    if num_queued >= most:
        raise Busy(f"{num_queued} jobs wait, max_queued={most}: ask again later", retry_after_s(core))
    num_own = core.num_queued(request.tenant) + num_reserved_of_tenant
    if num_own >= own:
        raise Busy(
            f"{num_own} jobs of tenant {request.tenant} wait, the limit is {own}: ask again later", retry_after_s(core)
        )


def retry_after_s(core: Core) -> float:
    """Until about a tenth of the queue has gone."""
    outlook = core.outlook()
    if not outlook:
        return MIN_RETRY_S
    starts = sorted(view.start_s for view in outlook.values())
    return min(max(math.ceil(starts[len(starts) // 10]), MIN_RETRY_S), MAX_RETRY_S)


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
