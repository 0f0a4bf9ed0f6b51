"""Keeping hosts: each is found or created, started, watched by its own heartbeat, given up and created anew when it
fails. What it held is lost at the moment when that is known; when it works again it is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from longprefill.orchestrator.controller.core import COMMAND_DEADLINE_S, Core
from longprefill.orchestrator.controller.generating import Generating
from longprefill.orchestrator.controller.live import Host
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.contract import HostState, NoLink, NotReady, StaleEpoch
from longprefill.orchestrator.journal.journal import JournalError, StaleJournal
from longprefill.partition.errors import UserError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
READY_POLL_S = 2.0
MIN_HEARTBEAT_TIMEOUT_S = 5.0
START_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Before each attempt to create a host again; the last for all further ones."""
STEADY_S = 300.0
"""A host that worked so long begins with the first backoff again."""


class HostFailed(RunFailed):
    """The host says that it cannot work."""


class Keeping:
    """One task a host: `keep`."""

    def __init__(self, core: Core, generating: Generating) -> None:
        self._core = core
        self._generating = generating

    async def keep(self, host: Host) -> None:
        """For ever. A newer controller's epoch and trouble with the journal are passed on: this controller must end."""
        num_failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._bring_up(host)
                await self._watch(host)
            except (StaleEpoch, StaleJournal, JournalError):
                raise  # not the host's fault
            except (RunFailed, UserError) as error:
                num_failures = num_failures + 1 if time.monotonic() - began < STEADY_S else 1
                backoff_s = START_BACKOFF_S[min(num_failures, len(START_BACKOFF_S)) - 1]
                self._core.host_is_lost(host, "failed", str(error))
                logger.warning("%s: %s; again in %.0f s", host.name, error, backoff_s)
                await self._give_up(host)
                await asyncio.sleep(backoff_s)

    async def _give_up(self, host: Host) -> None:
        """Ends what is left of a host.

        Raises:
            StaleEpoch: it is a newer controller's by now, and stays.
        """
        link, state = host.link, host.state
        host.link, host.state = None, None
        host.num_restarts += 1
        host.next_step, host.cursor = 1, 0
        host.links.clear()
        for group in self._core.prefill:
            group.links.pop(host.name, None)
        self._core.metrics.group_restarts.labels(host.name).set(host.num_restarts)
        if link is not None:
            try:
                await link.call("close", deadline_s=10.0)
            except StaleEpoch:
                raise
            except (RunFailed, UserError) as error:
                logger.info("%s was not closed: %s", host.name, error)
        with contextlib.suppress(RunFailed):
            await self._core.directory.end(host.name, state)

    async def _bring_up(self, host: Host) -> None:
        """Until the host is ready.

        Raises:
            RunFailed, UserError: it cannot be.
        """
        core = self._core
        if host.link is None:
            host.status = "starting"
            host.link = await core.directory.find(host.name)
            if host.link is None:
                host.link = await core.directory.create(host.settings, host.role)
        if host.state is None or host.state.state == "starting":  # who made one that was taken over may have died here
            await host.link.call("start", deadline_s=COMMAND_DEADLINE_S)
        while True:
            state: HostState = await host.link.call("await_ready", READY_POLL_S, deadline_s=COMMAND_DEADLINE_S)
            self._heard(host, state)
            if state.state == "ready":
                self._is_ready(host, state)
                return
            if state.state in ("failed", "closed"):
                raise HostFailed(state.reason or f"it is {state.state}")
            host.status, host.reason = state.state, state.reason

    async def _watch(self, host: Host) -> None:
        """Heartbeats, and a decode worker's tokens, as long as it lives.

        Raises:
            RunFailed, UserError: it does not any more.
        """
        poll = None
        try:
            while True:
                if host.role == "decode" and host.is_ready and (poll is None or poll.done()):
                    poll = asyncio.create_task(self._generating.poll(host))
                waiting = asyncio.create_task(asyncio.sleep(HEARTBEAT_S))
                await asyncio.wait([waiting, *([poll] if poll else [])], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if poll is not None and poll.done():
                    with contextlib.suppress(NotReady):
                        poll.result()
                await self._check(host)
        finally:
            if poll is not None:
                poll.cancel()
                await asyncio.gather(poll, return_exceptions=True)

    async def _check(self, host: Host) -> None:
        """One heartbeat."""
        core = self._core
        assert host.link is not None
        timeout_s = max(host.settings.cluster.heartbeat_timeout_s, MIN_HEARTBEAT_TIMEOUT_S)
        state: HostState = await host.link.call("state", deadline_s=timeout_s)
        self._heard(host, state)
        if state.state in ("failed", "closed"):
            raise HostFailed(state.reason or f"it is {state.state}")
        if state.state != "ready":
            core.host_is_lost(host, state.state, state.reason or "its group failed")
        elif state.generation != host.generation:
            core.host_is_lost(host, "rebuilding", "its group was rebuilt")
            self._is_ready(host, state)
        elif not host.is_ready:
            self._is_ready(host, state)
        elif host.role == "decode":
            for held in state.jobs:
                if held.job not in core.jobs:  # it ended while its room was being given: nobody gives that back
                    core.evict(held.job, host)

    def _heard(self, host: Host, state: HostState) -> None:
        metrics = self._core.metrics
        host.state, host.heard_at = state, time.monotonic()
        metrics.group_tokens.labels(host.name).set(state.used_tokens)
        metrics.group_max_tokens.labels(host.name).set(state.max_tokens)
        metrics.group_rss.labels(host.name).set(state.rss_bytes)

    def _is_ready(self, host: Host, state: HostState) -> None:
        """The host takes jobs. What it holds and we do not know of is evicted: it was given up before."""
        core = self._core
        ours = {job.number for job in core.jobs.values() if host in (job.group, job.decode)}
        for held in state.jobs:
            if held.job not in ours:
                core.evict(held.job, host)
        core.host_is_ready(host, state)
        core.spawn(self._check_links(host), f"links of {host.name}")

    async def _check_links(self, host: Host) -> None:
        """Whether pages can travel between this host and those on the other side that are ready."""
        core = self._core
        pairs = [
            (group, decode)
            for group in core.prefill
            for decode in core.decode
            if host in (group, decode) and group.is_ready and decode.is_ready
        ]
        for group, decode in pairs:
            if group.link is None:
                continue
            try:
                await group.link.call("check_link", decode.name, deadline_s=COMMAND_DEADLINE_S)
            except NoLink as error:
                logger.warning("%s to %s: %s", group.name, decode.name, error)
                group.links[decode.name] = str(error)
            except (RunFailed, NotReady) as error:
                logger.info("%s to %s could not be checked: %s", group.name, decode.name, error)
            else:
                group.links[decode.name] = None
                core.decode_room_changed.set()
