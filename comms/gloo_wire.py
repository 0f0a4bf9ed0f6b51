"""Messages over gloo, and what it takes to notice that a peer died.

gloo tells a pending message of a broken connection only while it is queued, not once its bytes are moving: a receive
or send caught halfway sleeps until its own deadline (seen in its TCP transport, and in our tests). Starting any new
message on that connection fails at once, though. So a large transfer is waited for by a second thread, while the
caller's thread probes the connections.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .wires import MAX_TAG, Message, Started, Wire, WireError, first_line

PROBE_TAG = MAX_TAG + 1
PROBE_S = 0.1
"""Pause between two looks at the connections: within it a peer's death is noticed."""
DIRECT_BYTES = 64 << 10
"""With less than this in flight the kernel has taken every message whole: no second thread, which costs 0.1 ms."""
OVERDUE_S = 5.0
"""How long after its deadline a transfer may still be reported by the waiting thread."""


class GlooWire(Wire):
    """gloo over TCP, on one address of this host."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, address: str) -> None:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._backend: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._open_bytes = 0
        """Of messages started and not finished."""
        self._waiter: Waiter | None = None

    def start(self, sends: Sequence[Message], receives: Sequence[Message], started: list[Started]) -> None:
        # Receives first: a send to a peer that already waits is written at once, by this thread.
        for verb, messages in (("receiving from", receives), ("sending to", sends)):
            for message in messages:
                work = self._post(verb == "sending to", message, f"{verb} rank {message.peer}")
                started.append(Started(work, message.peer, verb, (message.bytes_B,)))
                self._open_bytes += message.bytes_B.numel()
                del work

    def finish(self, started: list[Started], deadline_s: float) -> None:
        if self._open_bytes <= DIRECT_BYTES:
            cause = wait_for(started, deadline_s)
        else:
            cause = self._finish_and_probe(started, deadline_s)
        if cause is not None:
            raise WireError(cause)
        self._open_bytes -= sum(tensor.numel() for message in started for tensor in message.tensors)

    def close(self) -> None:
        if self._backend is None:
            return
        if self._open_bytes > 0:
            self._hang_up()
        if self._waiter is not None:
            self._waiter.end()
        self._backend = None  # gloo closes what is left when the last reference goes

    def _post(self, is_send: bool, message: Message, what: str) -> Any:
        # A caught error keeps its frames, and so must not find the backend in one of them: it would never close.
        try:
            if is_send:
                return self._backend.send([message.bytes_B], message.peer, message.tag)
            return self._backend.recv([message.bytes_B], message.peer, message.tag)
        except RuntimeError as error:
            raise WireError(f"{what}: {first_line(error)}") from None

    def _finish_and_probe(self, started: list[Started], deadline_s: float) -> str | None:
        if self._waiter is None:
            self._waiter = Waiter()
        # The waiter gets a list of its own: the caller empties this one when it gives up.
        wait = self._waiter.wait_for(list(started), deadline_s)
        peers = sorted({message.peer for message in started if message.peer is not None})
        while not wait.is_done.wait(PROBE_S):
            for peer in peers:
                probe = Message(peer, PROBE_TAG, torch.zeros(1, dtype=torch.uint8))
                try:
                    self._post(True, probe, f"exchanging with rank {peer}")
                except WireError as error:
                    # When the waiter's own deadline broke the connections, its word is the cause and comes at once.
                    return wait.cause or str(error) if wait.is_done.wait(PROBE_S) else str(error)
            if time.monotonic() > deadline_s + OVERDUE_S:
                return f"exchanging with ranks {peers}: no answer at the deadline"
        return wait.cause

    def _hang_up(self) -> None:
        # A receive that is not answered in time makes gloo close every connection of the group.
        for peer in self._peers:
            try:
                message = Message(peer, PROBE_TAG, torch.zeros(1, dtype=torch.uint8))
                self._post(False, message, "hanging up").wait(timedelta(milliseconds=1))
            except (RuntimeError, WireError):
                continue


class Wait:
    """One transfer handed to the waiting thread."""

    def __init__(self, started: list[Started], deadline_s: float) -> None:
        self.started = started
        self.deadline_s = deadline_s
        self.is_done = threading.Event()
        self.cause: str | None = None


class Waiter:
    """The thread that waits in gloo. When a connection broke it may sleep there until the transfer's deadline; nobody
    waits for it then, and it knows nothing but the messages."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: deque[Wait | None] = deque()
        threading.Thread(target=self._run, name="gloo-waiter", daemon=True).start()

    def wait_for(self, started: list[Started], deadline_s: float) -> Wait:
        """Begins to wait for `started`; `is_done` is set at the end, `cause` says what went wrong."""
        wait = Wait(started, deadline_s)
        self._put(wait)
        return wait

    def end(self) -> None:
        """Ends the thread after what it does now."""
        self._put(None)

    def _put(self, wait: Wait | None) -> None:
        with self._changed:
            self._waits.append(wait)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waits)
                wait = self._waits.popleft()
            if wait is None:
                return
            wait.cause = wait_for(wait.started, wait.deadline_s)
            wait.started = []
            wait.is_done.set()
            del wait


def wait_for(started: list[Started], deadline_s: float) -> str | None:
    """Waits in gloo until all are done: why they are not, or None."""
    for message in started:
        # 0 would mean "no limit" to gloo
        remaining = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
        try:
            message.work.wait(remaining)
        except RuntimeError as error:
            return f"{message.verb} rank {message.peer}: {first_line(error)}"
    return None
