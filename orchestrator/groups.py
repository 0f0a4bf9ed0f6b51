"""One prefill group and every conversation with its ranks: placement, start, steps, sending, end.

One Ray placement group holds the ranks, reserved whole or not at all. Cache pools are files of a holder in this
process, so they outlive any rank. Nothing here waits without a deadline or a watch over the workers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from longprefill.comms.torch_group import GroupSpec, create_store
from longprefill.comms.transport.base import PoolAddress
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.launch import Holder, NewWorker, start_workers
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.watch import Watch, Watched
from longprefill.partition.errors import UserError
from longprefill.partition.layout import Slice
from longprefill.workers import device as devices
from longprefill.workers.cache.pages import PageAllocator
from longprefill.workers.choices import Record
from longprefill.workers.engine import ChoiceReport, PrefillActor, StepReport
from longprefill.workers.handoff.parts import HandoffPart, HandoffTarget, build_messages, layer_counts
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.prefill import StepPlan
from longprefill.workers.probe import RankObservation
from longprefill.workers.snapshot import SnapshotHeader, SnapshotIdentity, read_header
from longprefill.workers.spec import Whereabouts, WorkerSpec

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0
"""For a surviving rank to come back from a collective that failed."""
REPLACE_TIMEOUT_S = 60.0
"""For a new process in the place of a dead one."""
PLACE_POLL_S = 1.0


@dataclass(kw_only=True)
class _OpenJob:
    table: tuple[int, ...]
    num_tokens: int
    position: int = 0
    logits_owner: int | None = None


class PrefillGroup:
    """`ranks` are the running workers in rank order; they come from `new_workers` by way of `start_workers`."""

    def __init__(
        self,
        settings: ClusterSettings,
        config: ModelConfig,
        fingerprint: str,
        *,
        holder: Holder,
        watch: Watch,
        rank_resources: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.config = config
        self.fingerprint = fingerprint
        self.holder = holder
        self.watch = watch
        self.ranks: list[Watched] = []
        self.generation = 0
        self.placement: Any = None
        self.pages = PageAllocator(holder.num_pages)
        self._resources = {"CPU": 1.0} | dict(rank_resources or {})
        self._environment = dict(environment or {})
        self._store: Any = None
        self._is_broken = False
        self._jobs: dict[int, _OpenJob] = {}

    # ---- start and end ------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Asks for the group's place: a bundle for each tensor-parallel group, which so is on one machine. `placement`
        is ready when all of it is reserved."""
        self.placement = placement_group([self.bundle] * self.settings.cp, strategy="PACK")

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one tensor-parallel group."""
        return {name: amount * self.settings.tp for name, amount in self._resources.items()}

    def new_workers(self, ranks: Sequence[int] | None = None) -> list[NewWorker]:
        """Actors of these ranks (None: all) in the group's place, not started."""
        return [self._new_worker(rank) for rank in (range(self.settings.num_ranks) if ranks is None else ranks)]

    def form(self) -> None:
        """The ranks meet as a new generation."""
        settings = self.settings
        self.generation += 1
        if self._store is None:
            is_one_machine = all(rank.is_here for rank in self.ranks)
            address = "127.0.0.1" if is_one_machine else ray.util.get_node_ip_address()
            self._store, self._store_host, self._store_port = create_store(address)
        device = devices.resolve_device(settings.device)
        specs = {
            worker.label: GroupSpec(
                host=self._store_host,
                port=self._store_port,
                generation=self.generation,
                rank=rank,
                size=settings.num_ranks,
                device=str(device),
                backend=devices.backend_for(device),
                timeout_s=settings.collective_timeout_s,
            )
            for rank, worker in enumerate(self.ranks)
        }
        self._call("join", lambda worker: (specs[worker.label],))
        self._is_broken = False

    def close(self) -> None:
        """Ends every worker under watch, gives the place back and removes the pool files. Ray itself is its owner's to
        end."""
        workers = self.watch.clear()
        self.ranks = []
        for worker in workers:
            worker.end()  # at once, and a stopped process too, which would survive Ray's own end
        self.holder.close()
        self.forget_jobs()
        if self._store is not None:
            self._store.close()
            self._store = None
        if self.placement is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self.placement)
            self.placement = None

    def _new_worker(self, rank: int) -> NewWorker:
        label = f"prefill rank {rank}"
        strategy = PlacementGroupSchedulingStrategy(self.placement, rank // self.settings.tp)
        others = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU")}
        options: dict[str, Any] = {"num_cpus": self._resources["CPU"], "scheduling_strategy": strategy}
        if "GPU" in self._resources:
            options["num_gpus"] = self._resources["GPU"]
        if others:
            options["resources"] = others
        if self._environment:
            options["runtime_env"] = {"env_vars": self._environment}

        def spec(place: Whereabouts) -> WorkerSpec:
            is_here = place.machine == Whereabouts.here().machine
            pool = self.holder.create_pool(label) if is_here else None
            return self.holder.spec(pool, self.settings.place(rank))

        return NewWorker(label=label, actor=PrefillActor.options(**options).remote(), spec=spec)

    # ---- jobs and steps -----------------------------------------------------------------------------------------

    def open_job(self, job: int, tokens: np.ndarray, snapshot: str | None) -> int:
        """Gives a job pages and its prompt to all ranks; the position it stands at. After a failure the ranks meet
        anew first.

        Raises:
            UserError: not enough pages, or the snapshot cannot be used; the job is not open then.
            RunFailed: a worker died, hung or failed.
        """
        if self._is_broken:
            self.form()
        table = self.pages.allocate(job, len(tokens))
        self._jobs[job] = opened = _OpenJob(table=table, num_tokens=len(tokens))
        prompt = ray.put(tokens)
        try:
            positions = self._call("open_job", lambda worker: (job, prompt, table, snapshot))
        except (UserError, RunFailed):
            with contextlib.suppress(RunFailed):
                self.close_job(job)
            raise
        opened.position = min(positions.values())
        if opened.position == len(tokens):
            opened.logits_owner = 0
        return opened.position

    def run_step(
        self, slices: tuple[Slice, ...], ending: tuple[int, ...], *, with_stats: bool = False
    ) -> list[StepReport]:
        """One step on all ranks; what each rank says of it, in rank order. `ending` are the jobs that finish with
        it."""
        plan = StepPlan(slices=slices, layout=self.settings.layout, exchange="all_gather", logits_of=ending)
        self._is_broken = True  # until all ranks are through
        reports: dict[str, StepReport] = self._call("run_step", lambda worker: (plan, with_stats))
        self._is_broken = False
        for report in reports.values():
            for job in report.has_logits:
                owner = self._jobs[job].logits_owner
                self._jobs[job].logits_owner = report.rank if owner is None else min(owner, report.rank)
        for part in slices:
            self._jobs[part.job].position = part.end
        return sorted(reports.values(), key=lambda report: report.rank)

    def close_job(self, job: int) -> None:
        """Frees a job's pages."""
        self._call("close_job", lambda worker: (job,))
        self.pages.release(job)
        del self._jobs[job]

    def forget_jobs(self) -> None:
        """All jobs are lost; what ranks still hold of them goes with `revive`."""
        self._jobs.clear()
        self.pages = PageAllocator(self.holder.num_pages)

    def revive(self) -> int:
        """Makes a group whose work failed usable again, all jobs forgotten: ranks that do not answer are replaced, and
        all meet anew. The number of replaced ranks.

        Raises:
            UserError, RunFailed: it cannot be done in place.
        """
        self.forget_jobs()
        closing = {worker.actor.close_all.remote(): rank for rank, worker in enumerate(self.ranks)}
        ready, _ = ray.wait(list(closing), num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        answering: set[int] = set()
        for ref in ready:
            with contextlib.suppress(RayError):
                ray.get(ref)
                answering.add(closing[ref])
        lost = [rank for rank in range(len(self.ranks)) if rank not in answering]
        for rank in lost:
            self.watch.remove(self.ranks[rank])
            self.ranks[rank].end()
        if lost:
            new = self.new_workers(lost)
            self._await_placed(new)
            started = start_workers(self.watch, new)
            for rank, worker in zip(lost, started, strict=True):
                self.ranks[rank] = worker.watched
        self.form()
        return len(lost)

    def _await_placed(self, workers: Sequence[NewWorker]) -> None:
        """Raises RunFailed when the place is gone with its machine, or nothing runs there in time."""
        pending = [worker.actor.describe.remote() for worker in workers]
        deadline = time.monotonic() + REPLACE_TIMEOUT_S
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=PLACE_POLL_S)
            if pending and placement_group_table(self.placement)["state"] != "CREATED":
                raise RunFailed("its place is gone with a machine")
            if pending and time.monotonic() > deadline:
                raise RunFailed(f"no new process came up in its place within {REPLACE_TIMEOUT_S:.0f} s")

    def is_open(self, job: int) -> bool:
        return job in self._jobs

    @property
    def jobs(self) -> tuple[int, ...]:
        """Open jobs."""
        return tuple(self._jobs)

    def num_tokens(self, job: int) -> int:
        """Of the job's prompt."""
        return self._jobs[job].num_tokens

    def position(self, job: int) -> int:
        """Prompt tokens that are done."""
        return self._jobs[job].position

    def dump(self, job: int, path: str) -> None:
        self._call("dump", lambda worker: (job, path, self._owner(job)))

    def final_tensors(self, job: int) -> dict[str, np.ndarray]:
        found = self._call("final_tensors", lambda worker: (job, self._owner(job)))
        return found[self.ranks[0].label]

    def export_job(self, job: int, path: str, tokens: np.ndarray) -> None:
        """The rank that has the logits writes, else rank 0: the caches are replicated."""
        writer = self._jobs[job].logits_owner or 0
        self._call("export_job", lambda worker: (job, path, tokens, writer))

    def read_snapshot(self, path: str) -> SnapshotHeader:
        """UserError: it is of another model, dtype or format."""
        identity = SnapshotIdentity(
            fingerprint=self.fingerprint, dtype=self.settings.dtype, formats=self.holder.formats
        )
        return read_header(path, identity)

    # ---- sending (orchestrator/handoff.py) ----------------------------------------------------------------------

    def check_link(self, address: PoolAddress, identity: str) -> dict[str, str]:
        """Why ranks cannot write to a decode worker's pool, by their labels; empty: all can."""
        found = self._call("check_link", lambda worker: (address, identity))
        return {label: reason for label, reason in found.items() if reason is not None}

    def open_transfer(self, job: int, target: HandoffTarget) -> str | None:
        """What is done goes to the target now, every further step's pages as it ends. Why a rank cannot send there, or
        None."""
        errors = self._call("open_handoff", lambda worker: (job, target, self._jobs[job].position))
        return next((f"{label}: {error}" for label, error in errors.items() if error is not None), None)

    def finish_transfer(self, job: int) -> list[HandoffPart]:
        """What the ranks have sent, once all of it has arrived."""
        return list(self._call("finish_handoff", lambda worker: (job,)).values())

    def cancel_transfer(self, job: int) -> None:
        """Stops sending; returns when nothing is in flight."""
        self._call("cancel_handoff", lambda worker: (job,))

    def messages(
        self, job: int, parts: Sequence[HandoffPart], *, transfer_id: str, attempt: int
    ) -> tuple[bytes, bytes]:
        """(manifest, commit) of a finished job."""
        return build_messages(
            parts,
            transfer_id=transfer_id,
            attempt=attempt,
            job=job,
            fingerprint=self.fingerprint,
            formats=self.holder.formats,
            layers=layer_counts(self.config),
            position=self._jobs[job].num_tokens,
        )

    # ---- measurements and choices -------------------------------------------------------------------------------

    def record_choices(self) -> None:
        self._call("record_choices", lambda worker: ())

    def take_choices(self) -> Record:
        """All ranks' recorded choices."""
        merged: Record = {}
        for record in self._call("take_choices", lambda worker: ()).values():
            merged |= record
        return merged

    def replay_choices(self, record: Record, *, keep_own: bool = False) -> None:
        shared = ray.put(record)
        self._call("replay_choices", lambda worker: (shared, keep_own))

    def end_replay(self) -> list[ChoiceReport]:
        return list(self._call("end_replay", lambda worker: ()).values())

    def start_probe(self, logit_rows: int) -> None:
        """Keeps activations from now on."""
        self._call("start_probe", lambda worker: (logit_rows,))

    def take_probe(self, job: int) -> list[RankObservation]:
        """What the ranks kept of a job and what it left, in rank order."""
        found = self._call("take_probe", lambda worker: (job,))
        return [found[worker.label] for worker in self.ranks]

    def _call(self, method: str, arguments: Callable[[Watched], tuple[Any, ...]]) -> dict[str, Any]:
        return self.watch.wait(
            {worker.label: getattr(worker.actor, method).remote(*arguments(worker)) for worker in self.ranks}
        )

    def _owner(self, job: int) -> int:
        owner = self._jobs[job].logits_owner
        if owner is None:
            raise RunFailed(f"job {job} is not finished: it has no logits yet")
        return owner
