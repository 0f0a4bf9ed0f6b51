"""The jobs behind one request for completions: submitted together, read together, ended together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import numpy as np

from longprefill.orchestrator.api.auth import Caller
from longprefill.orchestrator.api.errors import NO_RETRY, JobFailed, as_api_error
from longprefill.orchestrator.api.parameters import Generation as Parameters
from longprefill.orchestrator.api.parameters import Prompt
from longprefill.orchestrator.api.service import Service, sampling_seed
from longprefill.orchestrator.api.streams import HEARTBEAT_S
from longprefill.orchestrator.controller.contract import Busy
from longprefill.orchestrator.job import JobRequest, JobState, TokenRecord
from longprefill.partition.errors import UserError

QUEUE_RECORDS = 256
GRACE_S = 60.0
"""The controller ends a job at its timeout; this much later the request ends whatever the controller does."""


class Piece(NamedTuple):
    """What became known of a choice."""

    choice: int
    record: TokenRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request asks of each of its prompts."""

    max_tokens: int | None
    max_tokens_name: str
    default_max_tokens: int
    num_logprobs: int | None


class Generation:
    """Choices are numbered prompt by prompt, and within one sample by sample."""

    def __init__(self, service: Service, caller: Caller, num_samples: int, *, may_return: bool) -> None:
        self._service = service
        self._caller = caller
        self._num_samples = num_samples
        self._may_return = may_return
        self.jobs: list[str] = []
        self.prompts: list[np.ndarray] = []
        self.max_new_tokens: list[int] = []
        self._open: set[str] = set()

    @property
    def num_choices(self) -> int:
        return len(self.jobs) * self._num_samples

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens_T.size for tokens_T in self.prompts)

    async def submit(self, prompts: Sequence[Prompt], parameters: Parameters, wanted: Wanted, key: str | None) -> None:
        """All of the prompts, or none. A client with a key that may ask again finds there what has begun.

        Raises:
            ApiError: as the controller refuses one of them.
        """
        service = self._service
        async with service.reader.slots:
            self.prompts = await asyncio.to_thread(lambda: [service.model.tokens_of(prompt) for prompt in prompts])
        temperature = 1.0 if parameters.temperature is None else parameters.temperature
        earlier: set[str] = set()  # other requests with this key may wait for them
        try:
            requests = [
                JobRequest(
                    tenant=self._caller.tenant,
                    max_new_tokens=service.model.new_tokens(
                        wanted.max_tokens, wanted.default_max_tokens, tokens_T.size, wanted.max_tokens_name
                    ),
                    num_samples=self._num_samples,
                    temperature=temperature,
                    top_p=1.0 if parameters.top_p is None else parameters.top_p,
                    seed=sampling_seed(parameters.seed, temperature, key),
                    stop=parameters.stops,
                    stop_token_ids=tuple(parameters.stop_token_ids or ()),
                    num_logprobs=wanted.num_logprobs,
                    timeout_s=service.config.service.request_timeout_s,
                    idempotency_key=key if key is None or len(prompts) == 1 else f"{key}/{number}",
                )
                for number, tokens_T in enumerate(self.prompts)
            ]
            self.max_new_tokens = [request.max_new_tokens for request in requests]
            for request, tokens_T in zip(requests, self.prompts, strict=True):
                submission = await service.controller.submit(request, tokens_T)
                self.jobs.append(submission.job)
                self._open.add(submission.job)
                if not submission.is_new:
                    earlier.add(submission.job)
        except BaseException as error:
            if key is None:
                self.abandon(always=True)
            elif isinstance(error, UserError) and not isinstance(error, Busy):  # asked again it is refused again
                self._open -= earlier
                self.abandon(always=True)
            if isinstance(error, UserError):
                raise as_api_error(error) from None
            raise

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Everything that is generated, in the order in which it comes; the end is every choice's end.

        Raises:
            JobFailed: a job failed or was cancelled.
        """
        if len(self.jobs) == 1:
            async for piece in self._pieces_of(0):
                yield piece
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(QUEUE_RECORDS)

        async def pump(number: int) -> None:
            try:
                async for piece in self._pieces_of(number):
                    await queue.put(piece)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - it is raised where the queue is read
                await queue.put(error)

        tasks = [asyncio.create_task(pump(number)) for number in range(len(self.jobs))]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _pieces_of(self, number: int) -> AsyncGenerator[Piece, None]:
        job, cursor, num_open = self.jobs[number], 0, self._num_samples
        first_choice = number * self._num_samples
        longest_s = self._service.config.service.request_timeout_s + GRACE_S
        deadline = asyncio.get_running_loop().time() + longest_s
        if self.max_new_tokens[number] == 0:
            num_open = 1  # nothing will come, but the prefill is waited for
        while num_open:
            try:
                batch = await self._service.controller.tokens(
                    job, self._caller.scope, after=cursor, timeout_s=HEARTBEAT_S
                )
            except UserError as error:
                raise as_api_error(error) from None
            for record in batch.records:
                num_open -= record.finish_reason is not None
                yield Piece(first_choice + record.sample, record)
            cursor = batch.cursor
            if asyncio.get_running_loop().time() > deadline:
                raise JobFailed(504, f"the job did not end within {longest_s:g} s", code="timeout", headers=NO_RETRY)
            if batch.state.is_final and not batch.records:
                self._open.discard(job)
                if batch.state is not JobState.DONE:
                    raise _failure(batch.state, batch.reason)
                return
        self._open.discard(job)

    async def collect(self) -> tuple[list[list[TokenRecord]], dict[str, Any]]:
        """Everything that is generated, by choice, and the usage. Who stops waiting abandons the jobs.

        Raises:
            ApiError: as `pieces` and `usage`.
        """
        records: list[list[TokenRecord]] = [[] for _ in range(self.num_choices)]
        try:
            async for choice, record in self.pieces():
                records[choice].append(record)
            return records, await self.usage(sum(map(len, records)))
        except BaseException as error:
            self.abandon(always=isinstance(error, JobFailed))
            raise

    async def usage(self, num_tokens: int) -> dict[str, Any]:
        """As OpenAI reports it.

        Raises:
            ApiError: a job is not known any more, or the controller stays away.
        """
        try:
            views = [await self._service.controller.inspect(job, self._caller.scope) for job in self.jobs]
        except UserError as error:
            raise as_api_error(error) from None
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(view.cached_tokens for view in views)},
        }

    def abandon(self, *, always: bool = False) -> None:
        """The client is gone, or the request failed: ends the jobs that still run, unless they are to go on. `always`:
        one of them failed, so nobody will get their answer. Nothing happens when all have ended."""
        goes_on = self._may_return or self._service.config.service.on_disconnect == "continue"
        if goes_on and not always:
            return
        for job in self._open:
            self._service.finish_later(
                self._service.controller.cancel(job, self._caller.scope), f"job {job} was abandoned and not cancelled"
            )
        self._open.clear()


def _failure(state: JobState, reason: str | None) -> JobFailed:
    if state is JobState.CANCELLED:
        return JobFailed(409, f"the job was cancelled: {reason or 'by its owner'}", code="cancelled", headers=NO_RETRY)
    return JobFailed(503, f"the job failed: {reason or 'no reason given'}", code="job_failed", headers=NO_RETRY)
