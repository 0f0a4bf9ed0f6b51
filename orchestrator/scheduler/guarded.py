"""Ours: short jobs first, under a guard that keeps a promise to every job.

On arrival a job is promised a latest finish. It is never earlier than the finish that first come, first served would
have given it, which is known at once: the backlog in front of it. So the promises can always be kept all together: of
a set that is feasible in order of its promises, a newcomer whose promise lies behind the whole backlog breaks none. A
job goes first only while every promise before its own has a step to spare; otherwise the earliest promise goes. With
one unit and estimates that are true and add up over steps no promise is ever missed, whatever comes (a property test
holds this); with several units it is a goal.

Short-first order alone would spend all of a document's slack and then run it in the middle of a burst. So a document's
remaining time shrinks in the order's eyes with the share of its slack that is left, and it tends to run where few jobs
wait behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

from longprefill.orchestrator.scheduler.base import Pick, Policy, Promises
from longprefill.orchestrator.scheduler.table import JobTable

HISTORY = 4096
"""Documents whose first-come slowdown is remembered."""
MARGIN = 1e-9
"""Relative slack below which two sums of the same seconds count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """How far a promise lies behind the arrival."""

    document_tokens: int = 65536
    """Jobs from here on are documents."""
    document_stretch: float = 8.0
    """A document's promise: at least this many times its own time."""
    document_quantile: float = 0.99
    document_margin: float = 1.5
    """... and this many times the quantile of the slowdowns that documents would have had first come, first served."""
    document_wait: float = 1.2
    """... and this many times what first come, first served would give this document."""
    short_stretch: float = 20.0
    """Any other job's promise, likewise: it seldom needs it, being short."""
    short_wait: float = 4.0


