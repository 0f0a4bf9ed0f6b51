"""Waiting for workers without ever waiting for ever: deaths, raised errors and stopped processes end the wait with a
reason.

A killed worker shows as an actor death, a raised error as itself. A stopped process (SIGSTOP, a dead-locked kernel)
shows
as nothing at all in Ray, so every worker answers a ping from its own thread; one that does not is ended by its pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from longprefill.orchestrator.errors import RunFailed
from longprefill.partition.errors import UserError
from longprefill.workers.spec import Whereabouts

POLL_S = 0.25
PING_INTERVAL_S = 1.0
ROOT_CAUSE_S = 3.0
"""After a first failure, how long to wait for a better one: peers of a dead rank fail some milliseconds before its
death is known."""


@dataclass(kw_only=True)
class Watched:
    """A worker under watch: `label` names it in errors."""

    label: str
    actor: Any
    pid: int
    place: Whereabouts | None = None
    """None: a process that this one sees."""
    _ping: Any = None
    _asked_at: float = 0.0
    _heard_at: float = 0.0

    @staticmethod
    def at(place: Whereabouts, *, label: str, actor: Any) -> Watched:
        """The worker that said this of itself."""
        return Watched(label=label, actor=actor, pid=place.pid, place=place)

    @property
    def is_here(self) -> bool:
        """Whether its pid means something to this process."""
        return self.place is None or self.place.machine == Whereabouts.here().machine

    def end(self) -> None:
        """Ends its process, a stopped one too; on another machine that is Ray's to do."""
        if self.is_here:
            end_process(self.pid)
        else:
            ray.kill(self.actor, no_restart=True)


class Watch:
    """Waits for calls to a set of workers."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._workers: list[Watched] = []

    def add(self, worker: Watched) -> None:
        self._workers.append(worker)

    @property
    def workers(self) -> tuple[Watched, ...]:
        return tuple(self._workers)

    def remove(self, worker: Watched) -> None:
        self._workers.remove(worker)

    def clear(self) -> list[Watched]:
        """Watches nobody any more; returns whom it watched."""
        workers, self._workers = self._workers, []
        return workers

    def wait(self, calls: Mapping[str, Any], *, deadline_s: float | None = None) -> dict[str, Any]:
        """Results of labelled calls, once all are there.

        Raises:
            RunFailed: a worker died, hung or raised; names it and the reason.
            UserError: a worker refused its input (as raised there).
        """
        pending = {ref: label for label, ref in calls.items()}
        results: dict[str, Any] = {}
        started = time.monotonic()
        self._restart_pings()
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=POLL_S)
            for ref in ready:
                label = pending.pop(ref)
                try:
                    results[label] = ray.get(ref)
                except RayError as error:
                    raise self._root_cause(label, error, pending) from error
            if pending:
                self._check_pings()
                if deadline_s is not None and time.monotonic() - started > deadline_s:
                    names = ", ".join(sorted(pending.values()))
                    raise RunFailed(f"{names} did not answer within {deadline_s:.0f} s")
        return results

    def next_of(self, label: str, stream: Any) -> Any:
        """The next result of a streaming call, None after the last. Raises as `wait`."""
        self._restart_pings()
        while not ray.wait([stream], timeout=POLL_S)[0]:
            self._check_pings()
        try:
            reference = next(stream)
        except StopIteration:
            return None
        return self.wait({label: reference})[label]

    def _root_cause(self, label: str, error: RayError, pending: dict[Any, str]) -> Exception:
        failures = {label: error}
        deadline = time.monotonic() + ROOT_CAUSE_S
        while pending and not isinstance(error, RayActorError) and time.monotonic() < deadline:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S)
            for ref in ready:
                name = pending.pop(ref)
                try:
                    ray.get(ref)
                except RayError as other:
                    failures[name] = other
                    if isinstance(other, RayActorError):
                        return self._death(name, other)
            self._check_pings()
        if isinstance(error, RayActorError):
            return self._death(label, error)
        for name, failure in failures.items():
            cause = failure.cause if isinstance(failure, RayTaskError) else failure
            if isinstance(cause, UserError):
                return cause
            if type(cause).__name__ != "GroupError":  # a peer's symptom, not a cause, while another failure is known
                return RunFailed(f"{name} failed: {type(cause).__name__}: {_first_line(cause)}")
        cause = error.cause if isinstance(error, RayTaskError) else error
        return RunFailed(f"{label} failed: {_first_line(cause)}")

    def _death(self, label: str, error: RayError) -> RunFailed:
        pid = next((f" (pid {worker.pid})" for worker in self._workers if worker.label == label), "")
        return RunFailed(f"{label}{pid} died: {_cause_of_death(error)}")

    def _restart_pings(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            worker._ping, worker._asked_at, worker._heard_at = None, 0.0, now

    def _check_pings(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker._ping is not None:
                ready, _ = ray.wait([worker._ping], timeout=0)
                if ready:
                    try:
                        ray.get(worker._ping)
                    except RayError as error:  # dead without a call of its own that could say so
                        raise self._death(worker.label, error) from error
                    worker._ping, worker._heard_at = None, now
                elif now - worker._heard_at > self._timeout_s:
                    worker.end()
                    raise RunFailed(
                        f"{worker.label} (pid {worker.pid}) stopped answering for {self._timeout_s:.0f} s; ended"
                    )
            elif now - worker._asked_at > PING_INTERVAL_S:
                worker._ping, worker._asked_at = worker.actor.ping.remote(), now


def end_process(pid: int) -> None:
    """Ends a worker that does not react to Ray any more (SIGKILL works on stopped processes too), and what it has
    started itself: a compiler, say. Ray gives every worker a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _cause_of_death(error: RayError) -> str:
    text = str(error)
    if "SYSTEM_ERROR" in text or "connection error" in text:  # Ray's paragraph about a process that just vanished
        return "its process was killed (by a signal, or by the kernel for want of memory) or crashed in native code"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
