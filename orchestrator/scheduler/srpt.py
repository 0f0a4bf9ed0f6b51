"""Shortest remaining time first: the best mean there is, without any bound on how long a document waits."""

from __future__ import annotations

import numpy as np

from longprefill.orchestrator.scheduler.base import Policy
from longprefill.orchestrator.scheduler.table import JobTable


class Srpt(Policy):
    name = "srpt"

    def keys(self, table: JobTable, now: float, slots: np.ndarray | slice) -> np.ndarray:
        return table.remaining_s[slots] / table.weight[slots]
