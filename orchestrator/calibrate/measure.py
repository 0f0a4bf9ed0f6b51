"""Drives the two workers through a calibration: models, links, control calls, into one device profile."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from longprefill.orchestrator.calibrate import machine
from longprefill.orchestrator.calibrate.pair import NUM_WORKERS, Pair
from longprefill.orchestrator.calibrate.reduced import reduced
from longprefill.orchestrator.calibrate.samples import BenchSpec, StepSample, TimedStep
from longprefill.orchestrator.calibrate.schedule import GRID_TOKENS, STEP_TOKENS, timed_steps
from longprefill.orchestrator.calibrate.tables import SHORTEST_S, Point, shape_key, step_points, tables
from longprefill.orchestrator.costs.profile import DeviceProfile, Link, Overheads
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import generate
from longprefill.partition.layout import Layout, Slice
from longprefill.partition.operations import Operation, edge_operations, fold_operation, residual_operations
from longprefill.partition.shapes import KdaShape, ModelShape
from longprefill.partition.work import attn_res_sources, step_flops
from longprefill.workers import device as devices
from longprefill.workers.model.config import KdaConfig, ModelConfig

LINK_BYTES = tuple(1 << bits for bits in (10, 14, 17, 20, 22, 24))
LINK_REPEATS = 7
OVERLAP_BYTES = 4 << 20
RESIDUAL_ROWS = (256, 2048, 8192)
NUM_FOLDS = 4
FEWEST_PASSES = 3
"""Over all steps: one to warm up, and a round of one alone and one beside another."""
FEWEST_STARTS = 3
LINK_SHARE = 0.1
"""Share of the time that links may take."""

Progress = Callable[[str, float], None]
"""Told what runs now and how much of the whole is done, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to calibrate for: what one rank holds of it, and how it runs."""

    name: str
    config: ModelConfig
    settings: ClusterSettings

    def spec(self, longest_tokens: int) -> BenchSpec:
        """The model as a worker loads it."""
        settings = self.settings
        return BenchSpec(
            config=self.config,
            dtype=settings.dtype,
            latent_format=settings.latent,
            index_format=settings.index,
            max_tokens=longest_tokens,
        )


def measure(
    subjects: Sequence[Subject], *, name: str, longest_tokens: int, budget_s: float, progress: Progress
) -> DeviceProfile:
    """Measures this machine for these models. Takes about `budget_s`, and a little longer for a machine on which one
    round of all steps does.

    Raises:
        RunFailed: a worker did not start, died or failed.
    """
    points: list[Point] = []
    boundary_s: list[float] = []
    stretches: list[float] = []
    rounds: dict[str, int] = {}
    load = list(os.getloadavg())
    with Pair() as pair:
        done = 0.0
        for subject, share in zip(subjects, _shares(subjects), strict=True):

            def report(
                step: str, part: float, done: float = done, share: float = share, name: str = subject.name
            ) -> None:
                progress(f"{name}: {step}", (done + part * share) * (1 - LINK_SHARE))

            report("loading", 0.0)
            bench = _ModelBench(pair, subject, longest_tokens)
            rounds[subject.name] = bench.run(share * budget_s * (1 - LINK_SHARE), report)
            points += bench.points
            boundary_s += bench.boundary_s
            stretches += bench.stretches
            done += share
        progress("links", 1 - LINK_SHARE)
        pair.join()
        links = _links(pair)
        overheads = Overheads(
            step_s=pair.call_s(TimedStep(start=0, tokens=64)),
            layer_s=statistics.median(boundary_s),
            overlap=_overlap(pair),
        )
    progress("done", 1.0)
    return DeviceProfile(
        name=name,
        source="measured by longprefill bench --calibrate, inside the engine",
        memory_bytes=devices.memory(devices.resolve_device("cpu")).total_bytes // machine.num_cores(),
        tables=tables(points),
        links=links,
        overheads=overheads,
        measured=machine.describe()
        | {"load_before": load, "rounds": rounds, "clock": "CPU time of the computing thread; links: wall time"}
        | {"wall_over_cpu": round(statistics.median(stretches), 4)}
        | {"models": [subject.name for subject in subjects], "longest_tokens": longest_tokens},
    )


def _shares(subjects: Sequence[Subject]) -> list[float]:
    """Of the time, by the work of a step of one layer of every kind; half of it evenly, as small steps are not free."""
    piece = Slice(job=0, start=0, end=GRID_TOKENS[-1])
    shapes = [model_shape(reduced(subject.config), subject.settings) for subject in subjects]
    work = [step_flops(generate("contiguous", [piece], 1), shape)[0].total for shape in shapes]
    return [0.5 / len(work) + 0.5 * flops / sum(work) for flops in work]


class _ModelBench:
    """Rounds of one model's steps."""

    def __init__(self, pair: Pair, subject: Subject, longest_tokens: int) -> None:
        self.pair = pair
        self.subject = subject
        self.points: list[Point] = []
        self.boundary_s: list[float] = []
        self.stretches: list[float] = []
        self._config = reduced(subject.config)
        self._shape = model_shape(self._config, subject.settings)
        self._full = model_shape(subject.config, subject.settings)
        self._steps = list(timed_steps(self._config, longest_tokens))
        pair.ask("load", subject.spec(longest_tokens))

    def run(self, budget_s: float, report: Progress) -> int:
        """A first round warms up and says what there is time for; then rounds of every step alone and beside another,
        one at least. Returns how many rounds counted."""
        started = time.perf_counter()
        costs = self._first_round(budget_s, report)
        self._extras(report)
        num_rounds = 0
        round_s = 2 * sum(costs)
        while not num_rounds or time.perf_counter() - started + round_s < budget_s:
            began = time.perf_counter()
            for n, step in enumerate(self._steps):
                share = (time.perf_counter() - started) / max(budget_s, time.perf_counter() - started + sum(costs[n:]))
                report(f"{step.tokens} tokens at {step.start}, round {num_rounds + 1}", share)
                for copies in range(1, NUM_WORKERS + 1):
                    self._take(step, self.pair.ask("step", step, copies=copies), copies)
            round_s = time.perf_counter() - began
            num_rounds += 1
        return num_rounds

    def _first_round(self, budget_s: float, report: Progress) -> list[float]:
        """Seconds of every step, which do not count. Steps of which the rounds would not fit are left out, apart from
        the smallest."""
        kept: list[TimedStep] = []
        costs: list[float] = []
        for step in self._steps:
            alike = [c / s.tokens for c, s in zip(costs, kept, strict=True) if 4 * s.tokens >= step.tokens]
            token_s = max(alike, default=0.0)
            expected_s = sum(costs) + token_s * step.tokens
            if step.tokens > STEP_TOKENS[0] and FEWEST_PASSES * expected_s > budget_s:
                continue
            report(f"{step.tokens} tokens at {step.start}, warming up", min(sum(costs) / budget_s, 1.0))
            began = time.perf_counter()
            self.pair.ask("step", step)
            kept.append(step)
            costs.append(time.perf_counter() - began)
        # rows that were timed at few starts would hide how the others depend on them; some there must be
        starts = Counter(step.tokens for step in kept if step.is_on_grid)
        few = {tokens for tokens, number in starts.items() if number < FEWEST_STARTS and tokens != STEP_TOKENS[0]}
        self._steps = [replace(step, is_on_grid=step.is_on_grid and step.tokens not in few) for step in kept]
        return costs

    def _take(self, step: TimedStep, samples: Sequence[StepSample], copies: int) -> None:
        for sample in samples:
            self.points += step_points(step, sample, self._shape, copies)
            self.boundary_s.append(sample.boundary_s / len(self._config.layers))
            self.stretches.append(sample.stretch)

    def _extras(self, report: Progress) -> None:
        """What does not depend on where a step is: head, folds, residual scheme."""
        report("head, folds, residuals", 0.0)
        _, head = edge_operations(_one_token(), self._full, 1, 1)
        head_key = shape_key("head", self._full.layers[0], self._full)
        for copies in range(1, NUM_WORKERS + 1):
            for seconds in self.pair.ask("head_s", copies=copies):
                self.points.append(Point(head, head_key, copies, seconds))
            for layer, shape in zip(self._config.layers, self._shape.layers, strict=True):
                if isinstance(layer.mixer, KdaConfig) and isinstance(shape.mixer, KdaShape):
                    fold = fold_operation(shape.mixer, NUM_FOLDS * shape.mixer.num_value_heads)
                    for seconds in self.pair.ask("fold_s", layer, NUM_FOLDS, copies=copies):
                        self.points.append(Point(fold, shape_key("kda.fold", shape, self._shape), copies, seconds))
            if self.subject.config.residual is not None:
                for rows in RESIDUAL_ROWS:
                    operation = _residual_operation(self._full, rows)
                    key = shape_key("residual", self._full.layers[0], self._full)
                    for seconds in self.pair.ask("residual_s", rows, copies=copies):
                        self.points.append(Point(operation, key, copies, max(seconds, SHORTEST_S)))


