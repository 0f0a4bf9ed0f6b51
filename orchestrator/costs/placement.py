"""Where the ranks of a mesh are: how many share a machine, what device each is, and what connects the machines."""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.orchestrator.costs.profile import DeviceProfile, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A CP x TP mesh on machines. Tensor-parallel groups never cross machines."""

    cp: int
    tp: int
    cp_per_node: int
    """Context-parallel ranks on the fullest machine."""
    profiles: tuple[DeviceProfile, ...]
    """One for all ranks, or one for each context-parallel rank."""
    cp_least_per_node: int | None = None
    """Context-parallel ranks on the emptiest machine, where machines differ."""
    network: tuple[Link, ...] = ()
    """Between machines, also beyond those of the mesh; takes the place of the profiles' own network links."""

    def __post_init__(self) -> None:
        if self.cp < 1 or self.tp < 1 or not 1 <= self.cp_per_node <= self.cp:
            raise ValueError(f"placement cp={self.cp} tp={self.tp} cp_per_node={self.cp_per_node}: out of range")
        if len(self.profiles) not in (1, self.cp):
            raise ValueError(f"{len(self.profiles)} profiles for cp={self.cp}: need one, or one a rank")

    @staticmethod
    def alone(profile: DeviceProfile) -> Placement:
        """One device."""
        return Placement(cp=1, tp=1, cp_per_node=1, profiles=(profile,))

    @property
    def links(self) -> tuple[Link, ...]:
        """The first rank's, with `network` in the place of its own network links."""
        own = self.profiles[0].links
        return (*(link for link in own if not (self.network and link.scope == "network")), *self.network)

    @property
    def ranks_per_node(self) -> int:
        return self.cp_per_node * self.tp

    @property
    def num_devices(self) -> int:
        return self.cp * self.tp

    @property
    def remote_share(self) -> float:
        """Of what a rank receives from all its context-parallel peers, the share that comes from other machines: for
        the rank with fewest peers beside it."""
        beside = self.cp_least_per_node or self.cp_per_node
        return (self.cp - beside) / (self.cp - 1) if self.cp > 1 else 0.0
