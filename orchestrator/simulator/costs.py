"""How long a step takes, in two simple ways; anything with `step_seconds` (see `scheduler.jobs.StepCosts`) fits.

`QuadraticCosts` is one formula for a whole prompt. `WorkCosts` counts the work of a model's shapes (`partition.work`)
and its traffic (`partition.traffic`) at the rates of a `DeviceProfile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import log2

from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.partition.errors import UserError
from longprefill.partition.generators import LayoutKind, generate
from longprefill.partition.layout import Layout, Slice
from longprefill.partition.shapes import KdaShape, ModelShape
from longprefill.partition.work import Exchange, Flops, step_flops

GRID_TOKENS = 512
"""Work of a prompt's first tokens is counted on multiples of this: linear in between is off by less than 1e-4."""


class QuadraticCosts:
    """A prompt of T tokens is T (1 + T / scale_tokens) units of work; devices share it evenly."""

    def __init__(self, *, work_per_s: float, scale_tokens: int = 131_072) -> None:
        if work_per_s <= 0 or scale_tokens <= 0:
            raise UserError(f"work_per_s={work_per_s}, scale_tokens={scale_tokens}: use positive numbers")
        self._scale = 1.0 / scale_tokens
        self._per_s = work_per_s

    def work(self, num_tokens: int) -> float:
        """Units of the first `num_tokens` tokens of a prompt."""
        return num_tokens * (1.0 + num_tokens * self._scale)

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        work = 0.0
        for piece in slices:
            work += self.work(piece.end) - self.work(piece.start)
        return work / (self._per_s * mesh.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Rates of one device and its link: sustained, not peaks."""

    name: str
    gemm_flops_per_s: float
    """Projections, feed-forward, residual mixing."""
    attention_flops_per_s: float
    indexer_flops_per_s: float
    scan_flops_per_s: float
    """KDA scans, summaries and folds."""
    link_bytes_per_s: float
    """Received by one device while all receive."""
    link_latency_s: float
    """Of one message; a collective over P ranks takes log2 P of them."""
    step_overhead_s: float = 0.0
    """Host work of a step."""
    overlap: float = 0.0
    """Share of the traffic of cache rows that query-side work hides."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_per_s") and value <= 0:
                raise UserError(f"device {self.name}: {field.name}={value}: use a positive number")
            if field.name.endswith("_s") and value < 0:
                raise UserError(f"device {self.name}: {field.name}={value}: need 0 or more")
        if not 0 <= self.overlap <= 1:
            raise UserError(f"device {self.name}: overlap={self.overlap}: use a share from 0 to 1")

    def compute_seconds(self, flops: Flops) -> float:
        """Seconds of one rank's counted work."""
        gemm = flops.projection + flops.expansion + flops.ffn + flops.residual
        return (
            gemm / self.gemm_flops_per_s
            + flops.attention / self.attention_flops_per_s
            + flops.indexer / self.indexer_flops_per_s
            + flops.kda / self.scan_flops_per_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step's seconds by cause, for the rank that takes longest."""

    alone_s: float
    """All work on one device, for comparison."""
    mean_compute_s: float
    max_compute_s: float
    chain_s: float
    """Waiting for states that are computed one after another."""
    transfer_s: float
    """Exposed traffic and its latency."""
    overhead_s: float

    @property
    def total_s(self) -> float:
        return self.max_compute_s + self.chain_s + self.transfer_s + self.overhead_s


class WorkCosts:
    """Step costs from counted work. Ranks inside a unit's tensor-parallel group share the work of their rank evenly."""

    def __init__(self, model: ModelShape, device: DeviceProfile, exchange: Exchange = "all_gather") -> None:
        self.model = model
        self.device = device
        self.exchange: Exchange = exchange
        self._up_to = lru_cache(maxsize=65536)(self._seconds_up_to)
        # dense attention expands all visible rows in every step: the one part of the work that steps do not share out
        first = self._flops(0, GRID_TOKENS)
        self._expansion_s = first.expansion / device.gemm_flops_per_s / GRID_TOKENS
        self._balance = lru_cache(maxsize=4096)(self._balance_of)

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        """Work counted on one rank and divided; balance and traffic of a full layout on a coarser grid."""
        alone_s = sum(self._alone(piece.start, piece.end) for piece in slices)
        if mesh.cp == 1:
            return alone_s / mesh.tp + self.device.step_overhead_s
        share, fixed_s, token_s = self._balance(_coarse(slices), layout, mesh.cp)
        num_tokens = sum(piece.num_tokens for piece in slices)
        return alone_s * share / mesh.tp + fixed_s + token_s * num_tokens + self.device.step_overhead_s

    def step_time(self, slices: Sequence[Slice], kind: LayoutKind, cp: int) -> StepTime:
        """The full count of one step on `cp` ranks."""
        layout = generate(kind, slices, cp)
        ranks = [self.device.compute_seconds(flops) for flops in step_flops(layout, self.model, self.exchange)]
        useful = [
            self.device.compute_seconds(flops)
            for flops in step_flops(generate("contiguous", slices, 1), self.model, self.exchange)
        ]
        fixed_s, rows_s = self._traffic_seconds(layout)
        return StepTime(
            alone_s=useful[0],
            mean_compute_s=sum(ranks) / cp,
            max_compute_s=max(ranks),
            chain_s=self._chain_seconds(layout),
            transfer_s=fixed_s + rows_s,
            overhead_s=self.device.step_overhead_s,
        )

    def _alone(self, start: int, end: int) -> float:
        """One rank's seconds for a slice: causal work adds up over slices, so two sums of a prompt's start suffice."""
        return self._between(end) - self._between(start) + end * self._expansion_s

    def _between(self, num_tokens: int) -> float:
        """Seconds of a prompt's first tokens without expansion: counted on a grid, linear inside."""
        cell, rest = divmod(num_tokens, GRID_TOKENS)
        below_s = self._up_to(cell)
        return below_s + rest / GRID_TOKENS * (self._up_to(cell + 1) - below_s) if rest else below_s

    def _seconds_up_to(self, cell: int) -> float:
        if not cell:
            return 0.0
        return self.device.compute_seconds(replace(self._flops(0, cell * GRID_TOKENS), expansion=0))

    def _flops(self, start: int, end: int) -> Flops:
        layout = generate("contiguous", [Slice(job=0, start=start, end=end)], 1)
        return step_flops(layout, self.model, self.exchange)[0]

    def _balance_of(self, spans: tuple[tuple[int, int], ...], kind: LayoutKind, cp: int) -> tuple[float, float, float]:
        """Fullest rank over all work, seconds that do not grow with the step's tokens, and seconds a token."""
        slices = [Slice(job=job, start=start, end=end) for job, (start, end) in enumerate(spans)]
        time = self.step_time(slices, kind, cp)
        num_tokens = sum(piece.num_tokens for piece in slices)
        fixed_s, rows_s = self._traffic_seconds(generate(kind, slices, cp))
        return time.max_compute_s / time.alone_s, fixed_s + time.chain_s, rows_s / num_tokens

    def _traffic_seconds(self, layout: Layout) -> tuple[float, float]:
        """Exposed seconds of what is sent whatever the length, and of cache rows, over all layers."""
        if layout.num_ranks == 1:
            return 0.0, 0.0
        return _traffic_seconds(layout, self.model, self.device, self.exchange)

    def _chain_seconds(self, layout: Layout) -> float:
        """A relay runs fragments one after another, pipelined over heads; folds are counted as work instead."""
        if self.exchange != "relay" or layout.num_ranks == 1:
            return 0.0
        seconds = 0.0
        for layer in self.model.layers:
            if isinstance(layer.mixer, KdaShape):
                groups, num_fragments = layer.mixer.num_value_heads, len(layout.fragments)
                scan = 6 * layer.mixer.key_dim * layer.mixer.value_dim
                scan += 2 * layer.mixer.tile * (layer.mixer.key_dim + layer.mixer.value_dim)
                longest = max(fragment.length for fragment in layout.fragments)
                # G head groups over N fragments: N - 1 slots of one group each before the last one starts
                seconds += (num_fragments - 1) * longest * scan / self.device.scan_flops_per_s
                seconds += (num_fragments + groups - 1) * self.device.link_latency_s
        return seconds


def _traffic_seconds(
    layout: Layout, model: ModelShape, device: DeviceProfile, exchange: Exchange
) -> tuple[float, float]:
    from longprefill.partition.traffic import step_traffic

    fixed_bytes, row_bytes = 0, 0
    for operation, ranks in step_traffic(layout, model, exchange).items():
        most = max(traffic.received_bytes for traffic in ranks)
        if operation == "cache_rows":
            row_bytes += most
        else:
            fixed_bytes += most
    hops = log2(layout.num_ranks)
    num_calls = sum(3 if isinstance(layer.mixer, KdaShape) else 2 for layer in model.layers)
    fixed_s = fixed_bytes / device.link_bytes_per_s + num_calls * hops * device.link_latency_s
    return fixed_s, (1.0 - device.overlap) * row_bytes / device.link_bytes_per_s


def _coarse(slices: Sequence[Slice]) -> tuple[tuple[int, int], ...]:
    """Slices on a grid on which few differ: starts to 64 K, lengths to powers of two, at least 1024."""
    spans = []
    for piece in slices:
        start = piece.start // 65536 * 65536
        spans.append((start, start + max(1024, 1 << (piece.num_tokens - 1).bit_length())))
    return tuple(spans)
