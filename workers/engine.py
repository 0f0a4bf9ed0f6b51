"""The Ray actor of a prefill rank, and what every worker has. One call per step and rank; Ray carries control, no
cache bytes.

Call order of a prefill worker, by the controller:

    describe -> start -> join (a generation of the group) -> open_job -> [open_handoff] -> run_step ... ->
    [finish_handoff] -> [dump | export_job] -> close_job -> stats

`describe`, `ping` and `stats` run in their own thread, so a worker answers while a step computes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import save_file

from longprefill.comms.group import Group
from longprefill.comms.solo import SoloGroup
from longprefill.comms.torch_group import GroupSpec, TorchGroup
from longprefill.comms.transport.base import PoolAddress, TransportError
from longprefill.comms.transport.holder import Pool, attach_pool, create_pool, sweep_stale
from longprefill.kernels.backends import chosen, resolve
from longprefill.workers import device as devices
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds
from longprefill.workers.choices import Record, Recorder, Replayer, Swap
from longprefill.workers.dump import collect
from longprefill.workers.handoff.parts import (
    HandoffPart,
    HandoffTarget,
    check_identity,
    handoff_identity,
    pool_file_bytes,
    slot_bytes,
)
from longprefill.workers.handoff.sender import HandoffSender, check_link
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.sharding import local_config, parameter_ranges
from longprefill.workers.model.weights import fingerprint, load_weights
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.probe import ActivationProbe, RankObservation, observe
from longprefill.workers.snapshot import SnapshotIdentity, read_header, restore, write_snapshot
from longprefill.workers.spec import Whereabouts, WorkerInfo, WorkerSpec, WorkerStats
from longprefill.workers.trace import Tracer

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONTROL = {"control": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    rank: int
    seconds: float
    has_logits: tuple[int, ...]
    """Jobs whose last logits this rank keeps."""
    stats: WorkerStats | None = None
    """Of this step alone, when it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReport:
    """How a replayed run's own discrete choices differed (workers/choices.py)."""

    rows: int
    swaps: int
    worst: float
    swapped: tuple[Swap, ...] = ()


class Worker:
    """What both kinds of worker have: a model, a pool, a tracer."""

    def __init__(self) -> None:
        self._tracer = Tracer(False)
        self._group: Group | None = None
        self._past_comm: dict[str, tuple[int, int, float]] = {}

    @ray.method(concurrency_group="control")
    def describe(self) -> Whereabouts:
        """Known before anything is loaded, so that a stopped worker can be ended."""
        return Whereabouts.here()

    @ray.method(concurrency_group="control")
    def ping(self) -> bool:
        return True

    @ray.method(concurrency_group="control")
    def stats(self) -> WorkerStats:
        """Peak memory, ledger and spans since the last call."""
        comm = _summed(self._past_comm, self._group_comm())
        return WorkerStats(peak_rss_bytes=_peak_rss_bytes(), comm=comm, spans=self._take_spans())

    def _take_spans(self) -> tuple[tuple[str, str, float, float, int, int], ...]:
        return tuple((s.name, s.category, s.start_us, s.duration_us, s.layer, s.job) for s in self._tracer.take())

    def _group_comm(self) -> dict[str, tuple[int, int, float]]:
        ops = {} if self._group is None else self._group.ledger.ops
        return {op: (count.calls, count.bytes, count.seconds) for op, count in ops.items()}

    def _start(self, spec: WorkerSpec) -> WorkerInfo:
        started = time.perf_counter()
        devices.configure_threads(spec.num_threads)
        self._spec = spec
        self._device = devices.resolve_device(spec.device)
        devices.set_current(self._device)
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._config = read_config(spec.model_dir)
        self._kernels = resolve(spec.device, spec.backends)
        ranges = None if spec.place.is_alone else parameter_ranges(self._config, spec.place)
        weights = load_weights(spec.model_dir, self._config, dtype=self._dtype, device=str(self._device), ranges=ranges)
        weights_bytes = sum(tensor.nbytes for tensor in weights.values())
        self._model = Model(local_config(self._config, spec.place), weights)
        self._formats = CacheFormats(latent=spec.latent_format, index_key=spec.index_format)
        self._pool_file = self._open_pool(spec)
        self._pool = CachePool(self._pool_file.bytes_B, cache_kinds(self._config, self._formats), spec.num_pages)
        self._tracer = Tracer(spec.trace)
        here = Whereabouts.here()
        return WorkerInfo(
            pid=here.pid,
            node=here.node,
            weights_bytes=weights_bytes,
            load_s=time.perf_counter() - started,
            backends=chosen(spec.device, spec.backends),
        )

    def _open_pool(self, spec: WorkerSpec) -> Pool:
        if spec.pool is not None:
            return attach_pool(spec.pool)
        # its holder is on another machine: the pool lives as long as this process
        sweep_stale()
        kinds = cache_kinds(self._config, self._formats)
        size = pool_file_bytes(self._config, self._dtype, kinds, spec.num_pages, spec.num_slots)
        return create_pool(size, label="prefill")

    def _make_rank(self, group: Group) -> PrefillRank:
        return PrefillRank(
            self._model,
            group,
            self._pool,
            self._kernels,
            dtype=self._dtype,
            tracer=self._tracer,
            device=self._device,
            keep_unpooled_keys=self._spec.keep_unpooled_keys,
            num_tp=self._spec.place.num_tp,
            expert_parallel=self._spec.place.expert_parallel,
            full_config=self._config,
        )


