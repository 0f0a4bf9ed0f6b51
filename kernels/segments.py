"""Packed segments of one kernel call: `offsets` holds N + 1 row numbers from 0 to T, empty segments included."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def segment_bounds(offsets: Sequence[int], num_rows: int) -> list[tuple[int, int]]:
    """(first row, end row) of every segment.

    Raises:
        ValueError: `offsets` is empty, does not run from 0 to `num_rows`, or decreases.
    """
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != num_rows:
        raise ValueError(f"offsets={list(offsets)} for {num_rows} rows: must start at 0 and end at {num_rows}")
    bounds = list(pairwise(offsets))
    if any(start > end for start, end in bounds):
        raise ValueError(f"offsets={list(offsets)} decrease: list segment ends in row order")
    return bounds
