"""Halo of a causal convolution: where the `width` rows before each fragment come from (kernel width = width + 1).

A row before a fragment's start is one of three things: a row of this step (on any rank, the same one included; a halo
spans several fragments when one is shorter than the width), a row of the conv tail in the job's boundary state, or
nothing, before the job's first token. All ranks derive the same plan; nothing about it is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from longprefill.partition.layout import Fragment, Layout


@dataclass(frozen=True, slots=True)
class RowSource:
    """A row of this step: local row `local_row` of `rank`."""

    rank: int
    local_row: int


@dataclass(frozen=True, slots=True)
class TailSource:
    """Row `tail_row` of the boundary state's conv tail, 0 .. width-1, oldest first."""

    tail_row: int


Source = RowSource | TailSource | None
"""None: before the job's first token, a row of zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloMove:
    """One row of one fragment's halo. Slot 0 is the oldest; slot width-1 is the row just before the fragment."""

    fragment: Fragment
    slot: int
    position: int
    """Absolute; negative where nothing precedes."""
    source: Source


class HaloSlot(NamedTuple):
    """A row of a rank's history [local fragments, width]."""

    fragment: int
    """Index into `layout.local(rank)`."""
    slot: int


class LocalCopy(NamedTuple):
    local_row: int
    target: HaloSlot


class TailCopy(NamedTuple):
    job: int
    tail_row: int
    target: HaloSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloPlan:
    """What one rank sends, receives and copies. Together the targets are every slot of its history exactly once."""

    sends: Mapping[int, tuple[int, ...]]
    """Local rows for each peer, in the order in which the peer lists them under `receives`. No peer without rows."""
    receives: Mapping[int, tuple[HaloSlot, ...]]
    """The slots that each peer's rows fill, in the order of that peer's `sends`."""
    local: tuple[LocalCopy, ...]
    """Rows of this step that this rank has itself."""
    tails: tuple[TailCopy, ...]
    """Rows from the jobs' boundary states."""
    zeros: tuple[HaloSlot, ...]
    """Slots before a job's first token."""


def halo_moves(layout: Layout, width: int) -> tuple[HaloMove, ...]:
    """The source of every halo row of every fragment, by table order, then slot: width rows a fragment.

    Raises:
        ValueError: a negative width.
    """
    _check_width(width)
    return tuple(
        HaloMove(fragment=fragment, slot=slot, position=position, source=_source(layout, fragment.job, position, width))
        for fragment in layout.fragments
        for slot, position in enumerate(range(fragment.start - width, fragment.start))
    )


def halo_exchange(layout: Layout, width: int, rank: int) -> HaloPlan:
    """The rank's share of `halo_moves` as one message a peer. Made once a step, used in every layer.

    Raises:
        ValueError: a negative width.
        IndexError: a rank outside the layout.
    """
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[HaloSlot]] = {}
    local: list[LocalCopy] = []
    tails: list[TailCopy] = []
    zeros: list[HaloSlot] = []
    index_of = {fragment: index for index, fragment in enumerate(layout.local(rank))}
    for move in halo_moves(layout, width):
        source, owner = move.source, move.fragment.rank
        if owner != rank:
            if isinstance(source, RowSource) and source.rank == rank:
                sends.setdefault(owner, []).append(source.local_row)
            continue
        target = HaloSlot(index_of[move.fragment], move.slot)
        if source is None:
            zeros.append(target)
        elif isinstance(source, TailSource):
            tails.append(TailCopy(move.fragment.job, source.tail_row, target))
        elif source.rank == rank:
            local.append(LocalCopy(source.local_row, target))
        else:
            receives.setdefault(source.rank, []).append(target)
    return HaloPlan(
        sends={peer: tuple(rows) for peer, rows in sends.items()},
        receives={peer: tuple(slots) for peer, slots in receives.items()},
        local=tuple(local),
        tails=tuple(tails),
        zeros=tuple(zeros),
    )


def _source(layout: Layout, job: int, position: int, width: int) -> Source:
    start = layout.slice_of(job).start
    if position < 0:
        return None
    if position < start:
        return TailSource(width - (start - position))
    fragment = layout.locate(job, position)
    return RowSource(fragment.rank, layout.local_row(fragment) + position - fragment.start)


def _check_width(width: int) -> None:
    if width < 0:
        raise ValueError(f"width={width}: a halo has 0 rows or more (the conv kernel's width less 1)")
