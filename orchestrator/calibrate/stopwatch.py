"""A tracer that times where an engine's seconds go, every moment counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from longprefill.workers.trace import Tracer


class Lap(NamedTuple):
    """A span without the spans inside it."""

    name: str
    layer: int
    """-1: not in a layer."""
    seconds: float


class Stopwatch(Tracer):
    """`laps` in the order in which spans ended. `clock` gives seconds: `time.thread_time` where the engine computes in
    one thread, so that other processes on its core do not count."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(enabled=True)
        self.clock = clock
        self.laps: list[Lap] = []
        self._inner: list[float] = [0.0]
        """Seconds of the finished spans inside each open one."""

    @contextmanager
    def span(self, name: str, category: str = "kernel", *, layer: int | None = None, job: int = -1) -> Iterator[None]:
        outer = self._layer
        if layer is not None:
            self._layer = layer
        self._inner.append(0.0)
        started = self.clock()
        try:
            yield
        finally:
            elapsed = self.clock() - started
            inner = self._inner.pop()
            self._inner[-1] += elapsed
            self.laps.append(Lap(name, self._layer, elapsed - inner))
            self._layer = outer

    def take_laps(self) -> list[Lap]:
        """The laps so far, which are forgotten."""
        laps, self.laps = self.laps, []
        return laps


class Timed:
    """A kernel module whose functions of the given names are spans."""

    def __init__(self, module: Any, stopwatch: Stopwatch, spans: dict[str, str]) -> None:
        """`spans` by function."""
        self._module = module
        self._stopwatch = stopwatch
        self._spans = spans

    def __getattr__(self, function: str) -> Any:
        found = getattr(self._module, function)
        if function not in self._spans:
            return found

        def timed(*arguments: Any, **options: Any) -> Any:
            with self._stopwatch.span(self._spans[function]):
                return found(*arguments, **options)

        return timed
