"""How the controller reaches hosts: what it needs of Ray, so that tests can do without."""

from __future__ import annotations

from typing import Any, Protocol

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.contract import HostSettings, HostState


class HostGone(RunFailed):
    """The host's process has ended, or never began."""


class HostSilent(RunFailed):
    """The host did not answer in time."""


class HostBroken(RunFailed):
    """A command failed in the host in a way that its contract does not have."""


class HostLink(Protocol):
    """A host that was found or created."""

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        """One command of `hosts.contract`, the epoch first among its arguments.

        Raises:
            HostGone, HostSilent: no answer; it may have been carried out.
            HostBroken: it failed in an unforeseen way.
            What the command raises by its contract, as it is.
        """
        ...


class HostDirectory(Protocol):
    """All hosts of the cluster, by name."""

    async def find(self, name: str) -> HostLink | None:
        """A host that lives, None when there is none of this name."""
        ...

    async def create(self, settings: HostSettings, role: str) -> HostLink:
        """A new host; returns before it has started.

        Raises:
            HostGone: it could not be created.
        """
        ...

    async def end(self, name: str, state: HostState | None = None) -> None:
        """Kills a host and all its workers; nothing when there is none. `state`, its last one, tells where even a
        stopped process is."""
        ...

    async def nodes(self) -> tuple[dict[str, Any], ...]:
        """name, is_alive and resources of every node."""
        ...
