"""What others may see of jobs and hosts."""

from __future__ import annotations

import time

from longprefill.orchestrator.controller.contract import ClusterView, GroupView, Readiness
from longprefill.orchestrator.controller.core import Core
from longprefill.orchestrator.controller.live import Host, LiveJob
from longprefill.orchestrator.job import JobEstimate, JobState, JobView
from longprefill.orchestrator.journal.schema import JobRow

CONTRACT_STATES = {"rebuilding": "starting", "closed": "failed"}
"""Of hosts, in the words of GroupView."""


def job_view(core: Core, row: JobRow) -> JobView:
    """A job as its owner sees it."""
    live = core.jobs.get(row.number)
    reason = row.reason
    if live is not None and live.waits_for is not None and row.state is not JobState.GENERATING:
        reason = live.waits_for
    return JobView(
        id=row.id,
        tenant=row.tenant,
        state=row.state,
        reason=reason,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        position=row.position,
        num_steps=row.num_steps,
        num_preemptions=row.num_preemptions,
        num_attempts=row.num_attempts,
        group=row.group_name,
        decode_worker=row.decode_worker,
        estimate=None if live is None else _estimate(core, live),
        timings=row.timings(time.time()),
        samples=core.journal.samples(row.number),
        request=row.request,
        snapshot=row.snapshot if row.state is JobState.DONE else None,
        report=row.report,
    )


def _estimate(core: Core, live: LiveJob) -> JobEstimate | None:
    now = core.clock()
    outlook = core.outlook().get(live.number)
    if outlook is not None:
        if not any(group.is_ready for group in core.prefill):
            return JobEstimate(start_s=None, finish_s=None, reason="no prefill group is ready")
        before = "next" if not outlook.num_before else f"{outlook.num_before} before it"
        return JobEstimate(start_s=outlook.start_s, finish_s=outlook.finish_s, reason=before)
    for step in core.running.values():
        if any(piece.job == live.number for piece in step.slices):
            end_s = max(step.start_s + step.estimate_s - now, 0.0)
            rest_s = core.scheduler.rest_seconds(live.number, max(piece.end for piece in step.slices))
            return JobEstimate(start_s=0.0, finish_s=end_s + rest_s, reason=step.reason)
    return None


def group_view(core: Core, host: Host) -> GroupView:
    state, cluster = host.state, host.settings.cluster
    mesh = f"cp {cluster.cp} x tp {cluster.tp}" if host.role == "prefill" else "cp 1 x tp 1"
    stepping = {
        piece.job
        for step in core.running.values()
        if host.role == "prefill" and step.block.start == host.unit
        for piece in step.slices
    }
    held = [job for job in core.jobs.values() if host in (job.group, job.decode)]
    held.sort(key=lambda job: (job.number not in stepping, job.row.state is not JobState.GENERATING, job.number))
    return GroupView(
        name=host.name,
        role=host.role,
        state=CONTRACT_STATES.get(host.status, host.status),
        reason=host.reason,
        mesh=mesh,
        nodes=() if state is None else state.nodes,
        jobs=tuple(job.row.id for job in held),
        used_tokens=0 if state is None else state.used_tokens,
        max_tokens=cluster.max_tokens if state is None else state.max_tokens,
        rss_bytes=0 if state is None else state.rss_bytes,
        heartbeat_age_s=time.monotonic() - host.heard_at if host.heard_at else 0.0,
        num_restarts=host.num_restarts,
    )


async def cluster_view(core: Core, *, is_draining: bool) -> ClusterView:
    num_queued = core.num_queued()
    return ClusterView(
        epoch=core.epoch,
        started_at=core.started_at,
        is_draining=is_draining,
        model=core.config.model.served_name,
        num_queued=num_queued,
        num_running=len(core.jobs) - num_queued,
        estimate_error=core.scheduler.costs.error,
        groups=tuple(group_view(core, host) for host in core.all_hosts()),
        nodes=await core.directory.nodes(),
    )


def readiness(core: Core, *, is_draining: bool) -> Readiness:
    reasons: list[str] = []
    groups = [group for group in core.prefill if group.is_ready]
    workers = [decode for decode in core.decode if decode.is_ready]
    if not groups:
        reasons.append(_why("no prefill group is ready", core.prefill))
    if core.decode and not workers:
        reasons.append(_why("no decode worker is ready", core.decode))
    if groups and workers and not any(group.can_reach(decode) for group in groups for decode in workers):
        reasons.append("no link between a prefill group and a decode worker works yet")
    if is_draining:
        reasons.append("the service drains")
    return Readiness(is_ready=not reasons, reasons=tuple(reasons))


def _why(what: str, hosts: list[Host]) -> str:
    parts = [f"{host.name} is {host.status}" + (f" ({host.reason})" if host.reason else "") for host in hosts]
    return f"{what}: {', '.join(parts)}"