class Guarded(Policy):
    name = "guarded"

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self.settings = settings or GuardSettings()
        self._backlog_end_s = 0.0
        self._recent: deque[float] = deque()
        self._slowdowns: list[float] = []
        self._order = np.zeros(0, dtype=np.int64)

    def enter(self, table: JobTable, slot: int, now: float, num_units: int) -> None:
        own_s = float(table.isolated_s[slot])
        # The fluid backlog of all units; the job itself runs on one of them.
        self._backlog_end_s = max(self._backlog_end_s, now) + own_s / num_units
        wait_s = max(self._backlog_end_s - own_s / num_units - now, 0.0)
        first_come_s = wait_s + own_s
        promise_s = now + self._promise_s(int(table.tokens[slot]), first_come_s, own_s)
        asked_s = float(table.deadline_s[slot])
        if isfinite(asked_s) and asked_s < promise_s and self._can_meet(table, slot, asked_s, now, num_units):
            promise_s = asked_s
        table.latest_s[slot] = promise_s
        place = int(np.searchsorted(table.latest_s[self._order], promise_s, side="right"))
        self._order = np.concatenate([self._order[:place], [slot], self._order[place:]])

    def leave(self, table: JobTable, slot: int) -> None:
        self._order = self._order[self._order != slot]

    def keys(self, table: JobTable, now: float, slots: np.ndarray | slice) -> np.ndarray:
        remaining_s = table.remaining_s[slots]
        keys = remaining_s / table.weight[slots]
        documents = (table.tokens[slots] >= self.settings.document_tokens).nonzero()[0]
        if len(documents):
            slots = documents if isinstance(slots, slice) else slots[documents]
            whole_s = np.maximum(table.latest_s[slots] - table.arrival_s[slots] - table.isolated_s[slots], 1e-9)
            left_s = np.maximum(table.latest_s[slots] - now - remaining_s[documents], 0.0)
            keys[documents] *= np.minimum(left_s / whole_s, 1.0)
        return keys

    def pick(self, table: JobTable, now: float, num_units: int, eligible: np.ndarray) -> Pick | None:
        slot = self.first(table, now, eligible)
        if slot is None:
            return None
        order = self._order
        place = int((order == slot).argmax())
        if place == 0:
            return Pick(slot, "shortest; its promise is the earliest", False)
        before, seen = order[:place], self._promises(table, now)
        slack_s = seen.left_s[:place] - np.maximum(seen.sums_s[:place] / num_units, seen.own_s[:place])
        if float(slack_s.min()) > float(table.step_s[slot]) + MARGIN * abs(now):
            return Pick(slot, "shortest; every promise before it can wait a step", False, seen)
        waiting = before[eligible[before]]
        if not len(waiting):
            return Pick(slot, "shortest; the promises before it are being kept elsewhere", False, seen)
        return Pick(int(waiting[0]), f"promised by {table.latest_s[waiting[0]]:.3f} s", True, seen)

    def room(
        self, table: JobTable, now: float, num_units: int, slots: Sequence[int], promises: Promises | None
    ) -> Callable[[int, float], bool]:
        """Every one of them ends with the step; the others that are promised before their last are put off by it. What
        nothing can keep any more limits nothing."""
        margin_s = MARGIN * abs(now)
        left_s, own_s, sums_s = promises or self._promises(table, now)
        places = np.searchsorted(left_s, table.latest_s[slots] - now)
        while (is_wrong := self._order[places] != slots).any():
            places[is_wrong] += 1  # equal promises
        kept_s = np.where(left_s[places] >= own_s[places] - margin_s, left_s[places], inf)
        last_s = np.maximum.accumulate(left_s[places])
        least_s = left_s - np.maximum(sums_s / num_units, own_s)
        """Slack of every promise if all of them had to wait for each other."""

        def has_room(number: int, seconds: float) -> bool:
            wanted_s = seconds + margin_s
            if kept_s[:number].min() < wanted_s:
                return False
            ours, end = np.sort(places[:number]), int(np.searchsorted(left_s, last_s[number - 1], side="right"))
            gone_s = np.cumsum(own_s[ours]) / num_units
            in_doubt = (least_s[:end] < wanted_s) & (least_s[:end] >= -margin_s - gone_s[-1])
            in_doubt[ours] = False
            others = in_doubt.nonzero()[0]
            before_s = np.concatenate([[0.0], gone_s])[np.searchsorted(ours, others)]
            slack_s = left_s[others] - np.maximum(sums_s[others] / num_units - before_s, own_s[others])
            return not bool(((slack_s >= -margin_s) & (slack_s < wanted_s)).any())

        return has_room

    def _promises(self, table: JobTable, now: float) -> Promises:
        own_s = table.remaining_s[self._order]
        return Promises(table.latest_s[self._order] - now, own_s, np.cumsum(own_s))

    def _promise_s(self, num_tokens: int, first_come_s: float, own_s: float) -> float:
        """Seconds from arrival to the promise; never below `first_come_s`."""
        settings = self.settings
        if num_tokens < settings.document_tokens:
            return max(settings.short_wait * first_come_s, settings.short_stretch * own_s)
        insort(self._slowdowns, first_come_s / own_s)
        self._recent.append(first_come_s / own_s)
        if len(self._recent) > HISTORY:
            self._slowdowns.pop(bisect_left(self._slowdowns, self._recent.popleft()))
        place = min(int(settings.document_quantile * len(self._slowdowns)), len(self._slowdowns) - 1)
        stretch = max(settings.document_stretch, settings.document_margin * self._slowdowns[place])
        return max(settings.document_wait * first_come_s, stretch * own_s)

    def _can_meet(self, table: JobTable, slot: int, asked_s: float, now: float, num_units: int) -> bool:
        """Whether a promise of `asked_s` leaves it and all others feasible, a running step in the way included."""
        latest_s = table.latest_s[self._order]
        place = int(np.searchsorted(latest_s, asked_s, side="right"))
        own_s = float(table.remaining_s[slot])
        blocked_s = float(table.step_s[self._order][~table.is_ready[self._order]].max(initial=0.0))
        before_s = float(table.remaining_s[self._order[:place]].sum())
        if now + blocked_s + max((before_s + own_s) / num_units, own_s) > asked_s:
            return False
        after = self._order[place:]
        finish_s = now + blocked_s + (before_s + own_s + np.cumsum(table.remaining_s[after])) / num_units
        return bool((finish_s <= table.latest_s[after]).all())
