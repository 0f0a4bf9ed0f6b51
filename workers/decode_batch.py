"""Continuous batching: every iteration is one step with the next token of every running (job, sample).

A job's continuations share the whole pages of its prompt and have a copy of its partial one. Nobody's tokens depend on
who else is in the batch, but for the rounding of the matrix products. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.decode import DecodeRank, continuation_table
from longprefill.workers.sampling import DecodeFailure, DecodeToken, GenerateRequest, Sampling

logger = logging.getLogger(__name__)

FORCED_TOKENS = 256
"""Tokens that continuations which are taken up again may add to one iteration, beside one a sample."""
News = DecodeToken | DecodeFailure


@dataclass(kw_only=True)
class CommittedJob:
    """A verified job, its pages (all that its continuations may fill) and the room that was reserved for it."""

    job: int
    pages: Sequence[int]
    num_tokens: int
    max_new_tokens: int
    num_samples: int
    state: BoundaryState | None
    """None once every continuation has begun."""
    logits_V: torch.Tensor | None


@dataclass(kw_only=True)
class _Sample:
    """One continuation. `number` is its sequence in the DecodeRank; None before it runs and after its end."""

    job: int
    sample: int
    continuation: int
    sampling: Sampling
    num_logprobs: int | None
    num_generated: int
    to_run: deque[int]
    """Known tokens that must run before the next one can be sampled."""
    number: int | None = None
    finish_reason: str | None = None


@dataclass(kw_only=True)
class _Job:
    committed: CommittedJob
    samples: dict[int, _Sample] = field(default_factory=dict)


class DecodeBatch:
    """All jobs of a decode worker. At most `max_running` samples run at once; the others wait in order."""

    def __init__(self, decode: DecodeRank, *, max_running: int) -> None:
        self._decode = decode
        self._max_running = max_running
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Sample] = deque()
        self._running: list[_Sample] = []
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def take(self, committed: CommittedJob) -> None:
        """Keeps a job until it is dropped."""
        self._jobs[committed.job] = _Job(committed=committed)

    def progress(self, job: int) -> tuple[tuple[int, int, str | None], ...]:
        """(sample, tokens, finish reason) of the job's continuations; nothing of an unknown job. Any thread may ask."""
        found = self._jobs.get(job)
        samples = () if found is None else tuple(found.samples.values())
        return tuple((s.sample, s.num_generated, s.finish_reason) for s in samples)

    def generate(self, request: GenerateRequest) -> None:
        """Starts a job's continuations; they run from the next iteration on. A second request for a job is ignored.

        Raises:
            KeyError: the job is not here.
            UserError: more samples or tokens than were reserved.
        """
        job = self._jobs[request.job]
        if job.samples:
            return
        committed = job.committed
        if len(request.samples) > committed.num_samples:
            raise UserError(f"job {request.job}: {len(request.samples)} samples, reserved were {committed.num_samples}")
        samples: dict[int, _Sample] = {}
        for continuation, start in enumerate(request.samples):
            num_new = request.max_new_tokens - start.num_generated + len(start.forced)
            if num_new > committed.max_new_tokens:
                raise UserError(
                    f"job {request.job}: sample {start.sample} may add {num_new} tokens, reserved were "
                    f"{committed.max_new_tokens}"
                )
            samples[start.sample] = _Sample(
                job=request.job,
                sample=start.sample,
                continuation=continuation,
                sampling=Sampling(
                    max_new_tokens=request.max_new_tokens,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    seed=request.seed,
                    sample=start.sample,
                    stop_token_ids=request.stop_token_ids,
                ),
                num_logprobs=request.num_logprobs,
                num_generated=start.num_generated,
                to_run=deque(start.forced),
            )
        job.samples = samples
        self._waiting.extend(samples.values())

    def iterate(self) -> list[News]:
        """Samples a token of every running sample whose last one has run, then runs one step; what came of it."""
        while self._waiting and len(self._running) < self._max_running:
            self._begin(self._waiting.popleft())
        news: list[News] = []
        for sample in list(self._running):
            if sample.number is not None and not sample.to_run:  # another sample's failure may have ended it
                news += self._sampled(sample)
        budget = FORCED_TOKENS
        batch: list[tuple[_Sample, list[int]]] = []
        for sample in self._running:
            count = min(len(sample.to_run), 1 + budget)
            budget -= count - 1
            batch.append((sample, [sample.to_run[n] for n in range(count)]))
        return news + self._advanced(batch)

    def end_sample(self, job: int, sample: int) -> None:
        """No further token of it; an ended or unknown one stays as it is. KeyError: the job is not here."""
        found = self._jobs[job].samples.get(sample)
        if found is not None and found.finish_reason is None:
            self._end(found, "stop")

    def drop(self, job: int) -> None:
        """Forgets a job and all its continuations; its pages may be given to another. KeyError: it is not here."""
        for sample in self._jobs[job].samples.values():
            if sample.finish_reason is None:
                self._end(sample, "stop")
        del self._jobs[job]

    def _begin(self, sample: _Sample) -> None:
        committed = self._jobs[sample.job].committed
        sample.number, self._next_number = self._next_number, self._next_number + 1
        size = (committed.num_tokens, committed.max_new_tokens)
        table = continuation_table(committed.pages, *size, sample.continuation)
        if sample.continuation > 0 and committed.num_tokens % PAGE_TOKENS:
            # continuation 0 may have written behind the prompt there: what follows it is rewritten before it is read
            partial = committed.num_tokens // PAGE_TOKENS
            self._decode.copy_page(committed.pages[partial], table[partial])
        assert committed.state is not None
        assert committed.logits_V is not None
        self._decode.take(sample.number, table, committed.state, committed.logits_V, sum(size))
        self._running.append(sample)
        self._forget_start(sample.job)

    def _forget_start(self, job: int) -> None:
        """The states that continuations begin with are as large as those they go on with: kept while one needs them."""
        found = self._jobs[job]
        if not any(sample.number is None and sample.finish_reason is None for sample in found.samples.values()):
            found.committed.state = found.committed.logits_V = None

    def _sampled(self, sample: _Sample) -> list[News]:
        assert sample.number is not None
        try:
            token = self._decode.sample(sample.number, sample.sampling)
        except ValueError as error:  # broken logits: of this job, not of its neighbours
            return self._failed(sample.job, str(error))
        logprob, top = None, ()
        if sample.num_logprobs is not None:
            logits_V = self._decode.logits(sample.number)
            logprob, top = self._decode.rank.kernels.sampling.logprobs(
                logits_V, token=token, num_top=sample.num_logprobs
            )
        index, sample.num_generated = sample.num_generated, sample.num_generated + 1
        reason = None
        if token in sample.sampling.stop_token_ids:
            reason = "stop"
        elif sample.num_generated == sample.sampling.max_new_tokens:
            reason = "length"
        if reason is None:
            sample.to_run.append(token)
        else:
            self._end(sample, reason)
        return [
            DecodeToken(
                job=sample.job,
                sample=sample.sample,
                index=index,
                token=token,
                finish_reason=reason,
                logprob=logprob,
                top_logprobs=top,
            )
        ]

    def _advanced(self, batch: list[tuple[_Sample, list[int]]]) -> list[News]:
        """Runs one step. Where it fails, every sample runs alone, so that only those end that cannot go on."""
        batch = [(sample, tokens) for sample, tokens in batch if sample.number is not None]
        if not batch:
            return []
        try:
            self._decode.advance({_number(sample): tokens for sample, tokens in batch})
        except RuntimeError as error:  # torch's: out of memory, a kernel's refusal
            if len(batch) == 1:
                return self._failed(batch[0][0].job, str(error).splitlines()[0])
            logger.warning("a step of %d samples failed, each runs alone: %s", len(batch), error)
            return [entry for pair in batch for entry in self._advanced([pair])]
        for sample, tokens in batch:
            for _ in tokens:
                sample.to_run.popleft()
        return []

    def _failed(self, job: int, reason: str) -> list[News]:
        for sample in self._jobs[job].samples.values():
            if sample.finish_reason is None:
                self._end(sample, "error")
        return [DecodeFailure(job=job, reason=reason)]

    def _end(self, sample: _Sample, reason: str) -> None:
        sample.finish_reason = reason
        sample.to_run.clear()
        if sample.number is None:
            self._waiting.remove(sample)
            self._forget_start(sample.job)
        else:
            self._decode.drop(sample.number)
            self._running.remove(sample)
            sample.number = None


def _number(sample: _Sample) -> int:
    assert sample.number is not None
    return sample.number
