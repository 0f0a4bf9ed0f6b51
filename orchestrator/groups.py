"""The workers of a `LocalCluster` and every conversation with them: placement, start, steps, hand-off, end.

One Ray placement group holds the prefill ranks, reserved whole or not at all; the decode worker is an actor of its own.
Cache pools are files of a holder in this process, so they outlive any worker. Nothing here waits without a deadline or
a watch over the workers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from longprefill.comms.messages import Ack, Nack, decode
from longprefill.comms.torch_group import GroupSpec, create_store
from longprefill.comms.transport.base import TransportError
from longprefill.comms.transport.holder import Pool, create_pool, sweep_stale
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.plan import NUM_SLOTS, ClusterSettings
from longprefill.orchestrator.report import HandoffReport
from longprefill.orchestrator.watch import Watch, Watched, end_process
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers import device as devices
from longprefill.workers.cache.pages import CacheFormats, PageAllocator, cache_kinds
from longprefill.workers.choices import Record
from longprefill.workers.decode import Sampling, Token
from longprefill.workers.engine import TORCH_DTYPES, ChoiceReport, DecodeActor, PrefillActor, StepReport
from longprefill.workers.handoff.parts import HandoffPart, build_messages, layer_counts, pool_file_bytes
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.sharding import ALONE
from longprefill.workers.prefill import StepPlan
from longprefill.workers.probe import RankObservation
from longprefill.workers.snapshot import SnapshotHeader, SnapshotIdentity, read_header
from longprefill.workers.spec import WorkerInfo, WorkerSpec, WorkerStats

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
HANDOFF_TIMEOUT_S = 120.0
HANDOFF_ATTEMPTS = 2


@dataclass(kw_only=True)
class _Handoff:
    transfer_id: str
    attempt: int
    table: tuple[int, ...]
    started: float


@dataclass(kw_only=True)
class _OpenJob:
    table: tuple[int, ...]
    num_tokens: int
    max_tokens: int
    logits_owner: int | None = None
    handoff: _Handoff | None = None
    is_decoding: bool = False


class LocalWorkers:
    """`prefill` in rank order and `decode` are the running workers, `info` what each said of itself at its start."""

    def __init__(self, settings: ClusterSettings, config: ModelConfig, fingerprint: str, *, has_decode: bool) -> None:
        self.settings = settings
        self.config = config
        self.fingerprint = fingerprint
        self.has_decode = has_decode
        self.prefill: list[Watched] = []
        self.decode: Watched | None = None
        self.info: dict[str, WorkerInfo] = {}
        self._pools: list[Pool] = []
        self._store: Any = None
        self._placement: Any = None
        self._watch = Watch(settings.heartbeat_timeout_s)
        self._generation = 0
        self._is_group_broken = False
        self._num_streams = 0
        self._jobs: dict[int, _OpenJob] = {}
        self._formats = CacheFormats(latent=settings.latent, index_key=settings.index)
        self._kinds = cache_kinds(config, self._formats)
        # one ragged page a job at most: eight jobs' worth beyond what the tokens need
        self._num_pages = -(-settings.max_tokens // PAGE_TOKENS) + NUM_SLOTS
        self._prefill_pages = PageAllocator(self._num_pages)
        self._decode_pages = PageAllocator(self._num_pages)

    # ---- start and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Placement, processes, models, the group, in a Ray that is up: all or nothing.

        Raises:
            UserError: no room for the cache pools, or a worker refuses the model.
            RunFailed: a worker did not start.
        """
        # Ray has a logical CPU for every worker, so the group's place is sure and actors need not wait for it
        self._placement = placement_group([{"CPU": 1}] * self.settings.num_ranks, strategy="PACK")
        in_group = PlacementGroupSchedulingStrategy(self._placement)
        actors = {
            f"prefill rank {rank}": PrefillActor.options(num_cpus=1, scheduling_strategy=in_group).remote()
            for rank in range(self.settings.num_ranks)
        }
        if self.has_decode:
            actors["decode worker"] = DecodeActor.options(num_cpus=1).remote()
        sweep_stale()
        specs = {label: self._spec(label, rank) for rank, label in enumerate(actors)}
        described = self._watch.wait(
            {label: actor.describe.remote() for label, actor in actors.items()}, deadline_s=START_TIMEOUT_S
        )
        for label, actor in actors.items():
            worker = Watched(label=label, actor=actor, pid=described[label][0])
            self._watch.add(worker)
            if label == "decode worker":
                self.decode = worker
            else:
                self.prefill.append(worker)
        self.info = self._watch.wait(
            {label: actor.start.remote(specs[label]) for label, actor in actors.items()}, deadline_s=START_TIMEOUT_S
        )
        self.form_group()

    def form_group(self) -> None:
        """The prefill ranks meet as a new generation."""
        settings = self.settings
        self._generation += 1
        if self._store is None:
            self._store, self._store_host, self._store_port = create_store()
        device = devices.resolve_device(settings.device)
        specs = {
            worker.label: GroupSpec(
                host=self._store_host,
                port=self._store_port,
                generation=self._generation,
                rank=rank,
                size=settings.num_ranks,
                device=str(device),
                backend=devices.backend_for(device),
                timeout_s=settings.collective_timeout_s,
            )
            for rank, worker in enumerate(self.prefill)
        }
        self._call_prefill("join", lambda worker: (specs[worker.label],))
        self._is_group_broken = False

    def close(self) -> None:
        """Ends every worker and removes the pool files. Ray itself is its owner's to end."""
        pids = [worker.pid for worker in (*self.prefill, *([self.decode] if self.decode else []))]
        self._watch.clear()
        self.prefill, self.decode = [], None
        for pid in pids:
            end_process(pid)  # at once, and a stopped process too, which would survive Ray's own end
        for pool in self._pools:
            pool.unlink()
            pool.close()
        self._pools.clear()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _spec(self, label: str, rank: int) -> WorkerSpec:
        settings = self.settings
        place = settings.place(rank) if rank < settings.num_ranks else ALONE
        size = pool_file_bytes(self.config, TORCH_DTYPES[settings.dtype], self._kinds, self._num_pages, NUM_SLOTS)
        try:
            pool = create_pool(size, label=label.replace(" ", "_"))
        except TransportError as error:
            raise UserError(f"cache pool of the {label}: {error}") from error
        self._pools.append(pool)
        return WorkerSpec(
            model_dir=settings.model_dir,
            device=settings.device,
            dtype=settings.dtype,
            latent_format=settings.latent,
            index_format=settings.index,
            pool=pool.address(),
            num_pages=self._num_pages,
            num_slots=NUM_SLOTS,
            place=place,
            backends=settings.backends,
            trace=settings.trace,
            keep_unpooled_keys=settings.keep_unpooled_keys,
            num_threads=settings.threads_per_rank,
        )

    # ---- jobs and steps -----------------------------------------------------------------------------------------

    def open_job(self, job: int, tokens: np.ndarray, max_tokens: int, snapshot: str | None) -> None:
        """Gives a job pages and its prompt to all ranks. After a failure the ranks meet anew first.

        Raises:
            UserError: not enough pages, or the snapshot cannot be used; the job is not open then.
            RunFailed: a worker died, hung or failed.
        """
        if self._is_group_broken:
            self.form_group()
        table = self._prefill_pages.allocate(job, len(tokens))
        self._jobs[job] = opened = _OpenJob(table=table, num_tokens=len(tokens), max_tokens=max_tokens)
        prompt = ray.put(tokens)
        try:
            positions = self._call_prefill("open_job", lambda worker: (job, prompt, table, snapshot))
        except (UserError, RunFailed):
            self.abandon_job(job)
            raise
        if all(position == len(tokens) for position in positions.values()):
            opened.logits_owner = 0

    def run_step(self, slices: tuple[Slice, ...], ending: tuple[int, ...]) -> tuple[float, ...]:
        """One step on all ranks; the seconds each rank measured. `ending` are the jobs that finish with it."""
        plan = StepPlan(slices=slices, layout=self.settings.layout, exchange="all_gather", logits_of=ending)
        self._is_group_broken = True  # until all ranks are through
        reports: dict[str, StepReport] = self._call_prefill("run_step", lambda worker: (plan,))
        self._is_group_broken = False
        for report in reports.values():
            for job in report.has_logits:
                owner = self._jobs[job].logits_owner
                self._jobs[job].logits_owner = report.rank if owner is None else min(owner, report.rank)
        ordered = sorted(reports.values(), key=lambda report: report.rank)
        return tuple(report.seconds for report in ordered)

    def close_job(self, job: int) -> None:
        """Frees a job's pages on both sides."""
        opened = self._jobs[job]
        self._call_prefill("close_job", lambda worker: (job,))
        self._prefill_pages.release(job)
        if opened.handoff is not None and self.decode is not None:
            self._watch.wait({self.decode.label: self.decode.actor.release.remote(job)})
            self._decode_pages.release(job)
        del self._jobs[job]

    def abandon_job(self, job: int) -> None:
        """Closes a job whose run failed, as far as its workers still live."""
        if job in self._jobs:
            with contextlib.suppress(RunFailed):
                self.close_job(job)

    def dump(self, job: int, path: str) -> None:
        self._call_prefill("dump", lambda worker: (job, path, self._owner(job)))

    def final_tensors(self, job: int) -> dict[str, np.ndarray]:
        found = self._call_prefill("final_tensors", lambda worker: (job, self._owner(job)))
        return found[self.prefill[0].label]

    def export_job(self, job: int, path: str, tokens: np.ndarray) -> None:
        """The rank that has the logits writes, else rank 0: the caches are replicated."""
        writer = self._jobs[job].logits_owner or 0
        self._call_prefill("export_job", lambda worker: (job, path, tokens, writer))

    def read_snapshot(self, path: str) -> SnapshotHeader:
        identity = SnapshotIdentity(fingerprint=self.fingerprint, dtype=self.settings.dtype, formats=self._formats)
        return read_header(path, identity)

    # ---- hand-off and decode ------------------------------------------------------------------------------------

    def open_handoffs(self, starts: dict[int, int], num_tokens: dict[int, int]) -> None:
        """Reserves at the decode side and tells the ranks where pages go. `starts`: tokens that are already done.

        Raises:
            UserError: more jobs than can be on their way at once, or not enough pages at the decode worker.
        """
        if len(num_tokens) > NUM_SLOTS:
            raise UserError(
                f"{len(num_tokens)} prompts cannot be handed over at once: prefill at most {NUM_SLOTS} in one call"
            )
        for job in num_tokens:
            table = self._decode_pages.allocate(job, self._jobs[job].max_tokens)
            transfer_id = f"{self._generation}-{job}"
            self._jobs[job].handoff = _Handoff(
                transfer_id=transfer_id, attempt=0, table=table, started=time.perf_counter()
            )
            self._open_transfer(job, starts[job])

    def finish_handoff(self, job: int, num_tokens: int) -> HandoffReport:
        """Waits until everything has arrived and is acknowledged; what failed its check is sent once more.

        Raises:
            RunFailed: the decode side refused, with its reason.
        """
        assert self.decode is not None
        opened = self._jobs[job]
        handoff = opened.handoff
        assert handoff is not None
        prefill_ended = time.perf_counter()
        while True:
            parts: dict[str, HandoffPart] = self._call_prefill("finish_handoff", lambda worker: (job,))
            failures = [part.error for part in parts.values() if part.error is not None]
            if failures:
                self._retry_transfer(job, f"prefill ranks could not send it: {failures[0]}", may_retry=True)
                continue
            manifest, commit = build_messages(
                list(parts.values()),
                transfer_id=handoff.transfer_id,
                attempt=handoff.attempt,
                job=job,
                fingerprint=self.fingerprint,
                formats=self._formats,
                layers=layer_counts(self.config),
                position=num_tokens,
            )
            reply = self._watch.wait(
                {self.decode.label: self.decode.actor.commit.remote(manifest, commit, opened.max_tokens)},
                deadline_s=HANDOFF_TIMEOUT_S,
            )
            answer = decode(reply[self.decode.label])
            if isinstance(answer, Ack):
                now = time.perf_counter()
                opened.is_decoding = True
                return HandoffReport(
                    num_bytes=answer.num_bytes, seconds=now - handoff.started, exposed_s=now - prefill_ended
                )
            assert isinstance(answer, Nack)
            reason = f"the decode worker refused it: {answer.code}: {answer.reason}"
            self._retry_transfer(job, reason, may_retry=answer.may_retry)

    def generate(self, job: int, sampling: Sampling) -> Generator[Token, None, None]:
        """Streams sampled tokens; each wait is watched. Whoever stops listening stops the worker too."""
        if job not in self._jobs or not self._jobs[job].is_decoding:
            raise UserError(f"job {job} was not handed over to the decode worker: prefill it with handoff=True")
        assert self.decode is not None
        worker, number = self.decode, self._num_streams
        self._num_streams += 1
        stream = worker.actor.generate.options(num_returns="streaming").remote(job, sampling, number)
        token = None
        try:
            while (token := self._watch.next_of(worker.label, stream)) is not None:
                yield token
        finally:
            if token is not None:
                worker.actor.stop_stream.remote(number)

    def _retry_transfer(self, job: int, reason: str, *, may_retry: bool) -> None:
        opened = self._jobs[job]
        assert opened.handoff is not None
        if not may_retry or opened.handoff.attempt + 1 >= HANDOFF_ATTEMPTS:
            raise RunFailed(f"the hand-off of job {job} failed: {reason}")
        logger.info("job %d: attempt %d of its hand-off: %s", job, opened.handoff.attempt + 1, reason)
        opened.handoff.attempt += 1
        self._open_transfer(job, opened.num_tokens)

    def _open_transfer(self, job: int, first_token: int) -> None:
        assert self.decode is not None
        handoff = self._jobs[job].handoff
        assert handoff is not None
        call = self.decode.actor.reserve.remote(job, handoff.transfer_id, handoff.attempt, handoff.table)
        target = self._watch.wait({self.decode.label: call}, deadline_s=HANDOFF_TIMEOUT_S)[self.decode.label]
        self._call_prefill("open_handoff", lambda worker: (job, target, first_token))

    # ---- measurements and choices -------------------------------------------------------------------------------

    def stats(self) -> dict[str, WorkerStats]:
        """Of every worker, by label, since the last call."""
        workers = [*self.prefill, *([self.decode] if self.decode else [])]
        return self._watch.wait({worker.label: worker.actor.stats.remote() for worker in workers})

    def record_choices(self) -> None:
        self._call_prefill("record_choices", lambda worker: ())

    def take_choices(self) -> Record:
        """All ranks' recorded choices."""
        merged: Record = {}
        for record in self._call_prefill("take_choices", lambda worker: ()).values():
            merged |= record
        return merged

    def replay_choices(self, record: Record, *, keep_own: bool = False) -> None:
        shared = ray.put(record)
        self._call_prefill("replay_choices", lambda worker: (shared, keep_own))

    def end_replay(self) -> list[ChoiceReport]:
        return list(self._call_prefill("end_replay", lambda worker: ()).values())

    def start_probe(self, logit_rows: int) -> None:
        """Keeps activations from now on."""
        self._call_prefill("start_probe", lambda worker: (logit_rows,))

    def take_probe(self, job: int) -> list[RankObservation]:
        """What the ranks kept of a job and what it left, in rank order."""
        found = self._call_prefill("take_probe", lambda worker: (job,))
        return [found[worker.label] for worker in self.prefill]

    def _call_prefill(self, method: str, arguments: Callable[[Watched], tuple[Any, ...]]) -> dict[str, Any]:
        return self._watch.wait(
            {worker.label: getattr(worker.actor, method).remote(*arguments(worker)) for worker in self.prefill}
        )

    def _owner(self, job: int) -> int:
        owner = self._jobs[job].logits_owner
        if owner is None:
            raise RunFailed(f"job {job} is not finished: it has no logits yet")
        return owner
