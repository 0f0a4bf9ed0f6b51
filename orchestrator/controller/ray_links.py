"""Hosts as the controller reaches them in a Ray cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from longprefill.orchestrator.controller.links import HostBroken, HostGone, HostSilent
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.actors import cause_of, create_host, end_host, find_host
from longprefill.orchestrator.hosts.contract import HostSettings, HostState
from longprefill.partition.errors import UserError

NODES_EVERY_S = 2.0


class RayHost:
    """A `HostLink`: an actor's handle and the epoch that commands it."""

    def __init__(self, name: str, handle: Any, epoch: int) -> None:
        self._name = name
        self._handle = handle
        self._epoch = epoch

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        reference = getattr(self._handle, method).remote(self._epoch, *arguments)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(reference.future())
        except RayTaskError as error:
            cause = cause_of(error)
            if isinstance(cause, UserError | RunFailed):
                raise cause from None
            raise HostBroken(f"{self._name}: {method} failed: {type(cause).__name__}: {_first_line(cause)}") from error
        except TimeoutError:  # behind RayTaskError, which is one where the host itself raised one
            raise HostSilent(f"{self._name} did not answer {method} for {deadline_s:.0f} s") from None
        except RayError as error:
            raise HostGone(f"{self._name} died: {_first_line(error)}") from error


class RayHosts:
    """A `HostDirectory`: hosts are named, detached actors."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._nodes: tuple[float, tuple[dict[str, Any], ...]] = (-NODES_EVERY_S, ())

    async def find(self, name: str) -> RayHost | None:
        handle = await asyncio.to_thread(find_host, name)
        return None if handle is None else RayHost(name, handle, self._epoch)

    async def create(self, settings: HostSettings, role: str) -> RayHost:
        try:
            handle = await asyncio.to_thread(create_host, settings, role)
        except (RayError, ValueError) as error:
            raise HostGone(f"{settings.name} could not be created: {_first_line(error)}") from error
        return RayHost(settings.name, handle, self._epoch)

    async def end(self, name: str, state: HostState | None = None) -> None:
        try:
            await asyncio.to_thread(end_host, name, state)
        except RayError as error:
            raise HostGone(f"{name} could not be ended: {_first_line(error)}") from error

    async def nodes(self) -> tuple[dict[str, Any], ...]:
        if time.monotonic() - self._nodes[0] > NODES_EVERY_S:
            found = await asyncio.to_thread(ray.nodes)
            self._nodes = (time.monotonic(), tuple(_node(node) for node in found))
        return self._nodes[1]


def _node(node: dict[str, Any]) -> dict[str, Any]:
    resources = {name: amount for name, amount in node.get("Resources", {}).items() if not name.startswith("node:")}
    return {"name": node["NodeManagerHostname"], "is_alive": node["Alive"], "resources": resources}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
