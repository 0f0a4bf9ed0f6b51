"""The workers of a `LocalCluster`: one prefill group and, beside it, one decode worker, under one watch."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import numpy as np

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.groups import PrefillGroup
from longprefill.orchestrator.handoff import HANDOFF_TIMEOUT_S, Handoff
from longprefill.orchestrator.launch import Holder, NewWorker, start_workers
from longprefill.orchestrator.plan import NUM_SLOTS, ClusterSettings
from longprefill.orchestrator.report import HandoffReport
from longprefill.orchestrator.watch import Watch, Watched
from longprefill.partition.errors import UserError
from longprefill.workers.cache.pages import PageAllocator
from longprefill.workers.decode import Sampling, Token
from longprefill.workers.decode_worker import DecodeActor
from longprefill.workers.handoff.parts import HandoffTarget
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.sharding import ALONE
from longprefill.workers.spec import WorkerInfo, WorkerStats

LABEL = "decode worker"


class LocalDecode:
    """The decode worker of a `LocalCluster`, a `DecodeSide`: every wait for it watches the prefill ranks too."""

    def __init__(self, holder: Holder, watch: Watch) -> None:
        self._holder = holder
        self._watch = watch
        self._pages = PageAllocator(holder.num_pages)
        self._tables: dict[int, tuple[int, ...]] = {}
        self._max_tokens: dict[int, int] = {}
        self._num_streams = 0
        self.worker: Watched

    def new_worker(self) -> NewWorker:
        """Its actor, not started."""
        return NewWorker(
            label=LABEL,
            actor=DecodeActor.options(num_cpus=1).remote(),
            spec=lambda _: self._holder.spec(self._holder.create_pool(LABEL), ALONE),
        )

    def allocate(self, job: int, max_tokens: int) -> None:
        """Pages for a job's prompt and what it may generate. UserError: not enough are free."""
        self._tables[job] = self._pages.allocate(job, max_tokens)
        self._max_tokens[job] = max_tokens

    def reserve(self, job: int, transfer_id: str, attempt: int) -> HandoffTarget:
        call = self.worker.actor.reserve.remote(job, transfer_id, attempt, self._tables[job])
        return self._watch.wait({LABEL: call}, deadline_s=HANDOFF_TIMEOUT_S)[LABEL]

    def commit(self, job: int, manifest: bytes, commit: bytes) -> bytes:
        call = self.worker.actor.commit.remote(manifest, commit, self._max_tokens[job])
        return self._watch.wait({LABEL: call}, deadline_s=HANDOFF_TIMEOUT_S)[LABEL]

    def generate(self, job: int, sampling: Sampling) -> Generator[Token, None, None]:
        """Streams sampled tokens; each wait is watched. Whoever stops listening stops the worker too."""
        actor, number = self.worker.actor, self._num_streams
        self._num_streams += 1
        stream = actor.generate.options(num_returns="streaming").remote(job, sampling, number)
        token = None
        try:
            while (token := self._watch.next_of(LABEL, stream)) is not None:
                yield token
        finally:
            if token is not None:
                actor.stop_stream.remote(number)

    def release(self, job: int) -> None:
        """Frees the job's pages; a job that has none is released already."""
        if job in self._tables:
            self._watch.wait({LABEL: self.worker.actor.release.remote(job)})
            self._pages.release(job)
            del self._tables[job], self._max_tokens[job]


class LocalWorkers(PrefillGroup):
    """`prefill` are the ranks in order, `info` is what each worker said of itself at its start."""

    def __init__(self, settings: ClusterSettings, config: ModelConfig, fingerprint: str, *, has_decode: bool) -> None:
        watch = Watch(settings.heartbeat_timeout_s)
        super().__init__(settings, config, fingerprint, holder=Holder(settings, config), watch=watch)
        self.decode = LocalDecode(self.holder, watch) if has_decode else None
        self.info: dict[str, WorkerInfo] = {}
        self._handoffs: dict[int, Handoff] = {}
        self._handed_over: set[int] = set()
        self._max_tokens: dict[int, int] = {}

    @property
    def prefill(self) -> list[Watched]:
        return self.ranks

    def start(self) -> None:
        """Placement, processes, models, the group, in a Ray that is up: all or nothing.

        Raises:
            UserError: no room for the cache pools, or a worker refuses the model.
            RunFailed: a worker did not start.
        """
        # Ray has a logical CPU for every worker, so the group's place is sure and actors need not wait for it
        self.place()
        new = self.new_workers() + ([] if self.decode is None else [self.decode.new_worker()])
        started = start_workers(self.watch, new)
        self.info = {worker.watched.label: worker.info for worker in started}
        self.ranks = [worker.watched for worker in started[: self.settings.num_ranks]]
        if self.decode is not None:
            self.decode.worker = started[-1].watched
        self.form()

    def open(self, job: int, tokens: np.ndarray, max_tokens: int, snapshot: str | None) -> None:
        """As `open_job`, with room for up to `max_tokens` tokens when it is handed over."""
        self.open_job(job, tokens, snapshot)
        self._max_tokens[job] = max_tokens

    def open_handoffs(self, jobs: Sequence[int]) -> None:
        """Reserves at the decode side and tells the ranks where pages go.

        Raises:
            UserError: more jobs than can be on their way at once, or not enough pages at the decode worker.
        """
        assert self.decode is not None
        if len(jobs) > NUM_SLOTS:
            raise UserError(
                f"{len(jobs)} prompts cannot be handed over at once: prefill at most {NUM_SLOTS} in one call"
            )
        for job in jobs:
            self.decode.allocate(job, self._max_tokens[job])
            self._handoffs[job] = Handoff(self, self.decode, job=job, transfer_id=f"{self.generation}-{job}")
            self._handoffs[job].open()

    def finish_handoff(self, job: int) -> HandoffReport:
        """Waits until everything has arrived and is acknowledged. Raises as `Handoff.finish`."""
        report = self._handoffs[job].finish()
        self._handed_over.add(job)
        return report

    def generate(self, job: int, sampling: Sampling) -> Generator[Token, None, None]:
        """As `LocalDecode.generate`. UserError: the job was not handed over."""
        if job not in self._handed_over:
            raise UserError(f"job {job} was not handed over to the decode worker: prefill it with handoff=True")
        assert self.decode is not None
        return self.decode.generate(job, sampling)

    def close_job(self, job: int) -> None:
        """Frees a job's pages on both sides."""
        super().close_job(job)
        self._handoffs.pop(job, None)
        self._handed_over.discard(job)
        if self.decode is not None:
            self.decode.release(job)

    def abandon_job(self, job: int) -> None:
        """Closes a job whose run failed, as far as its workers still live."""
        if self.is_open(job):
            with contextlib.suppress(RunFailed):
                self.close_job(job)

    def stats(self) -> dict[str, WorkerStats]:
        """Of every worker, by label, since the last call."""
        workers = [*self.ranks, *([] if self.decode is None else [self.decode.worker])]
        return self.watch.wait({worker.label: worker.actor.stats.remote() for worker in workers})