class PrefillWorker(Worker):
    """One rank of a prefill group."""

    def start(self, spec: WorkerSpec) -> WorkerInfo:
        """Loads the model and attaches the pool.

        Raises:
            UserError: the model, its weights or a backend cannot be used.
        """
        info = self._start(spec)
        self._identity = SnapshotIdentity(
            fingerprint=fingerprint(spec.model_dir), dtype=spec.dtype, formats=self._formats
        )
        self._handoff_identity = handoff_identity(self._identity.fingerprint, self._dtype, self._formats)
        self._sender: HandoffSender | None = None
        self._failed_transfers: dict[int, str] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._open: set[int] = set()
        return info

    def join(self, group_spec: GroupSpec) -> None:
        """Meets the other ranks of a generation; a group of one needs no meeting."""
        before = self._group
        if before is not None:
            self._past_comm = _summed(self._past_comm, self._group_comm())
            before.close()
        self._group = SoloGroup() if group_spec.size == 1 else TorchGroup(group_spec)
        if before is None:
            self._rank = self._make_rank(self._group)
        self._rank.group = self._group  # open jobs outlive a group

    def open_job(self, job: int, tokens: np.ndarray, table: Sequence[int], snapshot: str | None = None) -> int:
        """Takes a job, fresh or from a snapshot file; returns the position it stands at."""
        tokens_T = torch.from_numpy(np.array(tokens, dtype=np.int64))
        self._rank.open_job(job, tokens_T, tuple(table))
        self._open.add(job)
        if snapshot is not None:
            header = read_header(snapshot, self._identity)
            state = restore(snapshot, self._config, self._dtype, self._rank.cache(job))
            self._rank.close_job(job)
            self._rank.open_job(job, tokens_T, tuple(table), self._rank.share_of(state))
            if header.logits_V is not None and header.position == len(tokens) and self._rank.group.rank == 0:
                self._logits[job] = header.logits_V
        return self._rank.state(job).position

    def open_handoff(self, job: int, target: HandoffTarget, first_token: int) -> str | None:
        """From now on every finished step's pages stream to the decode worker; pages before `first_token` go at once.
        Why nothing can be sent there, or None."""
        assert self._group is not None
        if self._sender is None:
            self._sender = HandoffSender(
                self._group.rank,
                self._group.size,
                self._pool,
                self._pool_file,
                slot_bytes(self._config, self._dtype),
                self._spec.num_slots,
            )
        self._failed_transfers.pop(job, None)
        try:
            check_identity(self._handoff_identity, target.identity)
            self._sender.open(job, target, self._rank.cache(job).table)
        except TransportError as error:
            return str(error)
        if first_token:
            self._send_pages(job, 0, first_token, is_last=first_token == self._rank.num_tokens(job))
        return None

    def check_link(self, address: PoolAddress, identity: str) -> str | None:
        """Why this rank cannot write to the pool of a decode worker of this identity; None: it can."""
        try:
            check_identity(self._handoff_identity, identity)
            check_link(address)
        except TransportError as error:
            return str(error)
        return None

    def run_step(self, plan: StepPlan, with_stats: bool = False) -> StepReport:
        """One step. Jobs in `plan.logits_of` end with it: their ragged pages stream too."""
        before = self._group_comm()
        result = self._rank.run_step(plan)
        self._logits |= result.logits
        if self._sender is not None:
            for part in plan.slices:
                if self._sender.is_open(part.job):
                    self._send_pages(part.job, part.start, part.end, is_last=part.job in plan.logits_of)
        assert self._group is not None
        return StepReport(
            rank=self._group.rank,
            seconds=result.seconds,
            has_logits=tuple(result.logits),
            stats=self._step_stats(before) if with_stats else None,
        )

    def _step_stats(self, before: Mapping[str, tuple[int, int, float]]) -> WorkerStats:
        comm = {}
        for op, (calls, num_bytes, seconds) in self._group_comm().items():
            past = before.get(op, (0, 0, 0.0))
            if calls > past[0]:
                comm[op] = (calls - past[0], num_bytes - past[1], seconds - past[2])
        return WorkerStats(peak_rss_bytes=_peak_rss_bytes(), comm=comm, spans=self._take_spans())

    def finish_handoff(self, job: int) -> HandoffPart:
        """A collective of the TP group. Sends the state and logits if this rank has them, waits until everything has
        arrived; this rank's part of the manifest, or what went wrong with the transfer."""
        assert self._sender is not None
        state = self._rank.whole_state(job)
        # all ranks of a tensor-parallel group have the logits; one of them speaks for it
        logits = self._logits.get(job) if self._rank.mesh.tp.rank == 0 else None
        error = self._failed_transfers.pop(job, None)
        if error is None:
            try:
                return self._sender.finish(job, None if logits is None else state, logits)
            except TransportError as failure:
                error = str(failure)
        return HandoffPart(pages=(), states=(), logits=None, error=error)

    def cancel_handoff(self, job: int) -> None:
        """Stops the transfer and returns when nothing of it is in flight."""
        self._failed_transfers.pop(job, None)
        if self._sender is not None:
            self._sender.cancel(job)

    def _send_pages(self, job: int, start: int, end: int, *, is_last: bool) -> None:
        """A transfer that fails costs a second attempt at the job's end, not the step."""
        assert self._sender is not None
        if job in self._failed_transfers:
            return
        try:
            self._sender.send_pages(job, start, end, is_last=is_last)
        except TransportError as error:
            self._failed_transfers[job] = str(error)

    def dump(self, job: int, path: str, owner: int) -> None:
        """A collective: all ranks collect, rank 0 writes the file."""
        tensors = collect(self._rank, job, self._logits.get(job), owner)
        if self._rank.group.rank == 0:
            save_file(tensors, path)

    def final_tensors(self, job: int, owner: int) -> dict[str, np.ndarray]:
        """A collective: what `dump` writes, from rank 0, as fp32 arrays (small models and tests)."""
        tensors = collect(self._rank, job, self._logits.get(job), owner)
        return {name: tensor.float().numpy() for name, tensor in tensors.items()} if self._rank.group.rank == 0 else {}

    def export_job(self, job: int, path: str, tokens: np.ndarray, writer: int) -> None:
        """A collective: rank `writer` writes the job's snapshot, with the logits if it has them."""
        state = self._rank.whole_state(job)
        if self._rank.group.rank == writer:
            tokens_T = torch.from_numpy(np.array(tokens, dtype=np.int64))
            write_snapshot(path, self._identity, tokens_T, state, self._rank.cache(job), self._logits.get(job))

    def close_job(self, job: int) -> None:
        """Forgets a job, also one that is only half open or half handed over."""
        self.cancel_handoff(job)
        with contextlib.suppress(KeyError):
            self._rank.close_job(job)
        self._logits.pop(job, None)
        self._open.discard(job)

    def close_all(self) -> None:
        """Forgets every job: what a rank does that has outlived its group."""
        for job in sorted(self._open):
            self.close_job(job)

    def record_choices(self) -> None:
        """Keeps every discrete choice from now on."""
        self._rank.choices = Recorder()

    def take_choices(self) -> Record:
        """The choices recorded by this rank; recording ends."""
        recorder = self._rank.choices
        assert isinstance(recorder, Recorder)
        self._rank.choices = None
        return recorder.record

    def replay_choices(self, record: Record, keep_own: bool = False) -> None:
        """Uses recorded choices from now on, or with `keep_own` only compares this rank's own with them."""
        self._rank.choices = Replayer(record, keep_own=keep_own)

    def end_replay(self) -> ChoiceReport:
        """How this rank's own choices differed; replaying ends."""
        replayer = self._rank.choices
        assert isinstance(replayer, Replayer)
        self._rank.choices = None
        return ChoiceReport(
            rows=replayer.rows, swaps=replayer.swaps, worst=replayer.worst, swapped=tuple(replayer.swapped)
        )

    def start_probe(self, logit_rows: int) -> None:
        """Keeps activations from now on, and the logits of every prompt's last rows."""
        self._rank.probe = ActivationProbe(logit_rows=logit_rows)

    def take_probe(self, job: int) -> RankObservation:
        """A collective of the TP group. What this rank kept of the job since `start_probe`, and what the job left;
        probing ends."""
        probe = self._rank.probe
        assert probe is not None
        self._rank.probe = None
        return observe(self._rank, probe, job)


def _summed(
    first: Mapping[str, tuple[int, int, float]], second: Mapping[str, tuple[int, int, float]]
) -> dict[str, tuple[int, int, float]]:
    """Ledgers of two groups that a worker was in, added up."""
    total = dict(first)
    for op, (calls, num_bytes, seconds) in second.items():
        before = total.get(op, (0, 0, 0.0))
        total[op] = (before[0] + calls, before[1] + num_bytes, before[2] + seconds)
    return total


def _peak_rss_bytes() -> int:
    # VmHWM, not ru_maxrss: the latter starts from the parent's peak at fork
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM line")


# ray's type stubs know neither concurrency groups nor what they return
PrefillActor: Any = ray.remote(concurrency_groups=CONTROL, max_restarts=0)(PrefillWorker)  # pyright: ignore[reportCallIssue]
