"""One prefill rank without any transport or actor around it: jobs, steps, boundary states, exports.

Call order: `open_job` (fresh or from a snapshot) - `run_step` for every step of the plan - `read_*` / hand-off -
`close_job`. All ranks of a group get the same calls in the same order; they decide nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from longprefill.comms.group import Group
from longprefill.kernels.backends import KernelTable
from longprefill.partition.generators import LayoutKind, generate
from longprefill.partition.layout import Layout, Slice
from longprefill.workers.cache.pages import CachePool, JobCache
from longprefill.workers.cache.states import BoundaryState, kda_bytes, merge_states, pool_tail_bytes, shard_state
from longprefill.workers.device import flushed_denormals
from longprefill.workers.mesh import Mesh
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.layers.context import Choices, JobStep, StepContext
from longprefill.workers.model.model import Model
from longprefill.workers.probe import ActivationProbe
from longprefill.workers.trace import Tracer


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step does; the same object goes to every rank."""

    slices: tuple[Slice, ...]
    layout: LayoutKind
    exchange: str
    """A name of state_exchange.EXCHANGES."""
    logits_of: tuple[int, ...]
    """Jobs whose last prompt token is in this step."""


@dataclass(kw_only=True)
class StepResult:
    seconds: float
    logits: dict[int, torch.Tensor]
    """fp32 [vocab] of the jobs in `logits_of` whose last token this rank computed."""


@dataclass(kw_only=True)
class _Job:
    tokens: torch.Tensor
    cache: JobCache
    state: BoundaryState
    unpooled_keys: dict[int, list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)


