"""What a policy is: an order over the table. A policy sees estimates only, never a clock or a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from longprefill.orchestrator.scheduler.jobs import SchedulerError
from longprefill.orchestrator.scheduler.table import JobTable

POLICIES = ("guarded", "fcfs", "edf", "srpt")
"""Ours first: the default."""


class Promises(NamedTuple):
    """The jobs of a table in the order of their promises, at one time."""

    left_s: np.ndarray
    """Until the promise."""
    own_s: np.ndarray
    """Remaining, on one unit."""
    sums_s: np.ndarray
    """Of the job and all before it."""


class Pick(NamedTuple):
    """The next job and the reason in words; `is_urgent` when nothing new may start before it."""

    slot: int
    reason: str
    is_urgent: bool
    promises: Promises | None = None
    """As the policy saw them, if it did."""


class Policy(ABC):
    """Calls in order: `enter` once a job, `pick` at every decision, `leave` when the job ends or is cancelled."""

    name: str

    def enter(self, table: JobTable, slot: int, now: float, num_units: int) -> None:
        """A job has come: the policy may set its `latest_s`. `num_units` work at once."""
        return  # an order alone promises nothing

    def leave(self, table: JobTable, slot: int) -> None:
        """A job is about to leave the table."""
        return

    @abstractmethod
    def keys(self, table: JobTable, now: float, slots: np.ndarray | slice) -> np.ndarray:
        """One number for each of the slots, or of the first ones, free ones among them; the smallest goes first, ties
        to the earlier arrival, then the lower id."""

    def pick(self, table: JobTable, now: float, num_units: int, eligible: np.ndarray) -> Pick | None:
        """The next of the eligible slots ([table.end] bool), None when there is none."""
        slot = self.first(table, now, eligible)
        return None if slot is None else Pick(slot, self.name, False)

    def order(self, table: JobTable, now: float, slots: np.ndarray, most: int) -> np.ndarray:
        """Of the slots the `most` that go first, in order."""
        keys = self.keys(table, now, slots)
        if len(slots) > most:
            first = keys <= np.partition(keys, most - 1)[most - 1]
            slots, keys = slots[first], keys[first]
        return slots[np.lexsort((table.numbers[slots], table.arrival_s[slots], keys))][:most]

    def room(
        self, table: JobTable, now: float, num_units: int, slots: Sequence[int], promises: Promises | None
    ) -> Callable[[int, float], bool]:
        """Whether there is room for a step that ends the jobs of the first so many of `slots` and takes so long.
        `promises`: of the pick at this time; since then nothing has changed."""
        return lambda number, seconds: True

    def first(self, table: JobTable, now: float, eligible: np.ndarray) -> int | None:
        """The eligible slot with the smallest key; ties by arrival, then job number, so that slots never matter."""
        if not eligible.any():
            return None
        # whole columns are read faster than the eligible slots of each
        keys = np.where(eligible, self.keys(table, now, slice(0, len(eligible))), inf)
        tied = ((keys == keys.min()) & eligible).nonzero()[0]
        if len(tied) == 1:
            return int(tied[0])
        return int(tied[np.lexsort((table.numbers[tied], table.arrival_s[tied]))[0]])


def make_policy(name: str) -> Policy:
    """A fresh policy by its name.

    Raises:
        SchedulerError: an unknown name.
    """
    if name == "fcfs":
        from longprefill.orchestrator.scheduler.fcfs import Fcfs

        return Fcfs()
    if name == "edf":
        from longprefill.orchestrator.scheduler.edf import Edf

        return Edf()
    if name == "srpt":
        from longprefill.orchestrator.scheduler.srpt import Srpt

        return Srpt()
    if name == "guarded":
        from longprefill.orchestrator.scheduler.guarded import Guarded

        return Guarded()
    raise SchedulerError(f"policy={name!r} is unknown: use {', '.join(POLICIES)}")
