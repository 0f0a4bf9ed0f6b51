"""Hosts in memory that keep their contract and outlive any controller. Tests hold steps back, make hosts silent, lose
and kill them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from longprefill.orchestrator.controller.links import HostGone, HostSilent
from longprefill.orchestrator.hosts.contract import HostSettings, HostState
from longprefill.partition.layout import Slice

from .decode_double import DecodeDouble
from .prefill_double import PrefillDouble


class ClusterDouble:
    """A `HostDirectory` and the knobs of its hosts."""

    def __init__(self) -> None:
        self.hosts: dict[str, PrefillDouble | DecodeDouble] = {}
        self.starts = True
        self.step_gate: asyncio.Event | None = None
        self.token_gate: asyncio.Event | None = None
        self.poll_limit = 4096
        self.iterations = 1
        """Of decode workers between two polls."""
        self.failing_handoffs = 0
        self.unreachable: set[str] = set()
        self.is_disk_full = False
        self.prefilled: dict[int, int] = {}
        """Tokens that were run, by job."""
        self.opened: list[tuple[int, str, int]] = []
        self.steps: list[tuple[str, tuple[Slice, ...]]] = []

    def linked(self, epoch: int) -> DirectoryDouble:
        """The hosts as the controller of an epoch commands them."""
        return DirectoryDouble(self, epoch)

    def kill(self, name: str) -> None:
        """The host's process is gone, with all that it held."""
        self.hosts.pop(name).condition = "dead"

    async def pass_step(self, host: PrefillDouble, slices: Sequence[Slice]) -> None:
        self.steps.append((host.name, tuple(slices)))
        if self.step_gate is None:
            await asyncio.sleep(0.001)
            return
        generation = host.generation
        while not self.step_gate.is_set() and host.condition == "ready" and host.generation == generation:
            await asyncio.sleep(0.001)

    async def pass_iteration(self) -> None:
        while self.token_gate is not None and not self.token_gate.is_set():
            await asyncio.sleep(0.001)


class DirectoryDouble:
    def __init__(self, cluster: ClusterDouble, epoch: int) -> None:
        self.cluster = cluster
        self.epoch = epoch

    async def find(self, name: str) -> LinkDouble | None:
        return LinkDouble(self, self.cluster.hosts[name]) if name in self.cluster.hosts else None

    async def create(self, settings: HostSettings, role: str) -> LinkDouble:
        assert settings.name not in self.cluster.hosts
        kind = PrefillDouble if role == "prefill" else DecodeDouble
        host = self.cluster.hosts[settings.name] = kind(settings, self.cluster)
        return LinkDouble(self, host)

    async def end(self, name: str, state: HostState | None = None) -> None:
        host = self.cluster.hosts.pop(name, None)
        if host is not None:
            host.condition = "dead"

    async def nodes(self) -> tuple[dict[str, Any], ...]:
        return ({"name": "here", "is_alive": True, "resources": {"CPU": 4.0}},)


class LinkDouble:
    def __init__(self, directory: DirectoryDouble, host: PrefillDouble | DecodeDouble) -> None:
        self._directory = directory
        self.host = host

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        host = self.host
        if host.condition == "dead":
            raise HostGone(f"{host.name} has ended")
        if host.is_silent:
            await asyncio.sleep(0.01)
            raise HostSilent(f"{host.name} did not answer {method}")
        host.fence(self._directory.epoch)
        host.calls.append(method)
        answer = getattr(host, method)(*arguments)
        if asyncio.iscoroutine(answer):
            task = asyncio.ensure_future(answer)
            while not task.done():
                await asyncio.wait([task], timeout=0.005)
                if host.condition == "dead" and not task.done():
                    task.cancel()
                    raise HostGone(f"{host.name} died in the middle of {method}")
            answer = task.result()
        if host.condition == "dead":
            raise HostGone(f"{host.name} died at the end of {method}")
        return answer
