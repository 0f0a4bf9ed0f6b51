"""What is unfinished and what is running now: the controller's books, which are made anew from journal and hosts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from longprefill.orchestrator.controller.links import HostLink
from longprefill.orchestrator.controller.sample_text import SampleText
from longprefill.orchestrator.hosts.contract import HostSettings, HostState
from longprefill.orchestrator.journal.schema import JobRow


@dataclass(slots=True, kw_only=True)
class Host:
    """A prefill group (`unit` is its number for the scheduler) or a decode worker."""

    name: str
    role: str
    unit: int
    settings: HostSettings
    link: HostLink | None = None
    status: str = "starting"
    """One of hosts.contract.HOST_STATES."""
    reason: str | None = None
    state: HostState | None = None
    generation: int = 0
    heard_at: float = 0.0
    """time.monotonic of its last answer."""
    num_restarts: int = 0
    next_step: int = 1
    cursor: int = 0
    links: dict[str, str | None] = field(default_factory=dict)
    """Prefill: by decode worker, why pages cannot go there; None: they can."""

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    def can_reach(self, decode: Host) -> bool:
        """Whether pages can go to a decode worker, which has been tried."""
        return decode.name in self.links and self.links[decode.name] is None


@dataclass(slots=True, kw_only=True)
class LiveJob:
    """An unfinished job. `group` holds its pages, `decode` has room for it or generates from it."""

    row: JobRow
    group: Host | None = None
    decode: Host | None = None
    is_streaming: bool = False
    """Its pages go to `decode` as steps end."""
    task: asyncio.Task[None] | None = None
    """Its hand-off."""
    texts: dict[int, SampleText] = field(default_factory=dict)
    waits_for: str | None = None
    snapshot_at_s: float = 0.0
    """Prefill seconds of the job's steps when its last snapshot was taken."""
    stepped_s: float = 0.0
    told_at: float = 0.0
    """time.monotonic of its last event about tokens."""

    @property
    def number(self) -> int:
        return self.row.number

    @property
    def is_ended(self) -> bool:
        return self.row.state.is_final
