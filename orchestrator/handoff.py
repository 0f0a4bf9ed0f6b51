"""The conversation that hands a job from a prefill group to a decode worker: reserve, stream, commit, acknowledge."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from longprefill.comms.messages import Ack, Nack, decode
from longprefill.orchestrator.groups import PrefillGroup
from longprefill.orchestrator.hosts.contract import HandoffFailed
from longprefill.orchestrator.report import HandoffReport
from longprefill.workers.handoff.parts import HandoffTarget

logger = logging.getLogger(__name__)

HANDOFF_TIMEOUT_S = 120.0
HANDOFF_ATTEMPTS = 2


class DecodeSide(Protocol):
    """A decode worker, as the sending side reaches it. Both calls have a deadline and raise RunFailed beyond it."""

    def reserve(self, job: int, transfer_id: str, attempt: int) -> HandoffTarget:
        """Room for the job; a further attempt fences earlier ones."""
        ...

    def commit(self, job: int, manifest: bytes, commit: bytes) -> bytes:
        """An Ack or a Nack message."""
        ...


class Handoff:
    """One job's way to one decode worker. `exclusive` is held while the group's ranks are used."""

    def __init__(
        self,
        group: PrefillGroup,
        side: DecodeSide,
        *,
        job: int,
        transfer_id: str,
        exclusive: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.transfer_id = transfer_id
        self.attempt = 0
        self._group = group
        self._side = side
        self._job = job
        self._exclusive = exclusive
        self._started = time.perf_counter()

    def open(self) -> None:
        """Reserves, and tells the ranks where pages go; those that exist go at once.

        Raises:
            HandoffFailed: the ranks cannot send there.
            RunFailed, UserError: as the decode side or a rank raised.
        """
        target = self._side.reserve(self._job, self.transfer_id, self.attempt)
        with self._exclusive():
            error = self._group.open_transfer(self._job, target)
            if error is not None:
                self._group.cancel_transfer(self._job)
        if error is not None:
            raise HandoffFailed(f"the hand-off of job {self._job} failed: {error}")

    def finish(self) -> HandoffReport:
        """Waits until everything has arrived and is acknowledged; what failed its check is sent once more.

        Raises:
            HandoffFailed: the decode side refused, with its reason.
            RunFailed: a worker died or hung.
        """
        prefill_ended = time.perf_counter()
        while True:
            with self._exclusive():
                parts = self._group.finish_transfer(self._job)
            failures = [part.error for part in parts if part.error is not None]
            if failures:
                self._retry(f"prefill ranks could not send it: {failures[0]}", may_retry=True)
                continue
            manifest, commit = self._group.messages(
                self._job, parts, transfer_id=self.transfer_id, attempt=self.attempt
            )
            answer = decode(self._side.commit(self._job, manifest, commit))
            if isinstance(answer, Ack):
                now = time.perf_counter()
                return HandoffReport(
                    num_bytes=answer.num_bytes, seconds=now - self._started, exposed_s=now - prefill_ended
                )
            assert isinstance(answer, Nack)
            reason = f"the decode worker refused it: {answer.code}: {answer.reason}"
            self._retry(reason, may_retry=answer.may_retry)

    def _retry(self, reason: str, *, may_retry: bool) -> None:
        if not may_retry or self.attempt + 1 >= HANDOFF_ATTEMPTS:
            raise HandoffFailed(f"the hand-off of job {self._job} failed: {reason}")
        logger.info("job %d: attempt %d of its hand-off: %s", self._job, self.attempt + 1, reason)
        self.attempt += 1
        self.open()
