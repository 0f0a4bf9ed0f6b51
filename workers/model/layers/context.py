"""What the layers of one rank share during one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from longprefill.comms.group import Group
from longprefill.kernels.backends import KernelTable
from longprefill.kernels.contracts import Routing
from longprefill.kernels.paged import PagedRows
from longprefill.partition.halo import HaloPlan, halo_exchange
from longprefill.partition.layout import Fragment, Layout, Slice
from longprefill.workers.cache.pages import CachePool, JobCache
from longprefill.workers.cache.states import BoundaryState
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


class Choices(Protocol):
    """Sees every discrete choice and may replace it: recording, replaying and proving near ties
    (workers/choices.py)."""

    def positions(
        self,
        layer: int,
        fragment: Fragment,
        first_row: int,
        chosen_TS: torch.Tensor,
        query_TIX: torch.Tensor,
        weight_TI: torch.Tensor,
        keys: PagedRows,
        pool: int,
        context: StepContext,
    ) -> torch.Tensor:
        """Index top-k of fragment rows first_row, first_row + 1, ...: returns the positions to use."""
        ...

    def experts(
        self, layer: int, config: MoeConfig, context: StepContext, logits_TE: torch.Tensor, routing: Routing
    ) -> Routing:
        """Expert top-k of all local rows: returns the routing to use."""
        ...


@dataclass(kw_only=True)
class StepContext:
    layout: Layout
    rank: int
    group: Group
    kernels: KernelTable
    dtype: torch.dtype
    pool: CachePool
    jobs: dict[int, JobStep]
    tracer: Tracer
    exchange: str
    """How KDA states travel: a name of state_exchange.EXCHANGES."""
    choices: Choices | None = None
    unpooled_keys: dict[int, list[tuple[int, int, torch.Tensor]]] | None = None
    """With k-pool, `--dump` wants the keys before pooling: (job, start, fp32 [T, X]) by layer; None: not wanted."""
    local: tuple[Fragment, ...] = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    """First local row of each local fragment, and the number of local rows."""
    positions_T: torch.Tensor = field(init=False)
    """int64 global position of every local row."""
    _halo_plans: dict[int, HaloPlan] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.local = self.layout.local(self.rank)
        offsets = [0]
        for fragment in self.local:
            offsets.append(offsets[-1] + fragment.length)
        self.offsets = tuple(offsets)
        ranges = [torch.arange(f.start, f.end, dtype=torch.int64) for f in self.local]
        self.positions_T = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    @property
    def num_rows(self) -> int:
        return self.offsets[-1]

    def halo_plan(self, width: int) -> HaloPlan:
        """Which rows a causal conv of `width` past rows sends and receives in this step; the same for every layer."""
        if width not in self._halo_plans:
            self._halo_plans[width] = halo_exchange(self.layout, width, self.rank)
        return self._halo_plans[width]

    def is_last(self, fragment: Fragment) -> bool:
        """Whether the fragment ends its job's chain in this step."""
        return fragment.end == self.jobs[fragment.job].slice.end
