"""Spans of one rank on the host's wall clock, for the Chrome trace and for time by kind. Costs nothing when off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    category: str
    """"layer", "kernel", "collective", "wait" or "host"."""
    start_us: float
    duration_us: float
    layer: int
    """-1: not in a layer."""
    job: int
    """-1: all jobs of the step."""


class Tracer:
    """Collects spans while `enabled`. Not thread-safe: one a thread."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.spans: list[Span] = []
        self._layer = -1

    @contextmanager
    def span(self, name: str, category: str = "kernel", *, layer: int | None = None, job: int = -1) -> Iterator[None]:
        """Times the block. A span with `layer` sets the layer of the spans inside it."""
        if not self.enabled:
            yield
            return
        outer = self._layer
        if layer is not None:
            self._layer = layer
        start_ns = time.time_ns()
        try:
            yield
        finally:
            duration_us = (time.time_ns() - start_ns) / 1000
            self.spans.append(Span(name, category, start_ns / 1000, duration_us, self._layer, job))
            self._layer = outer

    def take(self) -> list[Span]:
        """The spans so far, which are forgotten."""
        spans, self.spans = self.spans, []
        return spans
