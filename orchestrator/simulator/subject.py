"""The model that a cluster's [costs] name on the cluster's machines, and the costs that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast, get_args

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import DeviceProfile
from longprefill.orchestrator.costs.quick import QuickCosts
from longprefill.orchestrator.costs.step import StepCosts, StepOptions
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.planner.machines import Machines, machines_of
from longprefill.orchestrator.planner.models import find_model
from longprefill.orchestrator.scheduler.jobs import Mesh
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
    """A model on machines with one kind of device."""

    config: ModelConfig
    settings: ClusterSettings
    machines: Machines

    @property
    def profile(self) -> DeviceProfile:
        return self.machines.machines[0].profile

    @property
    def devices_per_node(self) -> int:
        """Of the largest machine."""
        return self.machines.machines[0].num_devices

    def shape(self, num_tp: int = 1) -> ModelShape:
        """The model as one of `num_tp` tensor-parallel ranks holds it."""
        place = MeshPlace.of(0, num_cp=1, num_tp=num_tp, expert_parallel=False)
        return model_shape(self.config, self.settings, place)

    def placement(self, mesh: Mesh) -> Placement:
        """Where a mesh runs: on the first machines; beyond those that there are, on more like the largest.

        Raises:
            ClusterError: tensor-parallel groups that no machine holds.
        """
        site = self.machines.site(mesh.cp, mesh.tp) or self.machines.more(mesh.num_devices).site(mesh.cp, mesh.tp)
        if site is None:
            raise ClusterError(f"tp={mesh.tp}: the largest machine has {self.devices_per_node} device(s): use less")
        return site.placement

    def costs(self, num_cp: int, exchange: Exchange = "head_transposed") -> StepCosts:
        """Costs on a context-parallel mesh."""
        return StepCosts(self.shape(), self.placement(Mesh(cp=num_cp)), StepOptions(exchange=exchange))

    def with_links(self, *, bandwidth: float = 1.0, latency: float = 1.0) -> Subject:
        """The same with all links so many times as fast and as slow to answer."""
        return replace(self, machines=self.machines.with_links(bandwidth=bandwidth, latency=latency))


def subject_of(cluster: Cluster) -> Subject:
    """What [costs], [[nodes]] and [network] name.

    Raises:
        UserError: an unknown model or device, devices of several kinds, or a file that cannot be read.
    """
    costs = cluster.costs
    machines = machines_of(cluster, "the cluster file", default_device=EXAMPLE_DEVICE)
    names = sorted({machine.profile.name for machine in machines.machines})
    if len(names) > 1:
        raise ClusterError(
            f"[[nodes]] have several kinds of devices ({', '.join(names)}): simulate takes one, plan takes them all"
        )
    return Subject(config=find_model(costs.model), settings=ClusterSettings(model_dir=costs.model), machines=machines)


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
    return lambda: QuickCosts(subject.shape, subject.placement, options)
