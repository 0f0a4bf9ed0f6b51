"""What can ever fit: a job that no block of the fleet can hold is refused with what would hold it, never queued."""

from __future__ import annotations

from longprefill.orchestrator.scheduler.jobs import Job
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.partition.layout import PAGE_TOKENS


def refusal(job: Job, fleet: FleetSettings, settings: SchedulerSettings, num_queued: int) -> str | None:
    """Why the job cannot be taken: one sentence, None when it can.

    Caches are replicated, so more units do not help: every device holds all pages, beside a step of one page.
    """
    if num_queued >= settings.max_queued:
        return f"{num_queued} jobs are queued, max_queued={settings.max_queued}: try again later"
    if fleet.cache_bytes is None:
        return None
    held = fleet.job_bytes(job.num_tokens)
    step = PAGE_TOKENS * fleet.step_bytes
    if held + step <= fleet.cache_bytes:
        return None
    room = fleet.cache_bytes - step - fleet.state_bytes
    pages = room // (PAGE_TOKENS * fleet.token_bytes) if fleet.token_bytes else 0
    longest = max(pages, 0) * PAGE_TOKENS
    return (
        f"num_tokens={job.num_tokens} needs {_gib(held + step)} on every device, cache_bytes allows "
        f"{_gib(fleet.cache_bytes)}: use at most {longest} tokens, a smaller cache format or owner-sharded caches"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
