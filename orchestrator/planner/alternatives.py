"""What else could be done, by how much it loses, and to what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from longprefill.orchestrator.planner.candidate import Candidate
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.partition.work import Exchange

EQUAL = 0.02
"""Estimates closer than this are equal: the one with fewer devices wins."""
MOST_MESHES, MOST_MISFITS = 7, 3
"""That are shown."""
QUANTIZED = {"latent": "fp8", "index": "mxfp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way, and why it is not the plan."""

    what: str
    estimate: Estimate | None
    """None: it does not fit."""
    reason: str


def changes_of(evaluator: Evaluator, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with one thing changed that the request leaves open."""
    request = evaluator.request
    if candidate.cp > 1:
        if request.exchange is None:
            for exchange in get_args(Exchange):
                if exchange != candidate.exchange:
                    yield replace(candidate, exchange=exchange)
        if request.layout is None:
            other: LayoutKind = "contiguous" if candidate.layout == "zigzag" else "zigzag"
            yield replace(candidate, layout=other)
    if request.step_tokens is None and candidate.jobs_per_step == 1:
        for parts in (2, 4):
            smaller = candidate.step_tokens // parts // PAGE_TOKENS * PAGE_TOKENS
            if smaller >= PAGE_TOKENS:
                yield replace(candidate, step_tokens=smaller)


def fits(estimate: Estimate) -> bool:
    return estimate.memory.total <= estimate.site.memory_bytes


def other_meshes(
    evaluator: Evaluator, best: Estimate, others: Sequence[Estimate], misfits: Sequence[tuple[Candidate, int]]
) -> Iterator[Alternative]:
    """Other meshes, each once, the best first; then those that do not fit."""
    seen = {(best.candidate.cp, best.candidate.tp)}
    different: list[Estimate] = []
    for estimate in sorted(others, key=lambda estimate: estimate.ttft_s):
        mesh = (estimate.candidate.cp, estimate.candidate.tp)
        if mesh not in seen:
            seen.add(mesh)
            different.append(estimate)
    # the fastest, and the widest whatever it takes
    widest = max(different, key=lambda estimate: estimate.candidate.num_devices, default=None)
    for estimate in different[:MOST_MESHES]:
        yield Alternative(what=estimate.candidate.describe(), estimate=estimate, reason=reason_of(estimate, best))
    if widest is not None and widest not in different[:MOST_MESHES]:
        yield Alternative(what=widest.candidate.describe(), estimate=widest, reason=reason_of(widest, best))
    shown = 0
    for candidate, memory_bytes in misfits:
        if (candidate.cp, candidate.tp) not in seen and shown < MOST_MISFITS:
            seen.add((candidate.cp, candidate.tp))
            shown += 1
            needed = evaluator.memory(candidate)
            yield Alternative(
                what=candidate.describe(),
                estimate=None,
                reason=f"needs {gib(needed.total)} a device (weights {gib(needed.weights)}, cache "
                f"{gib(needed.cache)}), {gib(memory_bytes)} are there",
            )


def variants_of(evaluator: Evaluator, best: Estimate) -> Iterator[Alternative]:
    """The plan with one thing changed."""
    candidate = best.candidate
    request = evaluator.request
    changes = list(changes_of(evaluator, candidate))
    if evaluator.has_experts and candidate.num_devices > 1 and request.expert_parallel is None:
        changes.append(replace(candidate, is_expert_parallel=not candidate.is_expert_parallel))
    if candidate.cp > 1 and not candidate.is_cache_sharded:
        changes.append(replace(candidate, is_cache_sharded=True))
    if request.latent_format is None and candidate.latent_format != QUANTIZED["latent"]:
        changes.append(replace(candidate, latent_format=QUANTIZED["latent"], index_format=QUANTIZED["index"]))
    for change in changes:
        estimate = evaluator.estimate(change)
        if estimate is not None:
            is_fitting = fits(estimate)
            reason = reason_of(estimate, best) if is_fitting else f"needs {gib(estimate.memory.total)} a device"
            yield Alternative(
                what=difference(change, candidate), estimate=estimate if is_fitting else None, reason=reason
            )


def difference(change: Candidate, candidate: Candidate) -> str:
    """What the changed candidate has that the other has not."""
    if change.exchange != candidate.exchange:
        return f"exchange {change.exchange}"
    if change.layout != candidate.layout:
        return f"layout {change.layout}"
    if change.step_tokens != candidate.step_tokens:
        return f"steps of {change.step_tokens}"
    if change.is_expert_parallel != candidate.is_expert_parallel:
        return "experts spread" if change.is_expert_parallel else "all experts on every rank"
    if change.is_cache_sharded != candidate.is_cache_sharded:
        return "caches sharded"
    return f"latent {change.latent_format}, index {change.index_format}"


def reason_of(estimate: Estimate, best: Estimate) -> str:
    """Where an alternative loses most, or that it does not lose."""
    slower_s = estimate.ttft_s - best.ttft_s
    if abs(slower_s) <= EQUAL * best.ttft_s:
        more = estimate.candidate.num_devices - best.candidate.num_devices
        if estimate.candidate.is_cache_sharded > best.candidate.is_cache_sharded:
            return "as fast, but a dead rank restarts the job"
        return f"as fast with {more} more devices" if more > 0 else "as fast"
    if slower_s < 0:
        more = estimate.candidate.num_devices - best.candidate.num_devices
        if more > 0:
            return f"{-slower_s:.3g} s faster, with {more} more devices"
        return "faster, but other numbers: switch it on when quality allows (longprefill align)"
    parts = {**estimate.prompt.parts, "hand-off": estimate.handoff_s, "waiting for a group": estimate.queue_s}
    base = {**best.prompt.parts, "hand-off": best.handoff_s, "waiting for a group": best.queue_s}
    losses = {name: seconds - base.get(name, 0.0) for name, seconds in parts.items()}
    worst = max(losses, key=lambda name: losses[name])
    return f"+{slower_s:.3g} s, most of it {worst} (+{losses[worst]:.3g} s)"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
