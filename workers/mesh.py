"""The mesh of ranks that run a step: context-parallel rows by tensor-parallel columns of one world group."""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.comms.group import Group
from longprefill.comms.solo import SoloGroup
from longprefill.comms.subgroup import SubGroup


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """`world` has the rank numbers cp * num_tp + tp. `cp` are the ranks with this rank's tp number, `tp` those with
    its cp number."""

    world: Group
    cp: Group
    tp: Group

    @staticmethod
    def over(world: Group, num_tp: int = 1) -> Mesh:
        """The mesh of a world whose size is a multiple of `num_tp`.

        Raises:
            ValueError: it is not.
        """
        if num_tp < 1 or world.size % num_tp:
            raise ValueError(f"num_tp={num_tp} does not divide the {world.size} ranks of the world")
        if num_tp == 1:
            return Mesh(world=world, cp=world, tp=SoloGroup())
        cp, tp = divmod(world.rank, num_tp)
        if num_tp == world.size:
            return Mesh(world=world, cp=SoloGroup(), tp=world)
        return Mesh(
            world=world,
            cp=SubGroup(world, [rank * num_tp + tp for rank in range(world.size // num_tp)]),
            tp=SubGroup(world, [cp * num_tp + rank for rank in range(num_tp)]),
        )
