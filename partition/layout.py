"""The fragment table: the engine's only notion of who computes which token of a step.

A step is an ordered list of `Slice`s (job, start, end). A `Layout` cuts every slice into `Fragment`s, contiguous runs
of one job's tokens on one rank. Zigzag and contiguous cuts are generators of this table (`generators.py`); nothing else
in the engine knows how a table came about. Positions are absolute in the job's prompt.

A rank's *local rows* are its fragments one after another in table order (slice order, then chain order). The *gathered
rows* of a step are the local rows of rank 0, then of rank 1, and so on. The *ordered rows* of a step are its tokens by
slice, then by position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

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

    Fragments may be given in any order; empty ones are dropped, the others sorted by slice and `order` and renumbered.
    Ranks without fragments are legal. All lookups are O(1) after their first call (`locate`: O(log fragments)).

    Raises:
        ValueError: a slice is not covered exactly once, a chain is out of order, a cut is off the page grid, a rank is
            out of range, or a job has two slices.
    """

    num_ranks: int
    slices: tuple[Slice, ...]
    fragments: tuple[Fragment, ...]
    """Non-empty fragments in table order: by slice, then by `order` (renumbered without gaps)."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks={self.num_ranks}: a layout needs at least 1 rank")
        slices = tuple(self.slices)
        chains: dict[int, list[Fragment]] = {}
        for piece in slices:
            if piece.job in chains:
                raise ValueError(f"job {piece.job} has two slices in one step: give it one slice a step")
            chains[piece.job] = []
        for fragment in self.fragments:
            _check_fragment(fragment, self.num_ranks)
            if fragment.job not in chains:
                raise ValueError(f"fragment of job {fragment.job}: the step has slices of jobs {sorted(chains)} only")
            if fragment.length:
                chains[fragment.job].append(fragment)
        table: list[Fragment] = []
        for piece in slices:
            table += _checked_chain(piece, chains[piece.job])
        object.__setattr__(self, "slices", slices)
        object.__setattr__(self, "fragments", tuple(table))

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices."""
        return sum(piece.num_tokens for piece in self.slices)

    def slice_of(self, job: int) -> Slice:
        """The job's slice of this step; KeyError when the job has none."""
        return self._slices[job]

    def local(self, rank: int) -> tuple[Fragment, ...]:
        """The rank's fragments in local row order."""
        return self._local[self._checked_rank(rank)]

    def chain(self, job: int) -> tuple[Fragment, ...]:
        """The job's fragments in sequence order; none when the job is not in this step."""
        return self._chains.get(job, ())

    def num_local_rows(self, rank: int) -> int:
        return self.row_counts[self._checked_rank(rank)]

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Local rows of every rank."""
        return tuple(sum(fragment.length for fragment in fragments) for fragments in self._local)

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """First gathered row of every rank, then the number of all rows: num_ranks + 1 numbers."""
        return tuple(accumulate(self.row_counts, initial=0))

    def local_row(self, fragment: Fragment) -> int:
        """First local row of the fragment on its own rank."""
        return self._local_row[fragment]

    def gathered_row(self, fragment: Fragment) -> int:
        """First gathered row of the fragment."""
        return self.row_offsets[fragment.rank] + self._local_row[fragment]

    def locate(self, job: int, position: int) -> Fragment:
        """The fragment that holds the job's token at an absolute position.

        Raises:
            IndexError: the position is outside the job's slice of this step.
        """
        chain = self.chain(job)
        if not chain or not chain[0].start <= position < chain[-1].end:
            raise IndexError(f"position {position} of job {job} is not in this step")
        return chain[bisect_right(self._chain_starts[job], position) - 1]

    def _checked_rank(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} is outside [0, {self.num_ranks})")
        return rank

    @cached_property
    def _slices(self) -> dict[int, Slice]:
        return {piece.job: piece for piece in self.slices}

    @cached_property
    def _local(self) -> tuple[tuple[Fragment, ...], ...]:
        by_rank: list[list[Fragment]] = [[] for _ in range(self.num_ranks)]
        for fragment in self.fragments:
            by_rank[fragment.rank].append(fragment)
        return tuple(map(tuple, by_rank))

    @cached_property
    def _chains(self) -> dict[int, tuple[Fragment, ...]]:
        chains: dict[int, list[Fragment]] = {piece.job: [] for piece in self.slices}
        for fragment in self.fragments:
            chains[fragment.job].append(fragment)
        return {job: tuple(chain) for job, chain in chains.items()}

    @cached_property
    def _chain_starts(self) -> dict[int, tuple[int, ...]]:
        return {job: tuple(fragment.start for fragment in chain) for job, chain in self._chains.items()}

    @cached_property
    def _local_row(self) -> dict[Fragment, int]:
        rows: dict[Fragment, int] = {}
        for fragments in self._local:
            row = 0
            for fragment in fragments:
                rows[fragment] = row
                row += fragment.length
        return rows


def _check_fragment(fragment: Fragment, num_ranks: int) -> None:
    if not 0 <= fragment.rank < num_ranks:
        raise ValueError(f"{fragment}: rank is outside [0, {num_ranks})")
    if fragment.length < 0:
        raise ValueError(f"{fragment}: a length is 0 or more")


def _checked_chain(piece: Slice, unsorted: Iterable[Fragment]) -> list[Fragment]:
    """The fragments of one slice in `order`, renumbered; ValueError unless they cover it once, cut on the page grid."""
    chain = sorted(unsorted, key=lambda fragment: fragment.order)
    for earlier, later in pairwise(chain):
        if earlier.order == later.order:
            raise ValueError(f"{earlier} and {later} have the same place in their chain")
    covered = piece.start
    for fragment in chain:
        if fragment.start != covered:
            raise ValueError(
                f"{fragment} starts at {fragment.start}, but its chain has covered job {piece.job} up to {covered}: "
                f"fragments in `order` must follow one another without gap or overlap from {piece.start} to {piece.end}"
            )
        if fragment.start != piece.start and fragment.start % PAGE_TOKENS:
            raise ValueError(f"{fragment} is cut off the page grid: cuts lie on multiples of {PAGE_TOKENS}")
        covered = fragment.end
    if covered != piece.end:
        raise ValueError(f"the chain of job {piece.job} ends at {covered}, its slice at {piece.end}")
    return [
        fragment if fragment.order == order else replace(fragment, order=order) for order, fragment in enumerate(chain)
    ]
