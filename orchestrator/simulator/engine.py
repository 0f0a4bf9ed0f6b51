"""The clock: a heap of events, each of which may return more. Everything else is somebody's state."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

World = TypeVar("World")


class Event(ABC, Generic[World]):
    """Something that happens to a world at a time."""

    order = 0
    """Of events at the same time the lower order happens first, then the one that was announced first."""

    @abstractmethod
    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        """Changes the world and returns what follows, not before `now`."""


class Timed(NamedTuple, Generic[World]):
    at_s: float
    event: Event[World]


def run(world: World, first: Iterable[Timed[World]]) -> float:
    """Lets everything happen, in order; the time of the last event.

    Raises:
        ValueError: an event before its cause.
    """
    heap: list[tuple[float, int, int, Event[World]]] = []
    num_announced = 0

    def announce(events: Iterable[Timed[World]], now: float) -> None:
        nonlocal num_announced
        for at_s, event in events:
            if at_s < now:
                raise ValueError(f"{type(event).__name__} at {at_s} s follows from an event at {now} s")
            heapq.heappush(heap, (at_s, event.order, num_announced, event))
            num_announced += 1

    now = 0.0
    announce(first, now)
    while heap:
        now, _, _, event = heapq.heappop(heap)
        announce(event.happen(world, now), now)
    return now
