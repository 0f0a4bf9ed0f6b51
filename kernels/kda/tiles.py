"""Which rows each tile of 64 tokens holds, in the order in which a scan over all segments side by side reads them.

Tiles are numbered step by step: step i holds tile i of every segment that has one, longest segment first. So the tiles
of one step lie side by side, and the segments still running are always a prefix of the sorted segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longprefill.kernels.segments import segment_bounds

TILE_TOKENS = 64
"""The CPU's sweet spot: state traffic per token falls with the tile, triangle work grows with it (README)."""


def check_interior(interior: Sequence[tuple[int, int]], bounds: Sequence[tuple[int, int]]) -> None:
    """States can be had where every backend's tiles end.

    Raises:
        ValueError: there is no such segment, or the rows are not on its grid of 64.
    """
    for segment, rows in interior:
        if not 0 <= segment < len(bounds):
            raise ValueError(f"interior state of segment {segment}: there are {len(bounds)}")
        start, end = bounds[segment]
        if rows % TILE_TOKENS or not 0 <= rows <= end - start:
            raise ValueError(
                f"interior state after {rows} rows of segment {segment}: "
                f"must be a multiple of {TILE_TOKENS} within its {end - start}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    starts: list[int]
    """First row of each tile."""
    lengths: list[int]
    """Rows of each tile, 1 to 64."""
    steps: list[tuple[int, int]]
    """Tile range [first, end) of each step."""
    order: list[int]
    """Segment numbers, longest first; the j-th runs as tile `first + j` of each of its steps."""
    bounds: list[tuple[int, int]]
    """First row and end row of each segment."""
    tile_ids: list[list[int]]
    """Tiles of each segment (by segment number) in sequence order."""


def tile_table(offsets: Sequence[int], num_rows: int) -> TileTable:
    """Cuts every segment into tiles from its own first row; only a segment's last tile is ragged.

    Raises:
        ValueError: `offsets` do not cover the rows.
    """
    bounds = segment_bounds(offsets, num_rows)
    counts = [-(-(end - start) // TILE_TOKENS) for start, end in bounds]
    order = sorted(range(len(bounds)), key=lambda segment: -counts[segment])
    table = TileTable(starts=[], lengths=[], steps=[], order=order, bounds=bounds, tile_ids=[[] for _ in bounds])
    for index in range(max(counts, default=0)):
        first = len(table.starts)
        for segment in order:
            if index >= counts[segment]:
                break
            start, end = bounds[segment]
            row = start + index * TILE_TOKENS
            table.tile_ids[segment].append(len(table.starts))
            table.starts.append(row)
            table.lengths.append(min(TILE_TOKENS, end - row))
        table.steps.append((first, len(table.starts)))
    return table
