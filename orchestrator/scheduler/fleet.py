"""Where jobs are: which units are free, alive and how much cache memory each has left. Blocks are buddies.

# U units
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from longprefill.orchestrator.scheduler.decisions import Block
from longprefill.orchestrator.scheduler.settings import FleetSettings


class Fleet:
    """Books of the units. Busy: in a step. Held: a job's pages lie on every unit of its home block."""

    def __init__(self, settings: FleetSettings) -> None:
        num_units = settings.num_units
        self.settings = settings
        self.is_free = np.ones(num_units, dtype=bool)
        self.is_alive = np.ones(num_units, dtype=bool)
        limit = inf if settings.cache_bytes is None else float(settings.cache_bytes)
        self.free_bytes = np.full(num_units, limit)
        self.num_alive = num_units
        self.num_free = num_units
        """Units that are alive and not in a step."""
        self._is_limited = settings.cache_bytes is not None
        self._held: dict[int, tuple[Block, float]] = {}

    def home(self, job: int) -> Block | None:
        """Where the job's caches are."""
        held = self._held.get(job)
        return None if held is None else held[0]

    def most_free_bytes(self) -> float:
        """Cache memory of the emptiest idle unit; minus infinity when none is idle."""
        if not self._is_limited:
            return inf if self.num_free else -inf
        return float(self.free_bytes[self.is_free & self.is_alive].max(initial=-inf))

    def is_usable(self, block: Block, job: int, need_bytes: float) -> bool:
        """Whether the job can run on the block now: idle, alive, and with memory (what the job holds there counts)."""
        if block.start + block.size > len(self.is_free):
            return False  # the last units of a fleet that is no power of two have no whole buddy
        if block.size == 1 and not self._is_limited:
            return bool(self.is_free[block.start] and self.is_alive[block.start])
        units = slice(block.start, block.start + block.size)
        if not (self.is_free[units] & self.is_alive[units]).all():
            return False
        room = self.free_bytes[units].copy()
        home = self.home(job)
        if home is not None:
            first, last = max(home.start, block.start), min(home.start + home.size, block.start + block.size)
            room[max(first - block.start, 0) : max(last - block.start, 0)] += self._held[job][1]
        return bool((room >= need_bytes).all())

    def find(self, size: int, need_bytes: float) -> Block | None:
        """The first usable block of a size, None when there is none."""
        usable = self.is_free & self.is_alive
        if self._is_limited:
            usable &= self.free_bytes >= need_bytes
        if size == 1:
            place = int(usable.argmax())
            return Block(place, 1) if usable[place] else None
        whole = len(usable) // size * size
        blocks = np.asarray(usable[:whole].reshape(-1, size).all(axis=1))
        place = int(blocks.argmax()) if len(blocks) else 0
        return Block(place * size, size) if len(blocks) and blocks[place] else None

    def hold(self, job: int, block: Block, num_bytes: float) -> None:
        """Makes the block the job's home; what it held elsewhere is given back."""
        held = self._held.get(job)
        if held is not None and held[0] == block:
            return
        self.release(job)
        if self._is_limited:
            self.free_bytes[block.start : block.start + block.size] -= num_bytes
        self._held[job] = (block, num_bytes)

    def release(self, job: int) -> None:
        held = self._held.pop(job, None)
        if held is not None and self._is_limited:
            block, num_bytes = held
            self.free_bytes[block.start : block.start + block.size] += num_bytes

    def occupy(self, block: Block) -> None:
        """The block's units, all usable, are in a step."""
        self.is_free[block.start : block.start + block.size] = False
        self.num_free -= block.size

    def vacate(self, block: Block) -> None:
        """The step on the block has ended."""
        units = slice(block.start, block.start + block.size)
        self.is_free[units] = True
        self.num_free += int(self.is_alive[units].sum())

    def lose(self, unit: int) -> None:
        """The unit is dead; it stays busy until its step is given up."""
        if self.is_alive[unit]:
            self.is_alive[unit] = False
            self.num_alive -= 1
            self.num_free -= int(self.is_free[unit])

    def regain(self, unit: int) -> None:
        """The unit is alive again and empty."""
        if not self.is_alive[unit]:
            self.is_alive[unit] = True
            self.num_alive += 1
            self.num_free += int(self.is_free[unit])

    def homed_on(self, units: Sequence[int]) -> list[tuple[int, Block]]:
        """Jobs whose caches lie on one of the units at least, in order of their numbers, and where they lie."""
        return sorted((job, block) for job, (block, _) in self._held.items() if block.touches(units))
