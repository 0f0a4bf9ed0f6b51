"""Clocks of the ranks of a step: each works, waits for the others at every meeting, and knows where its time went."""

from __future__ import annotations

from collections import defaultdict

Seconds = defaultdict[str, float]
"""By part."""


class Group:
    """Operations that every rank runs without an exchange in between: seconds by part, and their sum, for each rank."""

    __slots__ = ("least", "more", "parts", "totals")

    def __init__(self, parts: list[Seconds]) -> None:
        sums: dict[int, float] = {}
        for found in parts:
            if id(found) not in sums:
                sums[id(found)] = sum(found.values())
        self.parts = parts
        self.totals = [sums[id(found)] for found in parts]
        self.least = min(sums.values())
        self.more = [seconds - self.least for seconds in self.totals] if len(sums) > 1 else None
        """Beyond the least; None: all take the same."""


class Clocks:
    """Time of each chosen rank, and where it went: `now` counts from `base`, so that equal layers that find the ranks
    equally far apart do the same to the last bit."""

    def __init__(self, now: list[float]) -> None:
        self.base = 0.0
        self.now = now
        self.waiting = [0.0] * len(now)
        self.exposed: Seconds = defaultdict(float)
        self.groups: dict[Group, int] = defaultdict(int)

    def run(self, group: Group) -> None:
        """Every rank works."""
        self.base += group.least
        if group.more is not None:
            self.now = [now + more for now, more in zip(self.now, group.more, strict=True)]
        self.groups[group] += 1

    def meet(self, name: str, seconds: float) -> None:
        """All ranks wait for the last one, then for the exchange."""
        last = max(self.now)
        self.waiting = [waited + last - now for waited, now in zip(self.waiting, self.now, strict=True)]
        self.base += last + seconds
        self.now = [0.0] * len(self.now)
        self.exposed[name] += seconds

    def pay(self, name: str, seconds: float) -> None:
        """Every rank spends the same on something that is no work."""
        self.exposed[name] += seconds
        self.base += seconds

    def settle(self) -> None:
        """Counts from the first rank's time on."""
        least = min(self.now)
        self.base += least
        self.now = [now - least for now in self.now]

    def add(self, after: Clocks, times: int) -> None:
        """What happened so many times on other clocks, but for where they stand."""
        self.base += times * after.base
        self.waiting = [a + times * b for a, b in zip(self.waiting, after.waiting, strict=True)]
        for name, seconds in after.exposed.items():
            self.exposed[name] += times * seconds
        for group, number in after.groups.items():
            self.groups[group] += times * number

    def parts(self, rank: int) -> Seconds:
        """A rank's work by part."""
        total: Seconds = defaultdict(float)
        for group, times in self.groups.items():
            for name, seconds in group.parts[rank].items():
                total[name] += times * seconds
        return total

    def work_s(self) -> list[float]:
        """Work of every rank."""
        groups = self.groups.items()
        return [sum(times * group.totals[rank] for group, times in groups) for rank in range(len(self.now))]