def _one_token() -> Layout:
    return generate("contiguous", [Slice(job=0, start=0, end=1)], 1)


def _residual_operation(model: ModelShape, rows: int) -> Operation:
    """The scheme over all layers as one operation."""
    num_layers = len(model.layers)
    if model.attn_res_block is not None:
        return residual_operations(model, rows, attn_res_sources(num_layers, model.attn_res_block))[-1]
    layer = residual_operations(model, rows, 0)[-1]
    return layer._replace(flops=num_layers * layer.flops, num_bytes=num_layers * layer.num_bytes)


def _links(pair: Pair) -> tuple[Link, ...]:
    """Latency and bandwidth of what crosses two ranks of this machine: median of the calls, the slower rank's."""

    def curve(method: str) -> tuple[tuple[float, float], ...]:
        points: list[tuple[float, float]] = []
        for num_bytes in LINK_BYTES:
            ranks = pair.ask(method, num_bytes, LINK_REPEATS)
            points.append((float(num_bytes), max(map(statistics.median, ranks))))
        return tuple(points)

    gather, exchange, transport = curve("gather_s"), curve("exchange_s"), curve("transport_s")
    measured = {"all_gather": gather, "exchange": exchange, "send": exchange}
    links = [Link(pattern=name, scope="node", ranks=NUM_WORKERS, points=points) for name, points in measured.items()]
    return (*links, Link(pattern="transport", scope="node", ranks=NUM_WORKERS, points=transport))


def _overlap(pair: Pair) -> float:
    """Share of a gather that is hidden behind compute on every rank."""
    shares: list[float] = []
    for rank in pair.ask("overlap_s", OVERLAP_BYTES, LINK_REPEATS):
        for gather_s, compute_s, together_s in rank:
            shares.append((gather_s + compute_s - together_s) / gather_s)
    return min(max(statistics.median(shares), 0.0), 1.0)
