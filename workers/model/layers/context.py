"""What the layers of one rank share during one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from longprefill.comms.group import Group
from longprefill.kernels.backends import KernelTable
from longprefill.kernels.contracts import Routing
from longprefill.kernels.paged import PagedRows
from longprefill.partition.layout import Fragment, Layout, Slice
from longprefill.workers.cache.pages import CachePool, JobCache
from longprefill.workers.cache.states import BoundaryState
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
    """Sees every discrete choice and may replace it: recording, replaying and proving near ties (workers/choices.py)."""

    def positions(
        self, layer: int, fragment: Fragment, first_row: int, chosen_TS: torch.Tensor, query_TIX: torch.Tensor,
        weight_TI: torch.Tensor, keys: PagedRows,
    ) -> torch.Tensor:  # fmt: skip
        """Index top-k of fragment rows first_row, first_row + 1, ...: returns the positions to use."""
        ...

    def experts(self, layer: int, context: StepContext, scores_TE: torch.Tensor, routing: Routing) -> Routing:
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
    choices: Choices | None = None
    unpooled_keys: dict[int, list[tuple[int, int, torch.Tensor]]] | None = None
    """With k-pool, `--dump` wants the keys before pooling: (job, start, fp32 [T, X]) by layer; None: not wanted."""
    local: tuple[Fragment, ...] = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    """First local row of each local fragment, and the number of local rows."""
    positions_T: torch.Tensor = field(init=False)
    """int64 global position of every local row."""

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

    def is_last(self, fragment: Fragment) -> bool:
        """Whether the fragment ends its job's chain in this step."""
        return fragment.end == self.jobs[fragment.job].slice.end
