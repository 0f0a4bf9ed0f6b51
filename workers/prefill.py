"""One prefill rank without any transport or actor around it: jobs, steps, boundary states, exports.

Call order: `open_job` (fresh or from a snapshot) - `run_step` for every step of the plan - `read_*` / hand-off -
`close_job`. All ranks of a group get the same calls in the same order; they decide nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from longprefill.comms.group import Group
from longprefill.kernels.backends import KernelTable
from longprefill.partition.generators import LayoutKind, generate
from longprefill.partition.layout import Layout, Slice
from longprefill.workers.cache.pages import CachePool, JobCache
from longprefill.workers.cache.states import BoundaryState, packed_bytes
from longprefill.workers.model.layers.context import Choices, JobStep, StepContext
from longprefill.workers.model.model import Model
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
    ) -> None:
        self.model = model
        self.group = group
        self.pool = pool
        self.kernels = kernels
        self.dtype = dtype
        self.tracer = tracer
        self.device = device or torch.device("cpu")
        self.keep_unpooled_keys = keep_unpooled_keys
        self.choices: Choices | None = None
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

    def num_tokens(self, job: int) -> int:
        """Length of the job's prompt."""
        return self._jobs[job].tokens.numel()

    def cache(self, job: int) -> JobCache:
        return self._jobs[job].cache

    def unpooled_keys(self, job: int) -> Mapping[int, list[tuple[int, int, torch.Tensor]]]:
        """With `keep_unpooled_keys`: index keys before pooling that this rank computed."""
        return self._jobs[job].unpooled_keys

    @torch.inference_mode()
    def run_step(self, plan: StepPlan) -> StepResult:
        """Runs all layers over this rank's share of the step and replicates the new boundary states.

        Raises:
            GroupError: a peer failed or a deadline passed; the jobs stand where they stood before the step.
            ValueError: a slice does not continue its job.
        """
        started = time.perf_counter()
        layout = generate(plan.layout, plan.slices, self.group.size)
        ctx = self._context(plan, layout)
        parts = [self._jobs[f.job].tokens[f.start : f.end] for f in ctx.local]
        token_ids_T = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        hidden_TD = self.model.forward(token_ids_T.to(self.device), ctx)
        logits = self._logits(plan, hidden_TD, ctx)
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
            rank=self.group.rank,
            group=self.group,
            kernels=self.kernels,
            dtype=self.dtype,
            pool=self.pool,
            jobs=jobs,
            tracer=self.tracer,
            exchange=plan.exchange,
            choices=self.choices,
            unpooled_keys={} if self.keep_unpooled_keys else None,
        )

    def _logits(self, plan: StepPlan, hidden_TD: torch.Tensor, ctx: StepContext) -> dict[int, torch.Tensor]:
        result: dict[int, torch.Tensor] = {}
        for n, fragment in enumerate(ctx.local):
            if fragment.job in plan.logits_of and ctx.is_last(fragment):
                row = ctx.offsets[n + 1] - 1
                result[fragment.job] = self.model.logits(hidden_TD[row : row + 1], ctx)[0]
        for layer, entries in (ctx.unpooled_keys or {}).items():
            for entry in entries:
                self._jobs[entry[0]].unpooled_keys.setdefault(layer, []).append(entry)
        return result

    def _replicate_states(self, ctx: StepContext) -> dict[int, BoundaryState]:
        """Every rank gets every job's new state, bit for bit, from the rank that owns the job's last fragment."""
        config = self.model.config
        owned: list[list[int]] = [[] for _ in range(ctx.layout.num_ranks)]
        for job in ctx.jobs:
            owned[ctx.layout.chain(job)[-1].rank].append(job)
        sizes = {job: packed_bytes(config, step.slice.end, self.dtype) for job, step in ctx.jobs.items()}
        parts = [ctx.jobs[job].after.pack() for job in owned[ctx.rank]]
        local = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        counts = [sum(sizes[job] for job in jobs) for jobs in owned]
        gathered = self.group.all_gather_rows(local, counts, op="boundary_state") if any(counts) else local
        states: dict[int, BoundaryState] = {}
        offset = 0
        for jobs in owned:
            for job in jobs:
                packed = gathered[offset : offset + sizes[job]]
                states[job] = BoundaryState.unpack(config, ctx.jobs[job].slice.end, self.dtype, packed)
                offset += sizes[job]
        return states
