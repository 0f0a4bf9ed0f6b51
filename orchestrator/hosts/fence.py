"""What both kinds of host have: the epoch that fences off earlier controllers, and a state that can be waited for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from longprefill.orchestrator.hosts.contract import NotReady, StaleEpoch

MAX_WAIT_S = 60.0
"""Longest wait of one call: callers ask again."""
SETTLED = ("ready", "failed", "closed")


class Fence:
    """The highest epoch that has commanded a host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epoch = 0

    def check(self, epoch: int) -> bool:
        """Lets a command of this epoch pass; whether it is the first of a higher one.

        Raises:
            StaleEpoch: a higher epoch has commanded this host.
        """
        with self._lock:
            if epoch < self.epoch:
                raise StaleEpoch(f"epoch {epoch} is over: epoch {self.epoch} commands this host now")
            is_new, self.epoch = epoch > self.epoch, epoch
            return is_new


class Condition:
    """A host's state with its reason."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self.state = "starting"
        self.reason: str | None = None

    def set(self, state: str, reason: str | None = None) -> None:
        """A closed host stays closed."""
        with self._changed:
            if self.state != "closed":
                self.state, self.reason = state, reason
            self._changed.notify_all()

    def await_settled(self, timeout_s: float) -> None:
        """Returns when it is ready, failed or closed, or after `timeout_s`."""
        deadline = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        with self._changed:
            while self.state not in SETTLED and (remaining := deadline - time.monotonic()) > 0:
                self._changed.wait(remaining)

    def check_ready(self) -> None:
        """Raises NotReady unless it is."""
        if self.state != "ready":
            because = f": {self.reason}" if self.reason else ""
            raise NotReady(f"{self._name} is {self.state}{because}")


def rss_bytes(pid: int) -> int:
    """Resident memory of a process of this machine; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError, ValueError):
        return 0
