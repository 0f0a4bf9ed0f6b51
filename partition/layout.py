"""The fragment table: the engine's only notion of who computes which token of a step.

A step is an ordered list of `Slice`s (job, start, end). A `Layout` cuts every slice into `Fragment`s, contiguous runs of
one job's tokens on one rank. Zigzag and contiguous cuts are generators of this table (`generators.py`); nothing else in
the engine knows how a table came about. Positions are absolute in the job's prompt.

A rank's *local rows* are its fragments one after another in table order (slice order, then chain order). The *gathered
rows* of a step are the local rows of rank 0, then of rank 1, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PAGE_TOKENS = 64
"""Tokens of one cache page; cuts inside a slice lie on multiples of it, in absolute positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The tokens [start, end) of one job that pass through all layers in one step."""

    job: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.job < 0:
            raise ValueError(f"job={self.job}: job numbers are 0 or more")
        if not 0 <= self.start < self.end:
            raise ValueError(f"slice [{self.start}, {self.end}) of job {self.job}: need 0 <= start < end")

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A contiguous run of one job's tokens on one rank. `order` is its place in the job's chain of this step, from 0.

    Empty fragments are legal in a generator's output and are dropped by `Layout`.
    """

    job: int
    start: int
    length: int
    rank: int
    order: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A validated fragment table of one step: every token of every slice on exactly one rank, chains in sequence order.

    Raises:
        ValueError: a slice is not covered exactly once, a chain is out of order, a cut is off the page grid, a rank is out
            of range, or a job has two slices.
    """

    num_ranks: int
    slices: tuple[Slice, ...]
    fragments: tuple[Fragment, ...]
    """Non-empty fragments in table order: by slice, then by `order` (renumbered without gaps)."""

    def local(self, rank: int) -> tuple[Fragment, ...]:
        """The rank's fragments in local row order."""
        return self._local[rank]

    def chain(self, job: int) -> tuple[Fragment, ...]:
        """The job's fragments in sequence order."""
        return tuple(f for f in self.fragments if f.job == job)

    def num_local_rows(self, rank: int) -> int:
        return sum(f.length for f in self._local[rank])

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Local rows of every rank."""
        return tuple(self.num_local_rows(r) for r in range(self.num_ranks))

    def local_row(self, fragment: Fragment) -> int:
        """First local row of the fragment on its own rank."""
        return self._local_row[fragment]

    def gathered_row(self, fragment: Fragment) -> int:
        """First gathered row of the fragment."""
        return sum(self.row_counts[: fragment.rank]) + self._local_row[fragment]

    @cached_property
    def _local(self) -> tuple[tuple[Fragment, ...], ...]:
        return tuple(tuple(f for f in self.fragments if f.rank == r) for r in range(self.num_ranks))

    @cached_property
    def _local_row(self) -> dict[Fragment, int]:
        rows: dict[Fragment, int] = {}
        for fragments in self._local:
            row = 0
            for fragment in fragments:
                rows[fragment] = row
                row += fragment.length
        return rows
