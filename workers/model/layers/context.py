"""What the layers of one rank share during one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from longprefill.kernels.backends import KernelTable
from longprefill.kernels.contracts import Routing
from longprefill.kernels.paged import PagedRows
from longprefill.partition.halo import HaloPlan, halo_exchange
from longprefill.partition.layout import Fragment, Layout, Slice
from longprefill.partition.shards import RowShards
from longprefill.workers.cache.pages import CachePool, JobCache
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.mesh import Mesh
from longprefill.workers.model.config import MoeConfig
from longprefill.workers.trace import Tracer


@dataclass(kw_only=True)
class JobStep:
    """One job's part in the step, the same on every rank."""

    slice: Slice
    cache: JobCache
    before: BoundaryState
    """The boundary state at `slice.start`."""
    after: BoundaryState
    """Filled layer by layer, only on the rank that owns the job's last fragment; replicated at the end of the step."""


@dataclass(frozen=True, kw_only=True)
class PositionChoice:
    """Index top-k of a run's rows first_row, first_row + 1, ... and what it was made from."""

    layer: int
    run: Fragment
    first_row: int
    chosen_TS: torch.Tensor
    query_TIX: torch.Tensor
    weight_TI: torch.Tensor
    keys: PagedRows
    pool: int

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.run.start + self.first_row


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Expert top-k of all own rows and what it was made from."""

    layer: int
    config: MoeConfig
    logits_TE: torch.Tensor
    bias_E: torch.Tensor | None
    routing: Routing


class Choices(Protocol):
    """Sees every discrete choice and may replace it: recording, replaying and proving near ties
    (workers/choices.py)."""

    def positions(self, choice: PositionChoice, context: StepContext) -> torch.Tensor:
        """The positions to use, [T, S] as chosen."""
        ...

    def experts(self, choice: ExpertChoice, context: StepContext) -> Routing:
        """The routing to use; experts are chosen by score plus bias."""
        ...


class Probe(Protocol):
    """Sees activations between sub-blocks (workers/probe.py)."""

    def take(self, layer: int, point: str, rows_SX: torch.Tensor, context: StepContext) -> None:
        """Own rows [S, ...] at a point of a layer, which must not be changed or kept without a copy."""
        ...

    def keep(self, layer: int, point: str, job: int, start: int, rows_SX: torch.Tensor) -> None:
        """Rows start, start + 1, ... of a job, likewise."""
        ...


@dataclass(kw_only=True)
class StepContext:
    """Two sets of rows: the *local rows* of the context-parallel rank (its fragments; each tensor-parallel rank has
    some of the heads for all of them), and this rank's *own rows*, its share of them for work per token (its runs).
    With one tensor-parallel rank the two are the same."""

    layout: Layout
    mesh: Mesh
    kernels: KernelTable
    dtype: torch.dtype
    pool: CachePool
    jobs: dict[int, JobStep]
    tracer: Tracer
    exchange: str
    """How KDA states travel: a name of state_exchange.EXCHANGES."""
    expert_parallel: bool
    """Experts are spread over the world; else every rank has all of them."""
    row_align: int
    """Own rows are cut at multiples of this: the largest k-pool of the model."""
    choices: Choices | None = None
    probe: Probe | None = None
    unpooled_keys: dict[int, list[tuple[int, int, torch.Tensor]]] | None = None
    """With k-pool, `--dump` wants the keys before pooling: (job, start, fp32 [T, X]) by layer; None: not wanted."""
    selection: list[torch.Tensor] = field(init=False, default_factory=list)
    """What the last attention layer with an indexer chose for each local fragment, where a later layer reuses it."""
    shards: RowShards = field(init=False)
    local: tuple[Fragment, ...] = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    """First local row of each local fragment, and the number of local rows."""
    runs: tuple[Fragment, ...] = field(init=False)
    run_offsets: tuple[int, ...] = field(init=False)
    """First own row of each run, and the number of own rows."""
    positions_T: torch.Tensor = field(init=False)
    """int64 global position of every local row."""
    own_positions_S: torch.Tensor = field(init=False)
    """int64 global position of every own row."""
    _halo_plans: dict[int, HaloPlan] = field(init=False, default_factory=dict)
    _own_rows: tuple[torch.Tensor, ...] = field(init=False)
    """Local rows that each tensor-parallel rank owns."""

    def __post_init__(self) -> None:
        self.shards = RowShards(layout=self.layout, num_tp=self.mesh.tp.size, align=self.row_align)
        self.local = self.layout.local(self.mesh.cp.rank)
        self.runs = self.shards.runs(self.mesh.world.rank)
        self.offsets, self.run_offsets = _offsets(self.local), _offsets(self.runs)
        self.positions_T, self.own_positions_S = _positions(self.local), _positions(self.runs)
        first = self.mesh.cp.rank * self.mesh.tp.size
        self._own_rows = tuple(_rows(self.shards.local_rows(first + tp)) for tp in range(self.mesh.tp.size))

    def observe(self, layer: int, point: str, rows_SX: torch.Tensor) -> None:
        """Shows own rows to the probe, if there is one."""
        if self.probe is not None:
            self.probe.take(layer, point, rows_SX, self)

    def gather_rows(self, own_SX: torch.Tensor, *, op: str) -> torch.Tensor:
        """Own rows of all tensor-parallel ranks as local rows [T, ...]."""
        if self.mesh.tp.size == 1:
            return own_SX
        counts = [rows.numel() for rows in self._own_rows]
        with self.tracer.span(op, "collective"):
            gathered_TX = self.mesh.tp.all_gather_rows(own_SX, counts, op=op)
        local_TX = torch.empty_like(gathered_TX)
        local_TX[torch.cat(self._own_rows)] = gathered_TX
        return local_TX

    def scatter_sum(self, partial_TX: torch.Tensor, *, op: str) -> torch.Tensor:
        """Partial results of all tensor-parallel ranks, summed in fp32 in rank order, own rows only [S, ...]."""
        tp = self.mesh.tp
        if tp.size == 1:
            return partial_TX
        own = self._own_rows[tp.rank]
        others = [peer for peer in range(tp.size) if peer != tp.rank]
        with self.tracer.span(op, "collective"):
            parts = tp.exchange(
                {peer: partial_TX[self._own_rows[peer]] for peer in others},
                {peer: (own.numel(), *partial_TX.shape[1:]) for peer in others},
                dtype=partial_TX.dtype,
                op=op,
            )
        parts[tp.rank] = partial_TX[own]
        total = parts[0].float()
        for peer in range(1, tp.size):
            total = total + parts[peer].float()
        return total.to(partial_TX.dtype)

    def halo_plan(self, width: int) -> HaloPlan:
        """Which rows a causal conv of `width` past rows sends and receives in this step; the same for every layer."""
        if width not in self._halo_plans:
            self._halo_plans[width] = halo_exchange(self.layout, width, self.mesh.cp.rank)
        return self._halo_plans[width]

    def is_first(self, run: Fragment) -> bool:
        """Whether the run or fragment begins its job's slice of this step."""
        return run.start == self.jobs[run.job].slice.start

    def is_last(self, run: Fragment) -> bool:
        """Whether the run or fragment ends its job's slice of this step."""
        return run.end == self.jobs[run.job].slice.end


def _offsets(runs: tuple[Fragment, ...]) -> tuple[int, ...]:
    offsets = [0]
    for run in runs:
        offsets.append(offsets[-1] + run.length)
    return tuple(offsets)


def _positions(runs: tuple[Fragment, ...]) -> torch.Tensor:
    return _rows(tuple(range(run.start, run.end) for run in runs))


def _rows(ranges: tuple[range, ...]) -> torch.Tensor:
    parts = [torch.arange(rows.start, rows.stop, dtype=torch.int64) for rows in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
