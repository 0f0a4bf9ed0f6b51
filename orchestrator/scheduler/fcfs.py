"""First come, first served: the yardstick. A document is never preempted, and everything behind it waits."""

from __future__ import annotations

import numpy as np

from longprefill.orchestrator.scheduler.base import Policy
from longprefill.orchestrator.scheduler.table import JobTable


class Fcfs(Policy):
    name = "fcfs"

    def keys(self, table: JobTable, now: float, slots: np.ndarray | slice) -> np.ndarray:
        return table.arrival_s[slots]
