"""What a decode worker has to tell, in order, kept until it is acknowledged. Any thread may call."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longprefill.partition.errors import UserError
from longprefill.workers.sampling import DecodeFailure, DecodeToken

MAX_BATCH = 4096
"""Entries of one poll."""


class LogBatch(NamedTuple):
    entries: tuple[DecodeToken | DecodeFailure, ...]
    cursor: int
    """Number of the last entry given; asking with it next acknowledges everything up to here."""


class TokenLog:
    """Entries are numbered from 1. `on_room` is called whenever entries were forgotten."""

    def __init__(self, max_kept: int, on_room: Callable[[], None]) -> None:
        self._max_kept = max_kept
        self._on_room = on_room
        self._changed = threading.Condition()
        self._entries: deque[tuple[int, DecodeToken | DecodeFailure]] = deque()
        self._last = 0
        self._acknowledged = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self._max_kept

    @property
    def acknowledged(self) -> int:
        """The cursor from which everything comes that is not acknowledged."""
        return self._acknowledged

    def append(self, entries: Sequence[DecodeToken | DecodeFailure]) -> None:
        """Adds entries and wakes who waits for them."""
        if not entries:
            return
        with self._changed:
            for entry in entries:
                self._last += 1
                self._entries.append((self._last, entry))
            self._changed.notify_all()

    def poll(self, cursor: int, timeout_s: float, *, is_stale: Callable[[], bool] = lambda: False) -> LogBatch:
        """Forgets everything up to `cursor`; what follows it, as soon as there is something or `is_stale`, at most
        after `timeout_s`.

        Raises:
            UserError: a cursor that this log never gave.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if not 0 <= cursor <= self._last:
                raise UserError(f"cursor={cursor}: this worker has told {self._last} entries so far: begin at 0")
            self._acknowledged = max(self._acknowledged, cursor)
            while self._entries and self._entries[0][0] <= self._acknowledged:
                self._entries.popleft()
            self._on_room()
            while not (found := self._after(cursor)) and not is_stale() and not self._is_closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            return LogBatch(tuple(entry for _, entry in found), found[-1][0] if found else cursor)

    def drop(self, job: int) -> None:
        """Forgets a job's entries."""
        with self._changed:
            self._entries = deque((number, entry) for number, entry in self._entries if entry.job != job)
            self._on_room()

    def wake(self) -> None:
        """Lets polls look again whether they are stale."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all polls."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _after(self, cursor: int) -> list[tuple[int, DecodeToken | DecodeFailure]]:
        found: list[tuple[int, DecodeToken | DecodeFailure]] = []
        for entry in self._entries:
            if entry[0] > cursor:
                found.append(entry)
                if len(found) == MAX_BATCH:
                    break
        return found
