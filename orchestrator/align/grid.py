"""`align --grid`: one cluster a mesh, kept over all lengths and step sizes; then a job that changes meshes midway."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from longprefill.orchestrator.align.compare import Row, compare, first_deviation, pooled
from longprefill.orchestrator.align.mesh import carry_on, export_part, observe_mesh, whole_step
from longprefill.orchestrator.align.observation import Observation
from longprefill.orchestrator.align.once import make_yardstick, numbers_of, random_tokens
from longprefill.orchestrator.align.request import JOURNEY, WHOLE, AlignRequest, GridPlan, MeshShape, plan_of
from longprefill.orchestrator.align.single import SingleRank
from longprefill.orchestrator.cluster import LocalCluster
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.sharding import check_tp


class _Case(NamedTuple):
    """One run's comparison."""

    mesh: str
    num_tokens: int
    step: str
    rows: list[Row]
    seconds: float


def walk(
    request: AlignRequest, config: ModelConfig, settings: dict[str, Any], console: Console
) -> tuple[dict[str, Any], str, bool]:
    """Prints a line a run; (JSON document, last line, whether all agree).

    Raises:
        UserError: the plan cannot be, or not on this machine.
        RunFailed: a worker died, hung or failed.
    """
    plan = plan_of(request, config)
    grid = _Grid(request, config, settings, plan)
    cases: list[_Case] = []
    heading = f"{'mesh':>11} {'tokens':>7} {'step':>6} {'worst rms':>10} {'where':<36} {'swaps':>5} {'seconds':>8}"
    console.print(heading, highlight=False, soft_wrap=True)
    for case in grid.cases():
        cases.append(case)
        worst = max(case.rows, key=lambda row: (not row.is_ok, row.rms / row.allowed))
        swaps = sum(row.swaps for row in case.rows)
        line = (
            f"{case.mesh:>11} {case.num_tokens:>7} {case.step:>6} {worst.rms:>10.1e} {worst.place:<36} {swaps:>5} "
            f"{case.seconds:>8.1f}"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    verdicts = _verdicts(cases, None if grid.is_exact else request.tolerance)
    bad = [(name, deviation) for name, deviation in verdicts if deviation is not None]
    swaps = sum(row.swaps for case in cases for row in case.rows)
    last = (
        f"first deviation: {bad[0][0]}: {bad[0][1]}" if bad else f"all {len(cases)} runs agree; {swaps} swapped choices"
    )
    return {"runs": [_document(case) for case in cases]}, last, not bad


class _Grid:
    def __init__(self, request: AlignRequest, config: ModelConfig, settings: dict[str, Any], plan: GridPlan) -> None:
        self.request = request
        self.config = config
        self.settings = settings | {"step_tokens": None}
        self.plan = plan
        for mesh in (*plan.meshes, *self._journey_meshes()):
            self._cluster(mesh)  # refuses what does not fit; starts nothing
        self.is_exact = numbers_of(request).is_exact
        self.prompts = {length: random_tokens(request, config, length) for length in plan.lengths}
        yardstick = make_yardstick(request)
        self.expected = {length: yardstick.run(tokens) for length, tokens in self.prompts.items()}
        self.base: dict[int, Observation] = {}
        if not self.is_exact:
            rank = SingleRank(request.model, numbers_of(request))
            self.base = {n: rank.run(tokens, self.expected[n].record) for n, tokens in self.prompts.items()}

    def cases(self) -> Iterator[_Case]:
        for mesh in self.plan.meshes:
            with self._cluster(mesh) as cluster:
                for length in self.plan.lengths:
                    for step in self._steps(length):
                        yield self._case(cluster, str(mesh), length, step)
        yield from self._journey(max(self.plan.lengths))

    def _steps(self, length: int) -> list[int | None]:
        """Step sizes that make different steps of a prompt."""
        return [step for step in self.plan.steps if step is None or step < length or None not in self.plan.steps]

    def _cluster(self, mesh: MeshShape) -> LocalCluster:
        settings = self.settings | {"cp": mesh.cp, "tp": mesh.tp}
        return LocalCluster(self.request.model, decode=False, max_tokens=max(self.plan.lengths), **settings)

    def _case(
        self, cluster: LocalCluster, name: str, length: int, step: int | None, snapshot: Path | None = None
    ) -> _Case:
        started = time.perf_counter()
        actual = observe_mesh(
            cluster,
            self.prompts[length],
            step_tokens=step or whole_step(length),
            record=self.expected[length].record,
            replay=self.request.replay_choices or not self.is_exact or snapshot is not None,
            snapshot=snapshot,
        )
        rows = compare(
            self.config, self.expected[length], actual, tolerance=self.request.tolerance, base=self.base.get(length)
        )
        return _Case(name, length, WHOLE if step is None else str(step), rows, time.perf_counter() - started)

    def _journey_meshes(self) -> tuple[MeshShape, ...]:
        """None where the heads do not allow it."""
        return JOURNEY if all(_divides(self.config, mesh.tp) for mesh in JOURNEY) else ()

    def _journey(self, length: int) -> Iterator[_Case]:
        """One job over three meshes, with snapshots between: the first border is on a page, the second is ragged."""
        meshes = self._journey_meshes()
        first = length // 3 // PAGE_TOKENS * PAGE_TOKENS
        second = 2 * length // 3 + 1
        if not meshes or not 0 < first < second < length:
            return
        tokens, record = self.prompts[length], self.expected[length].record
        with tempfile.TemporaryDirectory(prefix="longprefill-align-") as folder:
            one, two = Path(folder, "one.safetensors"), Path(folder, "two.safetensors")
            with self._cluster(meshes[0]) as cluster:
                export_part(cluster, tokens, stop=first, record=record, path=one)
            with self._cluster(meshes[1]) as cluster:
                carry_on(cluster, one, stop=second, record=record, path=two)
            with self._cluster(meshes[2]) as cluster:
                yield self._case(cluster, ">".join(map(str, meshes)), length, None, two)


def _divides(config: ModelConfig, tp: int) -> bool:
    try:
        check_tp(config, tp)
    except UserError:
        return False
    return True


def _verdicts(cases: list[_Case], pooled_tolerance: float | None) -> list[tuple[str, str | None]]:
    """(which runs, their first deviation). Errors of bf16 are judged over all lengths of a mesh and step together: the
    few numbers of a short prompt scatter."""
    if pooled_tolerance is None:
        return [
            (f"mesh {case.mesh}, {case.num_tokens} tokens, step {case.step}", first_deviation(case.rows))
            for case in cases
        ]
    groups: dict[str, list[list[Row]]] = {}
    for case in cases:
        groups.setdefault(f"mesh {case.mesh}, step {case.step}", []).append(case.rows)
    return [(name, first_deviation(pooled(runs, tolerance=pooled_tolerance))) for name, runs in groups.items()]


def _document(case: _Case) -> dict[str, Any]:
    worst = max(case.rows, key=lambda row: (not row.is_ok, row.rms / row.allowed))
    return {
        "mesh": case.mesh,
        "tokens": case.num_tokens,
        "step": case.step,
        "ok": first_deviation(case.rows) is None,
        "worst_rms": worst.rms if np.isfinite(worst.rms) else None,
        "worst_place": worst.place,
        "swaps": sum(row.swaps for row in case.rows),
        "seconds": case.seconds,
    }
