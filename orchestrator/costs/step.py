"""Seconds of one step on a mesh: every rank's clock through all layers, stopped at every exchange as the engine is.

KDA: a halo from the neighbours, then the exchange of states, then the scans that waited for it. Attention: cache rows,
whose gather runs beside the query side; what is not hidden is exposed. Grouped queries (of published systems): a ring.
Feed-forward: dispatch and return where experts are spread. Tensor parallelism: a gather before and a sum after each
part. At the end the boundary state. A rank that arrives early waits; the step lasts as long as the last clock.

Of many ranks with one slice eleven stand for all, as work varies smoothly along the chain: nine evenly from first to
last, and the two with most rows and most visible keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from longprefill.orchestrator.costs.clocks import Clocks, Group, Seconds
from longprefill.orchestrator.costs.exchanges import ExchangeBytes, ExchangeCosts
from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.rates import OperationRate, Rates
from longprefill.partition.generators import LayoutKind, generate
from longprefill.partition.layout import Layout, Slice
from longprefill.partition.operations import (
    LayerPlace,
    Operation,
    edge_operations,
    layer_operations,
    operation_shape,
    residual_operations,
)
from longprefill.partition.shapes import GqaShape, KdaShape, LayerShape, ModelShape, MoeShape
from longprefill.partition.work import Exchange

K = TypeVar("K")
V = TypeVar("V")
MOST_RANKS = 16
"""Up to so many ranks all clocks are kept."""
PARTS: Mapping[str, str] = {
    "kda.project": "projections",
    "kda.output": "projections",
    "mla.rows": "projections",
    "mla.query": "projections",
    "mla.output": "projections",
    "kda.conv": "kda",
    "kda.scan": "kda",
    "kda.summary": "kda summaries",
    "kda.fold": "kda summaries",
    "indexer": "indexer",
    "attention.dense": "attention",
    "attention.short": "attention",
    "attention.sparse": "attention",
    "ffn.dense": "feed-forward",
    "moe.route": "feed-forward",
    "moe.experts": "feed-forward",
    "moe.shared": "feed-forward",
    "norms": "rows",
    "residual": "rows",
    "embed": "rows",
    "mla.write": "rows",
    "head": "head",
}
"""What an operation's seconds are shown under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step's seconds. `parts` are those of the rank that waits least, and sum to `seconds`."""

    seconds: float
    parts: Mapping[str, float]
    max_work_s: float
    """All operations of the fullest rank."""
    mean_work_s: float
    waiting_s: float
    """Beside the fullest rank's work: ranks that wait for each other by turns, states that come one after another."""
    exposed_s: float
    """Exchanges that no work hides."""
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What the step plan decides beside the mesh."""

    exchange: Exchange = "all_gather"
    is_cache_sharded: bool = False
    """Each rank keeps the rows that it computed, and a layer gathers what it attends to."""
    is_expert_parallel: bool = False


LayerGroups = dict[str, Group]
"""The groups of a layer's operations, by the names of `LayerWork`."""
LayerRates = list[dict[str, OperationRate]]
"""Of the operations of one kind of layer, for every rank or one for all."""
MOST_COUNTED, MOST_TIMES = 32, 4096
"""Layouts whose counts, and steps whose times are kept; the oldest go. The planner asks for a prompt's steps with one
thing after another changed."""


class _Counted:
    """What was counted of a layout: the same whatever the links are, and most of it whatever the exchange is."""

    def __init__(self, layout: Layout, model: ModelShape) -> None:
        self.layout = layout
        self.ranks = _chosen(layout)
        self.groups: dict[tuple[int, Exchange], LayerGroups] = {}
        self.bytes = ExchangeBytes(layout, model)


