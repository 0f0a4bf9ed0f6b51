"""Restore maps: from the gathered rows of a step to its ordered rows and back, and the positions of a rank's rows.

Gathered rows lie by rank, ordered rows by slice and position (`layout.py`). The maps are block copies: a step of any
length has at most one block a fragment.
"""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.partition.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """`length` rows in sequence: a job's tokens from absolute position `start` on, and their rows in both orders."""

    job: int
    start: int
    length: int
    gathered_row: int
    ordered_row: int


def restore_blocks(layout: Layout) -> tuple[RowBlock, ...]:
    """The block copies that put gathered rows into order, in that order (by slice, then by position).

    Fragments that are neighbours in both orders are one block.
    """
    blocks: list[RowBlock] = []
    ordered_row = 0
    for fragment in layout.fragments:
        block = RowBlock(
            job=fragment.job,
            start=fragment.start,
            length=fragment.length,
            gathered_row=layout.gathered_row(fragment),
            ordered_row=ordered_row,
        )
        ordered_row += block.length
        if blocks and blocks[-1].job == block.job and blocks[-1].gathered_row + blocks[-1].length == block.gathered_row:
            last = blocks.pop()
            block = RowBlock(
                job=last.job,
                start=last.start,
                length=last.length + block.length,
                gathered_row=last.gathered_row,
                ordered_row=last.ordered_row,
            )
        blocks.append(block)
    return tuple(blocks)


def restore_permutation(layout: Layout) -> tuple[int, ...]:
    """The gathered row of every ordered row: `ordered[i] = gathered[permutation[i]]`. One number a token."""
    return tuple(block.gathered_row + offset for block in restore_blocks(layout) for offset in range(block.length))


def gather_permutation(layout: Layout) -> tuple[int, ...]:
    """The inverse, the ordered row of every gathered row: `gathered[i] = ordered[permutation[i]]`."""
    by_gathered = sorted(restore_blocks(layout), key=lambda block: block.gathered_row)
    return tuple(block.ordered_row + offset for block in by_gathered for offset in range(block.length))


def local_position_ranges(layout: Layout, rank: int) -> tuple[range, ...]:
    """Absolute positions of the rank's rows, one range a fragment in local row order."""
    return tuple(range(fragment.start, fragment.end) for fragment in layout.local(rank))


def local_positions(layout: Layout, rank: int) -> tuple[int, ...]:
    """Absolute position of every local row of the rank (what RoPE and the causal limit need)."""
    return tuple(position for positions in local_position_ranges(layout, rank) for position in positions)
