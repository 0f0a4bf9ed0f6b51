"""Whether a cluster could ever hold what a service asks for: pure arithmetic over nodes and demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longprefill.orchestrator.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`packs` places that lie on one node each, all with the same resources."""

    name: str
    num_packs: int
    pack: Mapping[str, float]


def demands(config: ServiceConfig) -> list[Demand]:
    """A pack a tensor-parallel group of ranks, a pack a decode worker."""
    found = [
        Demand(
            name=name,
            num_packs=pool.cp,
            pack={resource: amount * pool.tp for resource, amount in pool.rank_resources.items()},
        )
        for name, pool in config.prefill_groups
    ]
    return found + [Demand(name=name, num_packs=1, pack=pool.rank_resources) for name, pool in config.decode_workers]


def unsatisfiable(nodes: Sequence[Mapping[str, float]], wanted: Sequence[Demand]) -> str | None:
    """Why the nodes' resources can never hold all that is wanted: one sentence, None when they may."""
    have: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.items():
            have[name] = have.get(name, 0.0) + amount
    need: dict[str, float] = {}
    for demand in wanted:
        for name, amount in demand.pack.items():
            need[name] = need.get(name, 0.0) + amount * demand.num_packs
        if not any(_fits(demand.pack, node) for node in nodes):
            return (
                f"{demand.name} needs {_listed(demand.pack)} on one node and no node of {len(nodes)} has that: use a "
                "smaller tp or larger nodes"
            )
    for name, amount in sorted(need.items()):
        found = have.get(name, 0.0)
        if amount > found:
            return (
                f"all pools together need {name} {amount:g} and the cluster has {found:g}: use fewer or smaller pools, "
                "or add nodes"
            )
    return None


def _fits(pack: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in pack.items())


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
