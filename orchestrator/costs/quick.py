"""Step costs for those who ask ten thousand times: the full count on a coarse grid, shared out by work in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.step import StepCosts, StepOptions, StepTime
from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice
from longprefill.partition.shapes import ModelShape

GRID_TOKENS, GRID_POWER = 512, 7
"""Work of a prompt's first tokens is counted on multiples of the first, far out of a 2^7th of the power of two below:
linear in between is off by less than 1e-4."""
START_TOKENS, LEAST_TOKENS = 65_536, 1024
"""Balance, waiting and exchanges are counted from 0 and doublings of the first, for lengths from the second on."""

Spans = tuple[tuple[int, int], ...]
"""(start, end) of each slice of a step."""
ShapeOf = Callable[[int], ModelShape]
"""From tensor-parallel ranks to the model as one of them holds it."""
PlacementOf = Callable[[Mesh], Placement]


class QuickCosts:
    """`scheduler.jobs.StepCosts` from counted work. A slice's work is that of its end less that of its start; balance,
    waiting and exchanges come from full counts of coarser slices."""

    def __init__(self, shape_of: ShapeOf, placement_of: PlacementOf, options: StepOptions | None = None) -> None:
        self._shape_of = shape_of
        self._placement_of = placement_of
        self.options = options or StepOptions()
        self._costs = lru_cache(maxsize=None)(self._costs_of)
        self._alone = lru_cache(maxsize=65536)(self._alone_between)
        self._up_to = lru_cache(maxsize=65536)(self._work_up_to)
        self._balance = lru_cache(maxsize=4096)(self._balance_of)
        self._expansion = lru_cache(maxsize=None)(self._expansion_of)

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        """Seconds of one step on a mesh; slices may be as long as whole prompts."""
        alone_s = sum(self._alone(piece.start, piece.end, mesh.tp) for piece in slices)
        share, fixed_s, token_s = self._balance(_coarse(slices), layout, mesh)
        return alone_s * share + fixed_s + token_s * sum(piece.num_tokens for piece in slices)

    def step_time(self, slices: Sequence[Slice], kind: LayoutKind, mesh: Mesh) -> StepTime:
        """The full count."""
        return self._costs(mesh).step(slices, kind)

    def warm(self, meshes: Sequence[Mesh], longest_tokens: int, *, pack_tokens: int = 0) -> None:
        """Counts what prompts up to a length, whole or in steps, and shared steps of short ones can ask for, so that no
        decision waits for a count."""
        shortest = LEAST_TOKENS.bit_length() - 1
        for mesh in meshes:
            kinds: tuple[LayoutKind, ...] = ("zigzag", "contiguous") if mesh.cp > 1 else ("zigzag",)
            border = 0
            while border < longest_tokens:
                border += _grid(border)
                self._up_to(border, mesh.tp)
            for start in sorted({_start(position) for position in range(0, longest_tokens, START_TOKENS)}):
                for power in range(shortest, max((longest_tokens - start - 1).bit_length(), shortest) + 1):
                    for kind in kinds if start else kinds[:1]:
                        self._balance(((start, start + (1 << power)),), kind, mesh)
            for power in range(shortest, max((pack_tokens - 1).bit_length(), shortest) + 1) if pack_tokens else ():
                for number in (2, 4, 8, 16, 32):
                    self._balance(((0, 1 << power),) * number, "zigzag", mesh)

    def _costs_of(self, mesh: Mesh) -> StepCosts:
        return StepCosts(self._shape_of(mesh.tp), self._placement_of(mesh), self.options)

    def _alone_between(self, start: int, end: int, num_tp: int) -> float:
        """Work of one context-parallel rank that does the slice alone: causal work adds up over slices, but for the
        expansion of visible rows in dense attention, which every step does again."""
        return self._between(end, num_tp) - self._between(start, num_tp) + start * self._expansion(num_tp)

    def _between(self, num_tokens: int, num_tp: int) -> float:
        width = _grid(num_tokens)
        rest = num_tokens % width
        below = num_tokens - rest
        below_s = self._up_to(below, num_tp)
        return below_s + rest / width * (self._up_to(below + width, num_tp) - below_s) if rest else below_s

    def _work_up_to(self, num_tokens: int, num_tp: int) -> float:
        if not num_tokens:
            return 0.0
        piece = Slice(job=0, start=0, end=num_tokens)
        return self._costs(Mesh(cp=1, tp=num_tp)).step([piece], "zigzag").max_work_s

    def _expansion_of(self, num_tp: int) -> float:
        """Seconds a token that a step spends on rows of earlier steps."""
        costs, half = self._costs(Mesh(cp=1, tp=num_tp)), 64 * GRID_TOKENS
        whole, first, second = (
            costs.step([Slice(job=0, start=start, end=end)], "zigzag").max_work_s
            for start, end in ((0, 2 * half), (0, half), (half, 2 * half))
        )
        return max(first + second - whole, 0.0) / half

    def _balance_of(self, spans: Spans, kind: LayoutKind, mesh: Mesh) -> tuple[float, float, float]:
        """Fullest rank with its waiting over all work, seconds that do not grow with tokens, and seconds a token."""
        slices = [Slice(job=job, start=start, end=end) for job, (start, end) in enumerate(spans)]
        time = self.step_time(slices, kind, mesh)
        alone_s = sum(self._alone(start, end, mesh.tp) for start, end in spans)
        rows_s = time.parts.get("cache rows", 0.0)
        fixed_s = time.exposed_s - rows_s + time.host_s
        num_tokens = sum(piece.num_tokens for piece in slices)
        return (time.seconds - fixed_s - rows_s) / alone_s, fixed_s, rows_s / num_tokens


def _coarse(slices: Sequence[Slice]) -> Spans:
    """Slices on a grid on which few differ: starts to 0, 64 K, 128 K, 256 K, ..., lengths to powers of two, at least
    1024. Several slices stand as a power of two of equal ones of their mean length and start."""
    number = 1 << (len(slices) - 1).bit_length()
    start = _start(sum(piece.start for piece in slices) // len(slices))
    mean = -(-sum(piece.num_tokens for piece in slices) // len(slices))
    return ((start, start + max(LEAST_TOKENS, 1 << (mean - 1).bit_length())),) * number


def _grid(position: int) -> int:
    """Tokens between two counts of work around a position."""
    return max(GRID_TOKENS, 1 << max(position.bit_length() - 1 - GRID_POWER, 0))


def _start(position: int) -> int:
    cells = position // START_TOKENS
    return START_TOKENS << (cells.bit_length() - 1) if cells else 0
