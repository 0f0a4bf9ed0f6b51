"""What steps are expected to cost: a device profile when there is one, else counted work at a nominal rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.scheduler.jobs import Mesh, StepCosts
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import LayoutKind, generate
from longprefill.partition.layout import Slice
from longprefill.partition.shapes import ModelShape
from longprefill.partition.work import step_flops
from longprefill.workers.model.config import ModelConfig

NOMINAL_FLOPS_PER_S = {"cpu": 20e9, "cuda": 100e12, "npu": 80e12}
"""Of one rank: an order of magnitude to start from, never shown; the first steps correct it."""
OVERHEAD_S = 0.02
"""Of a step, beside counted work: likewise."""
GRID_TOKENS = 512


class CountedCosts:
    """Seconds in proportion to counted flops, evenly over the mesh."""

    def __init__(self, model: ModelShape, flops_per_s: float) -> None:
        self._model = model
        self._flops_per_s = flops_per_s
        self._up_to = lru_cache(maxsize=65536)(self._flops_up_to)

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        flops = sum(self._between(piece.end) - self._between(piece.start) for piece in slices)
        return flops / (self._flops_per_s * mesh.num_devices)

    def _between(self, num_tokens: int) -> float:
        """Flops of a prompt's first tokens: counted on a grid, linear inside."""
        cell, rest = divmod(num_tokens, GRID_TOKENS)
        below = self._up_to(cell)
        return below + rest / GRID_TOKENS * (self._up_to(cell + 1) - below) if rest else below

    def _flops_up_to(self, cell: int) -> float:
        if not cell:
            return 0.0
        whole = generate("contiguous", [Slice(job=0, start=0, end=cell * GRID_TOKENS)], 1)
        return float(step_flops(whole, self._model, "all_gather")[0].total)


class OneLayout:
    """Costs of groups that run one layout, whichever is asked for: another is never estimated."""

    def __init__(self, base: StepCosts, layout: LayoutKind) -> None:
        self._base = base
        self._layout: LayoutKind = layout

    def step_seconds(self, slices: Sequence[Slice], layout: LayoutKind, mesh: Mesh) -> float:
        return self._base.step_seconds(slices, self._layout, mesh)


def service_costs(config: ServiceConfig, model: ModelConfig) -> StepCosts:
    """Costs for the scheduler of a service.

    Raises:
        UserError: the profile cannot be used.
    """
    pool = config.prefill[0]
    shape = model_shape(model, pool.cluster_settings(config.model.dir))
    if config.scheduler.profile is None:
        kind = pool.device.partition(":")[0]
        base = CountedCosts(shape, NOMINAL_FLOPS_PER_S.get(kind, NOMINAL_FLOPS_PER_S["cpu"]))
        return OneLayout(base, pool.layout)
    from longprefill.orchestrator.costs.placement import Placement
    from longprefill.orchestrator.costs.profile_file import find_profile
    from longprefill.orchestrator.costs.quick import QuickCosts

    profile = find_profile(config.scheduler.profile, Path.cwd())

    def placement(mesh: Mesh) -> Placement:
        return Placement(cp=mesh.cp, tp=mesh.tp, cp_per_node=mesh.cp, profiles=(profile,))

    costs = QuickCosts(lambda _: shape, placement)
    costs.warm([Mesh(cp=pool.cp, tp=pool.tp)], pool.max_tokens)
    return OneLayout(costs, pool.layout)
