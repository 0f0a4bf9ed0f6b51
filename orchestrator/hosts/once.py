"""Commands that are carried out once, however often they are asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.contract import StaleEpoch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Once(Generic[K]):
    """Outcomes by key; the newest `max_kept` are remembered. Any thread may call."""

    def __init__(self, max_kept: int, *, timeout_s: float) -> None:
        self._max_kept = max_kept
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._futures: OrderedDict[K, Future[Any]] = OrderedDict()

    def run(self, key: K, function: Callable[[], T], *, admit: Callable[[], None] = lambda: None) -> T:
        """The function's result or error; of the first caller's call for everybody who asks with this key. `admit` may
        refuse a first caller. What a stale caller's call became is not kept: it did nothing."""
        with self._lock:
            future = self._futures.get(key)
            is_first = future is None
            if future is None:
                admit()
                future = self._futures[key] = Future()
                while len(self._futures) > self._max_kept:
                    self._futures.popitem(last=False)
        if not is_first:
            try:
                return future.result(self._timeout_s)
            except FutureTimeout:
                raise RunFailed(f"the first call for {key} has not ended after {self._timeout_s:.0f} s") from None
        try:
            result = function()
        except BaseException as error:
            if isinstance(error, StaleEpoch):
                self.forget(key)
            future.set_exception(error)
            raise
        future.set_result(result)
        return result

    def forget(self, key: K) -> None:
        """A next call for this key runs again."""
        with self._lock:
            self._futures.pop(key, None)

    def clear(self) -> None:
        """As `forget`, of all keys."""
        with self._lock:
            self._futures.clear()
