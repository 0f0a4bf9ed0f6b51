"""Generators of fragment tables: zigzag and contiguous cuts, from the slices and the number of ranks alone.

Both deal whole pages of the absolute grid, so only a slice's own start and end can be ragged. A share is what one rank
gets of one slice: segments r and 2P-1-r (zigzag) or run r (contiguous). With several slices in a step, the shares are
permuted over the ranks so that the tokens of the whole step balance; the largest slice is never permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Literal

from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout, Slice

LayoutKind = Literal["zigzag", "contiguous"]


def zigzag(slices: Sequence[Slice], num_ranks: int) -> Layout:
    """2P segments a slice; segments r and 2P-1-r are one share, so that early and late tokens pair up.

    The page counts of two shares of a slice differ by at most one. Of the n mod 2P extra pages, fewer than P go to the
    first segments, else to the last ones: the two ends that leave the causal index work most even.

    Raises:
        ValueError: num_ranks below 1, or a job with two slices.
    """

    def cut(piece: Slice) -> list[list[range]]:
        each, extra = divmod(_num_pages(piece), 2 * num_ranks)
        sizes = [each] * (2 * num_ranks)
        for segment in range(extra) if extra < num_ranks else range(2 * num_ranks - extra, 2 * num_ranks):
            sizes[segment] += 1
        segments = _runs(piece, sizes)
        return [[segments[share], segments[2 * num_ranks - 1 - share]] for share in range(num_ranks)]

    return _layout(slices, num_ranks, cut)


def contiguous(slices: Sequence[Slice], num_ranks: int) -> Layout:
    """One run of pages a slice and rank; the first runs, which see the fewest keys, take the extra pages.

    Raises:
        ValueError: num_ranks below 1, or a job with two slices.
    """

    def cut(piece: Slice) -> list[list[range]]:
        each, extra = divmod(_num_pages(piece), num_ranks)
        return [[run] for run in _runs(piece, [each + (share < extra) for share in range(num_ranks)])]

    return _layout(slices, num_ranks, cut)


GENERATORS: Mapping[LayoutKind, Callable[[Sequence[Slice], int], Layout]] = MappingProxyType(
    {"zigzag": zigzag, "contiguous": contiguous}
)


def generate(kind: LayoutKind, slices: Sequence[Slice], num_ranks: int) -> Layout:
    """The step's layout of the given kind.

    Raises:
        ValueError: an unknown kind, num_ranks below 1, or a job with two slices.
    """
    if kind not in GENERATORS:
        raise ValueError(f"layout kind {kind!r} is unknown: use {' or '.join(GENERATORS)}")
    return GENERATORS[kind](slices, num_ranks)


def _layout(slices: Sequence[Slice], num_ranks: int, cut: Callable[[Slice], list[list[range]]]) -> Layout:
    """Cuts every slice into `num_ranks` shares and deals them, the largest slice first."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a layout needs at least 1 rank")
    loads = [(0, 0)] * num_ranks
    fragments: list[Fragment] = []
    for piece in sorted(slices, key=lambda piece: -piece.num_tokens):
        shares = cut(piece)
        ranks = list(range(num_ranks))
        if len(slices) > 1:
            weights = [_weight(share) for share in shares]
            if any(loads[0] != load for load in loads):
                ranks = _match(weights, loads)
            for (tokens, keys), rank in zip(weights, ranks, strict=True):
                loads[rank] = (loads[rank][0] + tokens, loads[rank][1] + keys)
        owned = [(run, rank) for share, rank in zip(shares, ranks, strict=True) for run in share]
        owned.sort(key=lambda pair: (pair[0].start, pair[0].stop))
        fragments += [
            Fragment(job=piece.job, start=run.start, length=len(run), rank=rank, order=order)
            for order, (run, rank) in enumerate(owned)
        ]
    return Layout(num_ranks=num_ranks, slices=tuple(slices), fragments=tuple(fragments))


def _match(weights: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> list[int]:
    """The rank of every share: the heaviest share to the least loaded rank, and so on.

    Matching in opposite orders never spreads the loads further than the wider of (loads so far, this slice's shares).
    """
    shares = sorted(range(len(weights)), key=lambda share: weights[share], reverse=True)
    by_load = sorted(range(len(loads)), key=lambda rank: loads[rank])
    ranks = [0] * len(weights)
    for share, rank in zip(shares, by_load, strict=True):
        ranks[share] = rank
    return ranks


def _weight(share: Sequence[range]) -> tuple[int, int]:
    """Tokens of a share, then the keys they see (twice, to stay integer) to break ties."""
    return sum(map(len, share)), sum(run.stop * (run.stop + 1) - run.start * (run.start + 1) for run in share)


def _num_pages(piece: Slice) -> int:
    """Pages of the absolute grid that the slice touches, ragged ones included."""
    return -(-piece.end // PAGE_TOKENS) - piece.start // PAGE_TOKENS


def _runs(piece: Slice, sizes: Sequence[int]) -> list[range]:
    """The slice cut into runs of the given page counts, in sequence order; runs without pages are empty ranges."""
    borders = accumulate(sizes, initial=piece.start // PAGE_TOKENS)
    positions = [min(max(page * PAGE_TOKENS, piece.start), piece.end) for page in borders]
    return [range(start, end) for start, end in pairwise(positions)]