class PrefillRank:
    """The state of one rank. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        group: Group,
        pool: CachePool,
        kernels: KernelTable,
        *,
        dtype: torch.dtype,
        tracer: Tracer,
        device: torch.device | None = None,
        keep_unpooled_keys: bool = False,
        num_tp: int = 1,
        expert_parallel: bool = False,
        full_config: ModelConfig | None = None,
    ) -> None:
        """`model` has this rank's share of the weights, `full_config` describes the whole of it (None: the same)."""
        self.model = model
        self.mesh = Mesh.over(group, num_tp)
        self.expert_parallel = expert_parallel
        self.full_config = full_config or model.config
        self.pool = pool
        self.kernels = kernels
        self.dtype = dtype
        self.tracer = tracer
        self.device = device or torch.device("cpu")
        self.keep_unpooled_keys = keep_unpooled_keys
        self.choices: Choices | None = None
        self.probe: ActivationProbe | None = None
        self._jobs: dict[int, _Job] = {}

    def open_job(
        self, job: int, tokens: torch.Tensor, table: tuple[int, ...], state: BoundaryState | None = None
    ) -> None:
        """Takes a job: its whole prompt (int64 [T]), its pages, and where it stands (None: at its start). The pages of
        a job that resumes must already hold the rows of its first `state.position` tokens.

        Raises:
            ValueError: the job is open, or the pages cannot hold the prompt.
        """
        if job in self._jobs:
            raise ValueError(f"job {job} is already open")
        cache = JobCache(self.pool, table)
        if cache.max_tokens < tokens.numel():
            raise ValueError(f"job {job} has {tokens.numel()} tokens, its {len(table)} pages hold {cache.max_tokens}")
        if state is None:
            state = BoundaryState.start(self.model.config, self.dtype, self.device)
        self._jobs[job] = _Job(tokens=tokens, cache=cache, state=state)

    def close_job(self, job: int) -> None:
        """Forgets a job; its pages may be given to another."""
        del self._jobs[job]

    def state(self, job: int) -> BoundaryState:
        """The boundary state after the job's last step."""
        return self._jobs[job].state

    @property
    def group(self) -> Group:
        """The world group; a new generation of it may be set between steps, open jobs stay."""
        return self.mesh.world

    @group.setter
    def group(self, world: Group) -> None:
        self.mesh = Mesh.over(world, self.mesh.tp.size)

    def whole_state(self, job: int) -> BoundaryState:
        """The job's boundary state with the heads of all tensor-parallel ranks. A collective of the TP group."""
        state = self.state(job)
        tp = self.mesh.tp
        if tp.size == 1:
            return state
        packed = state.pack()
        gathered = tp.all_gather_rows(packed, [packed.numel()] * tp.size, op="whole_state")
        parts = [
            BoundaryState.unpack(self.model.config, state.position, self.dtype, part)
            for part in gathered.chunk(tp.size)
        ]
        return merge_states(parts, self.full_config)

    def share_of(self, whole: BoundaryState) -> BoundaryState:
        """This rank's heads of a whole model's boundary state."""
        return shard_state(whole, self.full_config, self.mesh.tp.rank, self.mesh.tp.size)

    def num_tokens(self, job: int) -> int:
        """Length of the job's prompt."""
        return self._jobs[job].tokens.numel()

    def cache(self, job: int) -> JobCache:
        return self._jobs[job].cache

    def unpooled_keys(self, job: int) -> Mapping[int, list[tuple[int, int, torch.Tensor]]]:
        """With `keep_unpooled_keys`: index keys before pooling that this rank computed."""
        return self._jobs[job].unpooled_keys

    @flushed_denormals()
    @torch.inference_mode()
    def run_step(self, plan: StepPlan) -> StepResult:
        """Runs all layers over this rank's share of the step and replicates the new boundary states.

        Raises:
            GroupError: a peer failed or a deadline passed; the jobs stand where they stood before the step.
            ValueError: a slice does not continue its job.
        """
        started = time.perf_counter()
        layout = generate(plan.layout, plan.slices, self.mesh.cp.size)
        ctx = self._context(plan, layout)
        parts = [self._jobs[run.job].tokens[run.start : run.end] for run in ctx.runs]
        token_ids_S = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        hidden_SD = self.model.forward(token_ids_S.to(self.device), ctx)
        logits = self._logits(plan, hidden_SD, ctx)
        if self.probe is not None:
            self._probe_logits(self.probe, hidden_SD, ctx)
        self._keep_unpooled_keys(ctx)
        with self.tracer.span("boundary_state", "collective"):
            states = self._replicate_states(ctx)
        for job, state in states.items():
            self._jobs[job].state = state
        return StepResult(seconds=time.perf_counter() - started, logits=logits)

    def _context(self, plan: StepPlan, layout: Layout) -> StepContext:
        jobs: dict[int, JobStep] = {}
        for part in plan.slices:
            job = self._jobs[part.job]
            if job.state.position != part.start:
                raise ValueError(f"job {part.job} stands at {job.state.position}, the step starts at {part.start}")
            if part.end > job.tokens.numel():
                raise ValueError(f"job {part.job} has {job.tokens.numel()} tokens, the step ends at {part.end}")
            after = BoundaryState(position=part.end, kda={}, pool_tails={})
            jobs[part.job] = JobStep(slice=part, cache=job.cache, before=job.state, after=after)
        return StepContext(
            layout=layout,
            mesh=self.mesh,
            kernels=self.kernels,
            dtype=self.dtype,
            pool=self.pool,
            jobs=jobs,
            tracer=self.tracer,
            exchange=plan.exchange,
            expert_parallel=self.expert_parallel,
            row_align=self.model.largest_pool,
            choices=self.choices,
            probe=self.probe,
            unpooled_keys={} if self.keep_unpooled_keys else None,
        )

    def _logits(self, plan: StepPlan, hidden_SD: torch.Tensor, ctx: StepContext) -> dict[int, torch.Tensor]:
        """Of the jobs that end here: on every tensor-parallel rank of the group that owns their last fragment."""
        owned = [job for job in plan.logits_of if ctx.layout.chain(job)[-1].rank == self.mesh.cp.rank]
        last_rows = {run.job: ctx.run_offsets[n + 1] - 1 for n, run in enumerate(ctx.runs) if ctx.is_last(run)}
        own_rows = [last_rows[job] for job in owned if job in last_rows]
        counts = [0] * self.mesh.tp.size
        for tp_rank in range(self.mesh.tp.size):
            runs = ctx.shards.runs(self.mesh.cp.rank * self.mesh.tp.size + tp_rank)
            counts[tp_rank] = sum(run.job in owned and ctx.is_last(run) for run in runs)
        hidden_JD = self.mesh.tp.all_gather_rows(hidden_SD[own_rows], counts, op="last_rows")
        logits_JV = self.model.logits(hidden_JD, ctx)
        # the gather is in rank order: the jobs of a rank's runs, rank by rank
        jobs = [
            run.job
            for tp_rank in range(self.mesh.tp.size)
            for run in ctx.shards.runs(self.mesh.cp.rank * self.mesh.tp.size + tp_rank)
            if run.job in owned and ctx.is_last(run)
        ]
        return {job: logits_JV[n] for n, job in enumerate(jobs)}

    def _probe_logits(self, probe: ActivationProbe, hidden_SD: torch.Tensor, ctx: StepContext) -> None:
        """Logits of the last rows of every job, from all tensor-parallel ranks together; one of them keeps them. One
        call on every rank, also without rows: collectives of a part of the mesh are collectives of all of it."""
        hidden_TD = ctx.gather_rows(hidden_SD, op="probe")
        parts: list[tuple[int, int, torch.Tensor]] = []
        for n, fragment in enumerate(ctx.local):
            first = max(self.num_tokens(fragment.job) - probe.logit_rows, fragment.start)
            if first < fragment.end:
                rows_ND = hidden_TD[ctx.offsets[n] + first - fragment.start : ctx.offsets[n + 1]]
                parts.append((fragment.job, first, rows_ND))
        logits_NV = self.model.logits(torch.cat([hidden_TD[:0], *(rows_ND for *_, rows_ND in parts)]), ctx)
        if self.mesh.tp.rank == 0:
            for (job, first, _), rows_NV in zip(parts, logits_NV.split([len(r) for *_, r in parts]), strict=True):
                probe.keep(len(self.model.layers), "logits", job, first, rows_NV)

    def _keep_unpooled_keys(self, ctx: StepContext) -> None:
        for layer, entries in (ctx.unpooled_keys or {}).items():
            for entry in entries:
                self._jobs[entry[0]].unpooled_keys.setdefault(layer, []).append(entry)

    def _replicate_states(self, ctx: StepContext) -> dict[int, BoundaryState]:
        """Every rank gets every job's new state, bit for bit: the KDA states (its heads of them) from the rank that
        owns the job's last fragment, the incomplete pools from the rank that owns its last run."""
        config = self.model.config
        fragment_owner = {job: ctx.layout.chain(job)[-1].rank for job in ctx.jobs}
        run_owner = {
            run.job: rank for rank in range(ctx.shards.num_world) for run in ctx.shards.runs(rank) if ctx.is_last(run)
        }
        kda_size = kda_bytes(config, self.dtype)
        tail_sizes = {job: pool_tail_bytes(config, step.slice.end) for job, step in ctx.jobs.items()}
        states = {job: step.after for job, step in ctx.jobs.items()}
        kda = _replicate(
            self.mesh.cp, fragment_owner, dict.fromkeys(ctx.jobs, kda_size), lambda job: states[job].pack_kda()
        )
        tails = _replicate(self.mesh.world, run_owner, tail_sizes, lambda job: states[job].pack_pool_tails())
        return {
            job: BoundaryState.unpack(config, step.slice.end, self.dtype, torch.cat((kda[job], tails[job])))
            for job, step in ctx.jobs.items()
        }


def _replicate(
    group: Group, owner: Mapping[int, int], sizes: Mapping[int, int], packed: Callable[[int], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Byte strings of all jobs on every rank of the group, each from the rank that owns it."""
    owned = [[job for job in sizes if owner[job] == rank] for rank in range(group.size)]
    counts = [sum(sizes[job] for job in jobs) for jobs in owned]
    empty = torch.empty(0, dtype=torch.uint8)
    if not any(counts):
        return dict.fromkeys(sizes, empty)
    parts = [packed(job) for job in owned[group.rank]]
    gathered = group.all_gather_rows(torch.cat(parts) if parts else empty, counts, op="boundary_state")
    result: dict[int, torch.Tensor] = {}
    offset = 0
    for jobs in owned:
        for job in jobs:
            result[job] = gathered[offset : offset + sizes[job]]
            offset += sizes[job]
    return result
