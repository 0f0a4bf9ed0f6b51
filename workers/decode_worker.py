"""The Ray actor of a `LocalCluster`'s decode worker; `DecodeHost` builds on the same class.

describe -> start -> reserve -> commit -> generate ... -> release -> stats
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray

from longprefill.comms.solo import SoloGroup
from longprefill.workers.decode import DecodeRank, Sampling, Token
from longprefill.workers.engine import CONTROL, Worker
from longprefill.workers.handoff.parts import HandoffTarget
from longprefill.workers.handoff.receiver import HandoffReceiver
from longprefill.workers.model.weights import fingerprint
from longprefill.workers.spec import WorkerInfo, WorkerSpec


class DecodeWorker(Worker):
    """Takes prefilled jobs over and generates."""

    def start(self, spec: WorkerSpec) -> WorkerInfo:
        """Loads the model and attaches the pool that prefill ranks write to."""
        info = self._start(spec)
        self._stopped: set[int] = set()
        self._group = SoloGroup()
        self.decode = DecodeRank(self._make_rank(self._group))
        self.receiver = HandoffReceiver(
            self._config,
            self._dtype,
            self._formats,
            self._pool,
            self._pool_file,
            fingerprint(spec.model_dir),
            spec.num_slots,
        )
        return info

    def reserve(self, job: int, transfer_id: str, attempt: int, table: Sequence[int]) -> HandoffTarget:
        """Room for a job before its first byte is sent."""
        return self.receiver.reserve(job, transfer_id, attempt, tuple(table))

    def commit(self, manifest: bytes, commit: bytes, max_tokens: int) -> bytes:
        """Verifies every checksum, then takes the job over. An Ack or a Nack message."""
        answer, received = self.receiver.commit(manifest, commit)
        if received is not None:
            self.decode.take(received.job, received.table, received.state, received.logits_V, max_tokens)
        return answer

    def generate(self, job: int, sampling: Sampling, stream: int) -> Iterator[Token]:
        """Streams tokens as they are sampled, until `stop_stream` names this stream."""
        for token in self.decode.generate(job, sampling):
            if stream in self._stopped:
                break
            yield token
        self._stopped.discard(stream)

    @ray.method(concurrency_group="control")
    def stop_stream(self, stream: int) -> None:
        """Nobody listens to this stream any more."""
        self._stopped.add(stream)

    def release(self, job: int) -> None:
        """Forgets a job, committed or only reserved; its pages may be given to another."""
        if self.receiver.is_committed(job):
            self.decode.drop(job)
        self.receiver.release(job)


# ray's type stubs know neither concurrency groups nor what they return
DecodeActor: Any = ray.remote(concurrency_groups=CONTROL, max_restarts=0)(DecodeWorker)  # pyright: ignore[reportCallIssue]
