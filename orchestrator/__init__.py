"""Decides: clusters, jobs, plans, the service, the command line. `LocalCluster` and `Client` are imported on first
use, so that planning needs no ray."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longprefill.orchestrator.client.client import Client
    from longprefill.orchestrator.cluster import LocalCluster

__all__ = ["Client", "LocalCluster"]


def __getattr__(name: str) -> object:
    if name == "LocalCluster":
        from longprefill.orchestrator.cluster import LocalCluster

        return LocalCluster
    if name == "Client":
        from longprefill.orchestrator.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
