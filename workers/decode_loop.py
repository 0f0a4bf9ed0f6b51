"""The thread that decodes. Everything that touches a decode worker's jobs runs in it, between two iterations: calls at
once, and long work, the verification of a hand-off, in slices that hold nobody up for long.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from longprefill.comms.transport.base import TransportError
from longprefill.partition.errors import UserError
from longprefill.workers.decode_batch import DecodeBatch
from longprefill.workers.token_log import TokenLog

SLICE_S = 0.02
"""Long work between two iterations while samples run."""
ANSWERS = (UserError, TransportError, KeyError)
"""What a call may raise to its caller; anything else is a bug and ends the loop."""
T = TypeVar("T")


class LoopEnded(RuntimeError):
    """The decoding thread has ended: closed, or failed with the reason given."""


class DecodeLoop:
    """`call` and `work` are for other threads. `prepare` runs first in the thread: its floating point modes, say."""

    def __init__(self, batch: DecodeBatch, max_kept: int, *, prepare: Callable[[], object] = lambda: None) -> None:
        self._batch = batch
        self._prepare = prepare
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._work: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._is_closing = False
        self.failure: str | None = None
        """Why the thread ended by itself."""
        self.log = TokenLog(max_kept, self._wake)
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """The function's result, run between two iterations.

        Raises:
            LoopEnded: nobody runs it any more.
            TimeoutError: an iteration takes longer than `timeout_s`; the function will still run.
            UserError, TransportError, KeyError: as the function raised.
        """
        return self._queue(self._calls, function).result(timeout_s)

    def work(self, generator: Generator[None, None, T], *, timeout_s: float) -> T:
        """The generator's return value; it runs piece by piece. Raises as `call`."""
        return self._queue(self._work, generator).result(timeout_s)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Ends the thread after its iteration; polls end too."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self.log.close()
        self._thread.join(timeout_s)

    def _queue(self, queue: deque[Any], item: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._is_closing or self.failure is not None:
                raise LoopEnded(self.failure or "the decode worker is closed")
            queue.append((item, future))
            self._changed.notify_all()
        return future

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._is_closing:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing or self._calls or self._work or self._can_iterate())
                while self._calls:  # one that breaks the loop stays queued, and is told so with the others
                    _settle(*self._calls[0])
                    self._calls.popleft()
                self._run_work()
                if self._can_iterate():
                    self.log.append(self._batch.iterate())
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise
        finally:
            self._refuse_all()

    def _can_iterate(self) -> bool:
        return self._batch.has_work and not self.log.is_full

    def _run_work(self) -> None:
        """At most a slice of the oldest work; one piece of it at least."""
        ends_at = time.monotonic() + SLICE_S
        while self._work:
            generator, future = self._work[0]
            try:
                next(generator)
            except StopIteration as end:
                self._work.popleft()
                future.set_result(end.value)
            except ANSWERS as error:
                self._work.popleft()
                future.set_exception(error)
            if time.monotonic() >= ends_at:
                return

    def _refuse_all(self) -> None:
        with self._changed:
            self._is_closing = True
            ended = LoopEnded(self.failure or "the decode worker is closed")
            for _, future in (*self._calls, *self._work):
                if not future.done():
                    future.set_exception(ended)
            self._calls.clear()
            self._work.clear()
        self.log.close()


def _settle(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except ANSWERS as error:
        future.set_exception(error)
