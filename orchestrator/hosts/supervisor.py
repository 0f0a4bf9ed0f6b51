"""Starts a prefill group, watches it while nobody uses it, and rebuilds it when it is lost: in place where ranks live,
else from the beginning, and not for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.groups import PrefillGroup
from longprefill.orchestrator.hosts.contract import GroupLost, HandoffFailed, HostSettings, NotReady
from longprefill.orchestrator.hosts.fence import Condition
from longprefill.orchestrator.launch import Holder, start_workers
from longprefill.orchestrator.plan import check_fits, step_tokens_for
from longprefill.orchestrator.watch import Watch
from longprefill.partition.errors import UserError
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.stored import fingerprint

logger = logging.getLogger(__name__)

USE_TIMEOUT_S = 1800.0
"""How long a command waits for others that use the group."""
LOOK_S = 1.0
"""Between two looks at idle ranks."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0


class Supervisor:
    """`using` gives the group to one command at a time. `on_loss` runs, in the group's lock, when its jobs are gone."""

    def __init__(self, settings: HostSettings, on_loss: Callable[[], None]) -> None:
        self.settings = settings
        self.condition = Condition(settings.name)
        self.group: PrefillGroup | None = None
        self.generation = 1
        self.num_restarts = 0
        self._on_loss = on_loss
        self._num_rebuilds = 0
        """In a row, without a finished step between them."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """A second call does nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the ranks, also in the middle of a step, and everything else of the group."""
        self.condition.set("closed")
        self._is_closing.set()
        self._wake.set()
        group = self.group
        if group is not None:
            for worker in group.watch.workers:
                worker.end()
        if self._thread is not None:
            self._thread.join(MAX_PAUSE_S)
        if self._lock.acquire(timeout=MAX_PAUSE_S):
            try:
                if self.group is not None:
                    self.group.close()
                    self.group = None
            finally:
                self._lock.release()

    def worked(self) -> None:
        """A step has ended well."""
        self._num_rebuilds = 0

    @contextmanager
    def using(self) -> Iterator[PrefillGroup]:
        """The group, for this thread alone.

        Raises:
            NotReady: there is none now.
            GroupLost: it failed in the block.
        """
        self.condition.check_ready()
        if not self._lock.acquire(timeout=USE_TIMEOUT_S):
            raise NotReady(f"{self.settings.name} has been busy for {USE_TIMEOUT_S:.0f} s")
        try:
            self.condition.check_ready()
            if self.group is None:
                raise NotReady(f"{self.settings.name} has no group")
            try:
                yield self.group
            except HandoffFailed:
                raise  # of the other side
            except RunFailed as error:
                self._lose(str(error))
                raise GroupLost(f"{self.settings.name} lost its group: {error}") from None
        finally:
            self._lock.release()

    def _lose(self, reason: str) -> None:
        self.generation += 1
        if self.group is not None:
            self.group.forget_jobs()
        self._on_loss()
        self.condition.set("rebuilding", reason)
        logger.warning("%s: %s", self.settings.name, reason)
        self._wake.set()

    # ---- in the supervisor's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                if self.condition.state in ("starting", "waiting", "rebuilding"):
                    self._build()
                elif self.condition.state == "ready":
                    self._look()
                else:
                    return
                self._wake.wait(LOOK_S)
                self._wake.clear()
        except BaseException as error:
            self.condition.set("failed", f"its supervisor ended: {type(error).__name__}: {error}")
            raise

    def _look(self) -> None:
        """Whether all ranks answer; who uses the group watches it himself."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.group is not None and self.condition.state == "ready":
                watch, timeout_s = self.group.watch, self.settings.cluster.heartbeat_timeout_s
                pings = {rank.label: rank.actor.ping.remote() for rank in self.group.ranks}
                watch.wait(pings, deadline_s=2 * timeout_s)
        except RunFailed as error:
            self._lose(str(error))
        finally:
            self._lock.release()

    def _build(self) -> None:
        """One attempt to have a working group."""
        self._num_rebuilds += 1
        if self._num_rebuilds > self.settings.max_rebuilds:
            self._give_up(f"{self.condition.reason} (tried {self.settings.max_rebuilds} times)")
            return
        if self._num_rebuilds > 2:
            self._is_closing.wait(min(FIRST_PAUSE_S * 2 ** (self._num_rebuilds - 3), MAX_PAUSE_S))
        with self._lock:
            try:
                if self.group is not None and self.group.ranks:
                    self.group.revive()
                    self.num_restarts += 1
                else:
                    self._place_and_start()
            except UserError as error:
                self._give_up(str(error))
                return
            except (RunFailed, RayError) as error:
                if self._is_closing.is_set():
                    return
                logger.warning("%s could not be built: %s", self.settings.name, error)
                self._drop_group()
                self.condition.set("rebuilding", str(error).splitlines()[0])
                self._wake.set()
                return
        if not self._is_closing.is_set():
            self.condition.set("ready")

    def _give_up(self, reason: str) -> None:
        self._drop_group()
        self.condition.set("failed", reason)

    def _drop_group(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def _place_and_start(self) -> None:
        settings = self.settings.cluster
        config = read_config(settings.model_dir)
        check_fits(settings, config, step_tokens_for(settings, config, settings.max_tokens), num_decode=0)
        group = self.group = PrefillGroup(
            settings,
            config,
            fingerprint(settings.model_dir),
            holder=Holder(settings, config),
            watch=Watch(settings.heartbeat_timeout_s),
            rank_resources=self.settings.resources,
            environment=self.settings.environment,
        )
        group.place()
        while not group.placement.wait(LOOK_S):
            if self._is_closing.is_set():
                return
            self.condition.set("waiting", self._missing(group))
        if self.condition.state == "waiting":
            self.condition.set("starting")
        started = start_workers(group.watch, group.new_workers())
        group.ranks = [worker.watched for worker in started]
        group.form()

    def _missing(self, group: PrefillGroup) -> str:
        bundle = group.bundle
        total, free = ray.cluster_resources(), ray.available_resources()
        has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in bundle)
        needs = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        return f"its place is not free: it needs {self.settings.cluster.cp} times {needs}; the cluster has {has}"