class StepCosts:
    """Costs of steps of one model (as one tensor-parallel rank holds it) on one placement."""

    def __init__(self, model: ModelShape, placement: Placement, options: StepOptions | None = None) -> None:
        self.model = model
        self.placement = placement
        self.options = options or StepOptions()
        copies = placement.ranks_per_node
        rates = {id(profile): Rates(profile, copies) for profile in placement.profiles}
        self._rates = [rates[id(profile)] for profile in placement.profiles]
        self._layer_rates: dict[int, LayerRates] = {}
        self._counted: dict[tuple[LayoutKind, tuple[Slice, ...]], _Counted] = {}
        self._times: dict[tuple[LayoutKind, tuple[Slice, ...], int], StepTime] = {}

    def on(self, placement: Placement) -> StepCosts:
        """The same ranks with other links between them."""
        return self._changed(placement, self.options)

    def with_options(self, options: StepOptions) -> StepCosts:
        """The same model and ranks, with other options."""
        return self._changed(self.placement, options)

    def _changed(self, placement: Placement, options: StepOptions) -> StepCosts:
        """Shares what is counted."""
        other = copy(self)
        other.placement, other.options, other._times = placement, options, {}
        return other

    def coverage(self) -> dict[str, float]:
        """Shares of the seconds of all different operations so far by how they were found (see `Rates`)."""
        total: Seconds = defaultdict(float)
        for rates in {id(rates): rates for rates in self._rates}.values():
            _add(total, rates.coverage)
        return {name: value / (sum(total.values()) or 1.0) for name, value in sorted(total.items())}

    def step(self, slices: Sequence[Slice], kind: LayoutKind, *, num_ending: int = 0) -> StepTime:
        """One step over `slices`, in which `num_ending` jobs end.

        Raises:
            ProfileError: a rate that the step needs is not known.
        """
        key = (kind, tuple(slices), num_ending)
        found = self._times.get(key)
        if found is None:
            found = _Step(self, self._counts(kind, key[1]), num_ending).time()
            _keep(self._times, key, found, MOST_TIMES)
        return found

    def layer_seconds(self, slices: Sequence[Slice]) -> dict[LayerShape, float]:
        """Work of the fullest rank in each kind of layer, without exchanges and Attention Residuals."""
        step = _Step(self, self._counts("contiguous", tuple(slices)), 0)
        layer_s = self.placement.profiles[0].overheads.layer_s
        return {self.model.layers[kind]: step.work_s(kind) + layer_s for kind in dict.fromkeys(self.kinds)}

    def rates(self, kind: int) -> LayerRates:
        """Of the operations of one kind of layer."""
        if kind not in self._layer_rates:
            layer = self.model.layers[kind]
            shapes = {name: tuple(sorted(operation_shape(name, layer, self.model).items())) for name in PARTS}
            self._layer_rates[kind] = [
                {name: rates.of(name, shape) for name, shape in shapes.items()} for rates in self._rates
            ]
        return self._layer_rates[kind]

    def _counts(self, kind: LayoutKind, slices: tuple[Slice, ...]) -> _Counted:
        counted = self._counted.get((kind, slices))
        if counted is None:
            counted = _Counted(_layout(kind, slices, self.placement.cp), self.model)
            _keep(self._counted, (kind, slices), counted, MOST_COUNTED)
        return counted

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Sources of Attention Residuals that each layer's two sites mix, then those of the last site."""
        block, num_layers = self.model.attn_res_block, len(self.model.layers)
        if block is None:
            return (0,) * (num_layers + 1)
        return (*(3 + -(-n // block) + n // block for n in range(num_layers)), 1 + -(-num_layers // block))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For every layer the number of the first that is equal to it."""
        first: dict[LayerShape, int] = {}
        return tuple(first.setdefault(layer, number) for number, layer in enumerate(self.model.layers))


class _Step:
    """One step while it is being added up."""

    def __init__(self, costs: StepCosts, counted: _Counted, num_ending: int) -> None:
        self.costs = costs
        self.counted = counted
        self.layout = counted.layout
        self.ranks = counted.ranks
        self.num_ending = num_ending
        self.exchanges = ExchangeCosts(counted.bytes, costs.placement)
        self.clocks = Clocks([0.0] * len(self.ranks))
        self._layers: dict[tuple[float, ...], Clocks] = {}
        self._times: dict[tuple[float, ...], int] = defaultdict(int)
        self._mixing: dict[int, Group] = {}
        self._halo_s: dict[int, float] = {}

    def time(self) -> StepTime:
        costs, clocks = self.costs, self.clocks
        overheads = costs.placement.profiles[0].overheads
        embed, head = edge_operations(self.layout, costs.model, costs.placement.tp, self.num_ending)
        clocks.run(self._group(0, [(embed,)] * len(self.ranks)))
        for kind, sources in zip(costs.kinds, costs.sources, strict=False):
            self._run_layer(kind)
            self._mix(sources)
        self._mix(costs.sources[-1])
        for key, times in self._times.items():
            clocks.add(self._layers[key], times)
        if self.num_ending:
            clocks.run(self._group(0, [(head,)] * len(self.ranks)))
        clocks.meet("boundary state", self.exchanges.boundary_s())
        clocks.pay("host", overheads.step_s)
        return self._result()

    def work_s(self, kind: int) -> float:
        """The fullest rank's seconds in one layer."""
        groups = self._work(kind).values()
        return max(sum(group.totals[n] for group in groups) for n in range(len(self.ranks)))

    def _run_layer(self, kind: int) -> None:
        """One more layer: counted once for each kind and for how far the ranks are apart when it begins, which is
        nothing where it begins with a meeting. Here the clocks are set; what passed is added at the end."""
        whole, mixer = self.clocks, self.costs.model.layers[kind].mixer
        if isinstance(mixer, KdaShape) and self.layout.num_ranks > 1:
            if kind not in self._halo_s:
                self._halo_s[kind] = self.exchanges.halo_s(mixer)
            whole.meet("conv halo", self._halo_s[kind])
        key = (kind, *whole.now)
        if key not in self._layers:
            self.clocks = self._layers[key] = Clocks(whole.now)
            self._layer(kind)
            self.clocks.pay("host", self.costs.placement.profiles[0].overheads.layer_s)
            self.clocks.settle()
            self.clocks = whole
        whole.now = self._layers[key].now
        self._times[key] += 1

    def _layer(self, kind: int) -> None:
        clocks, exchanges, options = self.clocks, self.exchanges, self.costs.options
        layer, work = self.costs.model.layers[kind], self._work(kind)
        clocks.pay("tensor parallel", exchanges.tensor_parallel_s(layer))
        if isinstance(layer.mixer, KdaShape):
            clocks.run(work["before"])
            if self.layout.num_ranks > 1:
                clocks.meet("kda states", exchanges.states_s(layer.mixer, options.exchange))
                if options.exchange == "relay":
                    clocks.pay("relay", exchanges.relay_wait_s(layer.mixer, self._longest_scan(work)))
            clocks.run(work["after"])
        elif isinstance(layer.mixer, GqaShape):
            clocks.run(work["before"])
            clocks.run(work["after"])
            if self.layout.num_ranks > 1:
                attention_s = max(found["attention"] for found in work["after"].parts)
                clocks.meet("ring", exchanges.ring_s(layer.mixer, attention_s))
        else:
            clocks.run(work["before"])
            rows_s = exchanges.rows_s(layer.mixer, is_sharded=options.is_cache_sharded)
            self._gather_beside(rows_s, work["beside"])
            clocks.run(work["after"])
        if isinstance(layer.ffn, MoeShape):
            clocks.run(work["route"])
            if options.is_expert_parallel:
                clocks.meet("expert dispatch", exchanges.experts_s(layer.ffn))
        clocks.run(work["ffn"])

    def _gather_beside(self, rows_s: float, beside: Group) -> None:
        """The gather of cache rows starts when every rank has its own; a rank needs it after its query side."""
        clocks = self.clocks
        if not rows_s:
            clocks.run(beside)
            return
        clocks.groups[beside] += 1
        overlap = self.costs.placement.profiles[0].overheads.overlap
        started = max(clocks.now)
        exposed = [rows_s - overlap * min(rows_s, work_s) for work_s in beside.totals]
        least = min(exposed)
        ready = [now + work_s for now, work_s in zip(clocks.now, beside.totals, strict=True)]
        clocks.now = [max(own, started) + late for own, late in zip(ready, exposed, strict=True)]
        # what differs between ranks counts as waiting
        waiting = zip(clocks.waiting, ready, exposed, strict=True)
        clocks.waiting = [waited + max(started - own, 0.0) + late - least for waited, own, late in waiting]
        clocks.exposed["cache rows"] += least

    def _mix(self, sources: int) -> None:
        """Attention Residuals of one layer's sites, or of the last."""
        if not sources:
            return
        if sources not in self._mixing:
            model, num_tp = self.costs.model, self.costs.placement.tp
            rows = [-(-self.layout.row_counts[rank] // num_tp) for rank in self.ranks]
            mixing = {own: residual_operations(model, own, sources)[1:] for own in set(rows)}
            self._mixing[sources] = self._group(0, [mixing[own] for own in rows])
        self.clocks.run(self._mixing[sources])

    def _work(self, kind: int) -> LayerGroups:
        """The groups of a layer's operations."""
        layer, exchange = self.costs.model.layers[kind], self.costs.options.exchange
        key = (kind, exchange if isinstance(layer.mixer, KdaShape) else "all_gather")
        known = self.counted.groups.get(key)
        if known is None:
            place = LayerPlace(exchange=exchange, num_tp=self.costs.placement.tp)
            works = layer_operations(self.layout, layer, self.costs.model, place, self.ranks)
            known = self.counted.groups[key] = {
                name: self._group(kind, [getattr(work, name) for work in works])
                for name in ("before", "beside", "after", "route", "ffn")
            }
        return known

    def _group(self, kind: int, operations: Sequence[tuple[Operation, ...]]) -> Group:
        """A group of operations of each chosen rank; what several ranks share is asked for once."""
        rates = self.costs.rates(kind)
        found: dict[tuple[int, int], Seconds] = {}
        parts: list[Seconds] = []
        for rank, own in zip(self.ranks, operations, strict=True):
            place = rank if len(rates) > 1 else 0
            known = found.get((place, id(own)))
            if known is None:
                known = found[place, id(own)] = defaultdict(float)
                for operation in own:
                    known[PARTS[operation.name]] += rates[place][operation.name].seconds(operation)
            parts.append(known)
        return Group(parts)

    def _longest_scan(self, work: Mapping[str, Group]) -> float:
        """Scan seconds of one fragment, of the rank that has most."""
        most = max(a["kda"] + b["kda"] for a, b in zip(work["before"].parts, work["after"].parts, strict=True))
        return most / max(len(self.layout.local(rank)) for rank in self.ranks)

    def _result(self) -> StepTime:
        clocks = self.clocks
        least = min(range(len(self.ranks)), key=lambda rank: clocks.waiting[rank])
        works = clocks.work_s()
        seconds = clocks.base + max(clocks.now)
        exposed = {name: seconds for name, seconds in clocks.exposed.items() if seconds}
        host_s = exposed.pop("host", 0.0)
        relay_s = exposed.pop("relay", 0.0)
        parts = {**clocks.parts(least), **exposed, "waiting": clocks.waiting[least] + relay_s, "host": host_s}
        return StepTime(
            seconds=seconds,
            parts={name: seconds for name, seconds in parts.items() if seconds},
            max_work_s=max(works),
            mean_work_s=sum(works) / len(works),
            waiting_s=max(seconds - max(works) - sum(exposed.values()) - host_s, 0.0),
            exposed_s=sum(exposed.values()),
            host_s=host_s,
        )


def _keep(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """One more, for the oldest."""
    if len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value


def _add(total: Seconds, found: Mapping[str, float]) -> None:
    for name, seconds in found.items():
        total[name] += seconds


@lru_cache(maxsize=256)
def _layout(kind: LayoutKind, slices: tuple[Slice, ...], num_cp: int) -> Layout:
    """The planner asks for one layout for several shapes of the model."""
    return generate(kind, slices, num_cp)


def _chosen(layout: Layout) -> tuple[int, ...]:
    """The ranks whose clocks are kept: all, or of many nine evenly and those with most rows and most visible keys."""
    ranks = range(layout.num_ranks)
    if layout.num_ranks <= MOST_RANKS or len(layout.slices) > 1:
        return tuple(ranks)
    keys = [0] * layout.num_ranks
    for fragment in layout.fragments:
        keys[fragment.rank] += fragment.length * (fragment.start + fragment.end)
    fullest = {max(ranks, key=lambda rank: (layout.row_counts[rank], rank)), max(ranks, key=lambda rank: keys[rank])}
    return tuple(sorted({(layout.num_ranks - 1) * eighth // 8 for eighth in range(9)} | fullest))
