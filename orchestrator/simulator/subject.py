"""The model and the device that a cluster's [costs] name, and the costs that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import DeviceProfile
from longprefill.orchestrator.costs.profile_file import find_profile
from longprefill.orchestrator.costs.quick import QuickCosts
from longprefill.orchestrator.costs.step import StepCosts, StepOptions
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.planner.models import find_model
from longprefill.orchestrator.shapes import model_shape
from longprefill.orchestrator.simulator.cluster import Cluster, ClusterError
from longprefill.partition.shapes import ModelShape
from longprefill.partition.work import Exchange
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.sharding import MeshPlace

EXAMPLE_DEVICE = "example"
"""Where a cluster names no device: round numbers, measured on nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on a kind of device, `devices_per_node` of which share a machine."""

    config: ModelConfig
    settings: ClusterSettings
    profile: DeviceProfile
    devices_per_node: int

    def shape(self, num_tp: int = 1) -> ModelShape:
        """The model as one of `num_tp` tensor-parallel ranks holds it."""
        place = MeshPlace.of(0, num_cp=1, num_tp=num_tp, expert_parallel=False)
        return model_shape(self.config, self.settings, place)

    def costs(self, num_cp: int, exchange: Exchange = "head_transposed") -> StepCosts:
        """Costs on a context-parallel mesh."""
        placement = Placement(cp=num_cp, tp=1, cp_per_node=min(num_cp, self.devices_per_node), profiles=(self.profile,))
        return StepCosts(self.shape(), placement, StepOptions(exchange=exchange))


def subject_of(cluster: Cluster) -> Subject:
    """What [costs] names.

    Raises:
        UserError: an unknown model or device, or a file that cannot be read.
    """
    costs = cluster.costs
    return Subject(
        config=find_model(costs.model),
        settings=ClusterSettings(model_dir=costs.model),
        profile=find_profile(costs.device or EXAMPLE_DEVICE),
        devices_per_node=cluster.devices_per_node,
    )


def counted_costs(cluster: Cluster) -> Callable[[], QuickCosts]:
    """Makers of step costs from counted work.

    Raises:
        UserError: as `subject_of`, or an unknown exchange.
    """
    exchange = cluster.costs.exchange
    if exchange not in get_args(Exchange):
        raise ClusterError(f"[costs] exchange={exchange!r}: use {', '.join(get_args(Exchange))}")
    subject = subject_of(cluster)
    subject.shape(cluster.fleet.tp)  # refuses a degree that does not divide the heads
    options = StepOptions(exchange=cast("Exchange", exchange))
    return lambda: QuickCosts(
        subject.shape, subject.profile, devices_per_node=subject.devices_per_node, options=options
    )
