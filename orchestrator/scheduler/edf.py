"""Earliest deadline first. A job without a deadline of its own gets one in proportion to its work."""

from __future__ import annotations

import numpy as np

from longprefill.orchestrator.scheduler.base import Policy
from longprefill.orchestrator.scheduler.table import JobTable

DEFAULT_STRETCH = 5.0
"""Deadline of a job that names none: this many times what it takes alone."""


class Edf(Policy):
    name = "edf"

    def keys(self, table: JobTable, now: float, slots: np.ndarray | slice) -> np.ndarray:
        implied_s = table.arrival_s[slots] + DEFAULT_STRETCH * table.isolated_s[slots] / table.weight[slots]
        return np.minimum(table.deadline_s[slots], implied_s)
