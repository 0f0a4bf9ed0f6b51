"""The cluster as machines with devices, and where the ranks of a mesh would be on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import DeviceProfile, Link, with_links
from longprefill.orchestrator.costs.profile_file import find_profile
from longprefill.orchestrator.simulator.cluster import Cluster, ClusterError, NetworkSettings, NodeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine: equal devices that share its links."""

    num_devices: int
    profile: DeviceProfile
    memory_bytes: int
    """Of one device; 0 where it is not known and not needed."""

    @property
    def speed(self) -> float:
        """What machines are ordered by: the sustained rate of products; 0 where only tables are given."""
        rate = self.profile.rates.get("gemm")
        return rate.flops_per_s * rate.efficiency if rate else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a mesh runs."""

    placement: Placement
    memory_bytes: int
    """Of the smallest device that it uses."""
    parts: tuple[tuple[Machine, int], ...]
    """Its machines, and how many tensor-parallel groups each has."""

    @property
    def num_machines(self) -> int:
        return len(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """All machines, fastest and largest first."""

    machines: tuple[Machine, ...]
    network: NetworkSettings | None

    @property
    def num_devices(self) -> int:
        return sum(machine.num_devices for machine in self.machines)

    def more(self, num_devices: int) -> Machines:
        """So many devices at least, on more machines like the first."""
        first = self.machines[0]
        return replace(self, machines=(first,) * -(-num_devices // first.num_devices))

    def with_links(self, *, bandwidth: float, latency: float) -> Machines:
        """The same machines with all links so many times as fast and as slow to answer."""
        scaled = {
            id(machine.profile): with_links(machine.profile, bandwidth=bandwidth, latency=latency)
            for machine in self.machines
        }
        machines = tuple(replace(machine, profile=scaled[id(machine.profile)]) for machine in self.machines)
        network = None if self.network is None else self.network.scaled(bandwidth=bandwidth, latency=latency)
        return Machines(machines=machines, network=network)

    def num_slots(self, num_tp: int) -> int:
        """Tensor-parallel groups of a size that the machines hold; none crosses machines."""
        return sum(machine.num_devices // num_tp for machine in self.machines)

    def site(self, num_cp: int, num_tp: int) -> Site | None:
        """The first machines that hold the mesh; None when there is no room."""
        taken: list[tuple[Machine, int]] = []
        missing = num_cp
        for machine in self.machines:
            slots = min(machine.num_devices // num_tp, missing)
            if slots:
                taken.append((machine, slots))
                missing -= slots
        if missing:
            return None
        kinds = {id(machine.profile): machine.profile for machine, _ in taken}
        profiles = tuple(kinds.values())
        if len(kinds) > 1:
            profiles = tuple(machine.profile for machine, slots in taken for _ in range(slots))
        per_node = max(slots for _, slots in taken)
        placement = Placement(
            cp=num_cp,
            tp=num_tp,
            cp_per_node=per_node,
            cp_least_per_node=min(slots for _, slots in taken),
            profiles=profiles,
            network=self._network(per_node * num_tp),
        )
        return Site(
            placement=placement,
            memory_bytes=min(machine.memory_bytes for machine, _ in taken),
            parts=tuple(taken),
        )

    def _network(self, devices: int) -> tuple[Link, ...]:
        """The cluster's own network, of which each of a machine's devices has a share."""
        network = self.network
        if network is None:
            return ()
        rates = [network.bytes_per_s, network.node_bytes_per_s and network.node_bytes_per_s / devices]
        return (
            Link(
                pattern="any",
                scope="network",
                latency_s=network.latency_s,
                message_s=network.message_s,
                bytes_per_s=min(rate for rate in rates if rate),
            ),
        )


def machines_of(
    cluster: Cluster, where: str, num_devices: int | None = None, *, default_device: str | None = None
) -> Machines:
    """The machines of a cluster file: its [[nodes]], else its fleet's units; the first `num_devices` of them. With a
    `default_device` for files that name none, which is for costs alone, memory may be unknown.

    Raises:
        UserError: no device is named or known, its memory is not given, or there are fewer devices.
    """
    fleet = cluster.fleet
    kinds = cluster.nodes or (NodeSettings(count=fleet.num_units, devices=fleet.devices_per_unit),)
    machines: list[Machine] = []
    for kind in kinds:
        name = kind.device or cluster.costs.device or default_device
        if name is None:
            raise ClusterError(
                f"{where} names no device: add device = NAME to [[nodes]] or [costs] (a shipped profile, or the file "
                "that longprefill bench --calibrate writes)"
            )
        profile = find_profile(name)
        memory = kind.memory_bytes or profile.memory_bytes
        if memory is None and default_device is None:
            raise ClusterError(f"{where}: device {name} has no memory size: add memory_gib to its [[nodes]]")
        machines += [Machine(num_devices=kind.devices, profile=profile, memory_bytes=memory or 0)] * kind.count
    machines.sort(key=lambda machine: (machine.speed, machine.num_devices), reverse=True)
    everything = Machines(machines=tuple(machines), network=cluster.network)
    return everything if num_devices is None else _first(everything, num_devices, where)


def _first(machines: Machines, num_devices: int, where: str) -> Machines:
    if not 1 <= num_devices <= machines.num_devices:
        raise ClusterError(f"--devices {num_devices}: {where} has {machines.num_devices}: use 1 to that many")
    kept: list[Machine] = []
    missing = num_devices
    for machine in machines.machines:
        if missing:
            devices = min(machine.num_devices, missing)
            kept.append(Machine(num_devices=devices, profile=machine.profile, memory_bytes=machine.memory_bytes))
            missing -= devices
    return Machines(machines=tuple(kept), network=machines.network)
