"""Generation: decode workers are polled, tokens get their text and become durable, then their job's clients see them.

A worker keeps tokens until the next poll acknowledges them, which is after they are durable: what a controller's death
leaves in between comes again and is recognized by its index.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from longprefill.orchestrator.controller.core import LOST, Core
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.controller.sample_text import SampleText
from longprefill.orchestrator.hosts.contract import (
    DecodeToken,
    DecodeTokens,
    GenerateRequest,
    SampleStart,
)
from longprefill.orchestrator.job import JobState, TokenRecord

logger = logging.getLogger(__name__)

POLL_S = 5.0
POLL_DEADLINE_S = 60.0
TOLD_EVERY_S = 1.0
"""Between events that say how many tokens there are; the tokens themselves have their own stream."""


class Generating:
    """`begin` when a decode worker holds a job, `poll` as long as the worker lives."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def begin(self, job: LiveJob, report: Mapping[str, Any]) -> None:
        """A decode worker holds the job: its prefill group need not any more."""
        core = self._core
        if job.is_ended or job.decode is None:
            return
        columns = {"decode_worker": job.decode.name, "report": report}
        core.refresh(job, core.journal.change(job.number, JobState.GENERATING, **columns))
        core.leave_group(job)
        await self.resume(job)

    async def resume(self, job: LiveJob) -> None:
        """Starts the samples that have not ended, after the tokens that they have; a second call changes nothing."""
        core = self._core
        decode, request = job.decode, job.row.request
        assert decode is not None
        assert decode.link is not None
        self._read_texts(job)
        open_samples = [sample for sample, text in job.texts.items() if text.finish_reason is None]
        if not open_samples:
            core.end(job, JobState.DONE)
            return
        durable = core.journal.token_ids(job.number)
        wanted = GenerateRequest(
            job=job.number,
            samples=tuple(
                SampleStart(sample=n, num_generated=len(durable.get(n, ())), forced=durable.get(n, ()))
                for n in open_samples
            ),
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop_token_ids=tuple(dict.fromkeys((*core.model.eos_token_ids, *request.stop_token_ids))),
            num_logprobs=request.num_logprobs,
        )
        try:
            await decode.link.call("generate", wanted, deadline_s=POLL_DEADLINE_S)
        except LOST as error:
            if job.decode is decode:
                core.requeue(job, f"{decode.name} could not go on with it: {error}", is_failure=True)

    async def poll(self, decode: Host) -> None:
        """Takes tokens until the worker fails.

        Raises:
            RunFailed, NotReady: the worker is not what it was.
        """
        while True:
            assert decode.link is not None
            batch: DecodeTokens = await decode.link.call("poll", decode.cursor, POLL_S, deadline_s=POLL_DEADLINE_S)
            by_job: dict[int, list[DecodeToken]] = {}
            for token in batch.tokens:
                by_job.setdefault(token.job, []).append(token)
            for number, tokens in by_job.items():
                job = self._core.jobs.get(number)
                if job is not None and job.decode is decode and job.row.state is JobState.GENERATING:
                    self._take(job, tokens)
            for failure in batch.failures:
                job = self._core.jobs.get(failure.job)
                if job is not None and job.decode is decode:
                    self._core.requeue(job, f"{decode.name}: {failure.reason}", is_failure=True)
            decode.cursor = batch.cursor

    def _take(self, job: LiveJob, tokens: list[DecodeToken]) -> None:
        core = self._core
        records: list[TokenRecord] = []
        cut_short: list[int] = []
        for token in tokens:
            text = job.texts[token.sample]
            if text.finish_reason is not None or token.index < text.num_tokens:
                continue
            if token.index > text.num_tokens:
                core.requeue(job, f"token {text.num_tokens} of sample {token.sample} was lost", is_failure=True)
                return
            record = text.push(token)
            records.append(record)
            if record.finish_reason is not None and token.finish_reason is None:
                cut_short.append(token.sample)
        if not records:
            return
        is_first = job.row.first_token_at is None
        is_done = all(text.finish_reason is not None for text in job.texts.values())
        now = time.monotonic()
        is_told = is_first or is_done or now - job.told_at > TOLD_EVERY_S
        job.told_at = now if is_told else job.told_at
        row = core.journal.add_tokens(job.number, records, is_told=is_told)
        core.refresh(job, row)
        core.metrics.tokens.labels("generated").inc(len(records))
        if is_first:
            core.metrics.first_token(row.timings(row.state_at))
        if is_done:
            core.end(job, JobState.DONE)
        elif job.decode is not None:
            for sample in cut_short:
                core.spawn(core.tell(job.decode, "end_sample", job.number, sample), f"end sample of {row.id}")

    def _read_texts(self, job: LiveJob) -> None:
        """The texts of the job's samples as far as they are durable."""
        core = self._core
        durable, views = core.journal.token_ids(job.number), core.journal.samples(job.number)
        job.texts = {}
        for sample, view in enumerate(views):
            text = job.texts[sample] = SampleText(core.tokenizer, job.row.request.stop)
            text.replay(durable.get(sample, ()), view.finish_reason)
