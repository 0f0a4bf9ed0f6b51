"""Failures of a run that the caller should see as one sentence: what died, why, and what became of the job."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run ended before its result: a worker died, hung, or raised. One line; the cause is chained where there is
    one."""
