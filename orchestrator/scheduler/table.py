"""The queued jobs as columns, so that a policy looks at ten thousand of them in tens of microseconds.

# J slots, some free
"""

from __future__ import annotations

from math import inf

import numpy as np

from longprefill.orchestrator.scheduler.jobs import Job

FIRST_SLOTS = 64


class JobTable:
    """One row a queued or running job; the slot of a job never changes while it is in the table.

    Columns (float64 [J] unless said): remaining_s and isolated_s on one unit; step_s of the next step; arrival_s;
    deadline_s as asked; latest_s by the policy; weight (priority times the tenant's claim); need_bytes: cache memory
    still to reserve, 0 once started; tokens and numbers (of the jobs) [J] int64; is_ready [J] bool: queued, not in a
    step. Free slots are not ready, have nothing left and a weight above 0.
    """

    COLUMNS = (
        "remaining_s",
        "isolated_s",
        "step_s",
        "arrival_s",
        "deadline_s",
        "latest_s",
        "weight",
        "need_bytes",
    )

    def __init__(self) -> None:
        for name in self.COLUMNS:
            setattr(self, name, np.full(FIRST_SLOTS, float(name == "weight")))
        self.tokens = np.zeros(FIRST_SLOTS, dtype=np.int64)
        self.numbers = np.zeros(FIRST_SLOTS, dtype=np.int64)
        self.is_ready = np.zeros(FIRST_SLOTS, dtype=bool)
        self.jobs: list[Job | None] = [None] * FIRST_SLOTS
        self._slot: dict[int, int] = {}
        self._free = list(range(FIRST_SLOTS - 1, -1, -1))
        self._end = 0

    remaining_s: np.ndarray
    isolated_s: np.ndarray
    step_s: np.ndarray
    arrival_s: np.ndarray
    deadline_s: np.ndarray
    latest_s: np.ndarray
    weight: np.ndarray
    need_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, job: int) -> bool:
        return job in self._slot

    def slot(self, job: int) -> int:
        """The job's row; KeyError when it is not in the table."""
        return self._slot[job]

    def job_at(self, slot: int) -> Job:
        job = self.jobs[slot]
        assert job is not None
        return job

    @property
    def end(self) -> int:
        """One past the highest slot ever used: columns need looking at up to here only."""
        return self._end

    def add(self, job: Job, *, isolated_s: float, step_s: float, weight: float, need_bytes: float) -> int:
        """Enters a job as ready, its latest_s infinite.

        Returns:
            Its slot.
        """
        assert job.id not in self._slot
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot[job.id] = slot
        self._end = max(self._end, slot + 1)
        self.jobs[slot] = job
        self.remaining_s[slot] = isolated_s
        self.isolated_s[slot] = isolated_s
        self.step_s[slot] = step_s
        self.arrival_s[slot] = job.arrival_s
        self.deadline_s[slot] = job.deadline_s
        self.latest_s[slot] = inf
        self.weight[slot] = weight
        self.need_bytes[slot] = need_bytes
        self.tokens[slot] = job.num_tokens
        self.numbers[slot] = job.id
        self.is_ready[slot] = True
        return slot

    def remove(self, job: int) -> None:
        slot = self._slot.pop(job)
        self.jobs[slot] = None
        self.is_ready[slot] = False
        self.remaining_s[slot] = 0.0
        self.step_s[slot] = 0.0
        self._free.append(slot)

    def _grow(self) -> None:
        old = len(self.jobs)
        for name in (*self.COLUMNS, "tokens", "numbers", "is_ready"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.full_like(column, name == "weight")]))
        self.jobs += [None] * old
        self._free += range(2 * old - 1, old - 1, -1)
