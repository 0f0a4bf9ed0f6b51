"""Decides: clusters, jobs, plans, the command line. `LocalCluster` is imported on first use, so that planning needs no
ray."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longprefill.orchestrator.cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> object:
    if name == "LocalCluster":
        from longprefill.orchestrator.cluster import LocalCluster

        return LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
