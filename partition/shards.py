"""Row shards: how the rows of one context-parallel rank are dealt over the ranks of its tensor-parallel group.

Sequence parallelism keeps each row's per-token work (norms, latents, index queries, routing) on one rank of the group.
Every fragment is cut into one run a rank, in turn forwards and backwards, so that a rank's runs at a zigzag's head and
tail even out the causal index work. Nothing is padded; runs may be empty. Cuts lie on multiples of `align` in absolute
positions, so that a pooled index key has one owner.

World ranks count the tensor-parallel ranks of context-parallel rank 0 first: world = cp * num_tp + tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout


@dataclass(frozen=True, kw_only=True)
class RowShards:
    """The shards of a layout. A *run* is a `Fragment` whose `rank` is a world rank; its `order` is that of the
    fragment that it is part of.

    Raises:
        ValueError: num_tp below 1, or an `align` that does not divide the page.
    """

    layout: Layout
    num_tp: int
    align: int

    def __post_init__(self) -> None:
        if self.num_tp < 1:
            raise ValueError(f"num_tp={self.num_tp}: a tensor-parallel group has at least 1 rank")
        if self.align < 1 or PAGE_TOKENS % self.align:
            raise ValueError(f"align={self.align}: needs a divisor of {PAGE_TOKENS}")

    def runs(self, world_rank: int) -> tuple[Fragment, ...]:
        """The non-empty runs of a world rank, in the order of its rows."""
        return self._runs[world_rank]

    @property
    def num_world(self) -> int:
        return self.layout.num_ranks * self.num_tp

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of every world rank."""
        return tuple(sum(run.length for run in runs) for runs in self._runs)

    def local_rows(self, world_rank: int) -> tuple[range, ...]:
        """For each run, its rows among the local rows of the context-parallel rank."""
        cp_rank = world_rank // self.num_tp
        rows: list[range] = []
        for run in self._runs[world_rank]:
            fragment = self._parent(cp_rank, run)
            first = self.layout.local_row(fragment) + run.start - fragment.start
            rows.append(range(first, first + run.length))
        return tuple(rows)

    def _parent(self, cp_rank: int, run: Fragment) -> Fragment:
        return next(
            fragment
            for fragment in self.layout.local(cp_rank)
            if fragment.job == run.job and fragment.order == run.order
        )

    @cached_property
    def _runs(self) -> tuple[tuple[Fragment, ...], ...]:
        return tuple(tuple(self._cut(world // self.num_tp, world % self.num_tp)) for world in range(self.num_world))

    def _cut(self, cp_rank: int, tp_rank: int) -> list[Fragment]:
        runs: list[Fragment] = []
        for number, fragment in enumerate(self.layout.local(cp_rank)):
            place = tp_rank if number % 2 == 0 else self.num_tp - 1 - tp_rank
            first_block = fragment.start // self.align
            num_blocks = -(-fragment.end // self.align) - first_block
            start, end = (
                min(max((first_block + num_blocks * p // self.num_tp) * self.align, fragment.start), fragment.end)
                for p in (place, place + 1)
            )
            if end > start:
                runs.append(
                    Fragment(
                        job=fragment.job,
                        start=start,
                        length=end - start,
                        rank=cp_rank * self.num_tp + tp_rank,
                        order=fragment.order,
                    )
                )
        return runs


def even_ranges(total: int, parts: int) -> tuple[range, ...]:
    """`total` things cut into `parts` neighbouring runs whose sizes differ by at most one; there may be fewer things
    than parts. How columns, vocabulary and experts are split, so that they need not divide.
    """
    return tuple(range(total * part // parts, total * (part + 1) // parts) for part in range(parts))
