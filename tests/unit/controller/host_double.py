"""What the doubles of both kinds of hosts share: a condition that tests set, the epoch's fence, the state they tell."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from longprefill.orchestrator.hosts.contract import HostJob, HostSettings, HostState, NotReady, StaleEpoch
from longprefill.partition.layout import PAGE_TOKENS, Slice

if TYPE_CHECKING:
    from .cluster_double import ClusterDouble


def whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


class HostDouble:
    """What both kinds share."""

    role = ""

    def __init__(self, settings: HostSettings, cluster: ClusterDouble) -> None:
        self.settings = settings
        self.name = settings.name
        self.cluster = cluster
        self.epoch = 0
        self.generation = 1
        self.condition = "starting"
        self.reason: str | None = None
        self.is_started = False
        self.is_silent = False
        self.calls: list[str] = []

    def fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} commands {self.name}, {epoch} is older")
        self.epoch = epoch

    def check_ready(self) -> None:
        if self.condition != "ready":
            raise NotReady(f"{self.name} is {self.condition}")

    def start(self) -> None:
        self.is_started = True

    async def await_ready(self, timeout_s: float) -> HostState:
        if self.condition == "starting" and self.is_started and self.cluster.starts:
            self.condition = "ready"
        if self.condition not in ("ready", "failed"):
            await asyncio.sleep(0.01)
        return self.state()

    def state(self) -> HostState:
        raise NotImplementedError

    def close(self) -> None:
        self.condition = "closed"


def host_state(
    host: HostDouble,
    jobs: tuple[HostJob, ...],
    used_tokens: int,
    *,
    last_step: int = 0,
    running: tuple[int, tuple[Slice, ...]] | None = None,
    first_cursor: int = 0,
) -> HostState:
    return HostState(
        name=host.name,
        role=host.role,
        state=host.condition,
        reason=host.reason,
        epoch=host.epoch,
        generation=host.generation,
        mesh="cp 1 x tp 1",
        pid=1,
        nodes=("here",),
        jobs=jobs,
        used_tokens=used_tokens,
        max_tokens=host.settings.cluster.max_tokens,
        rss_bytes=1000,
        num_restarts=0,
        last_step=last_step,
        running=running,
        first_cursor=first_cursor,
    )
