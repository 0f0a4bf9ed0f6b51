"""The choice: every mesh roughly, the best ones with every exchange, layout and step size, and what loses by how much.

Nothing here knows scenarios: that short prompts in numbers run one a device and share steps, and that a long one gets
every device, is what the estimates say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longprefill.orchestrator.planner.alternatives import (
    EQUAL,
    QUANTIZED,
    Alternative,
    changes_of,
    fits,
    other_meshes,
    variants_of,
)
from longprefill.orchestrator.planner.candidate import MOST_CP, MOST_TP, Candidate, PlanError, PlanRequest
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator
from longprefill.orchestrator.planner.refusals import no_memory, no_mesh
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.sharding import check_tp

FINALISTS = 3
"""Meshes that are looked at closely."""
MOST_PROMPTS = 64
"""That share a step."""
MOST_TOKENS_PER_RANK = 65_536
"""Of a step: more hides nothing more and delays hand-off, preemption and recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan and what it was chosen over."""

    best: Estimate
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]


def choose(evaluator: Evaluator) -> Choice:
    """The plan of a request.

    Raises:
        PlanError: nothing fits, or nothing meets the deadline, with what would.
    """
    notes: list[str] = []
    found, misfits = _roughly(evaluator)
    if not found and evaluator.unknown:
        raise PlanError(evaluator.unknown[0][1])
    if not found:
        raise PlanError(no_memory(evaluator, misfits))
    if found[0].candidate.latent_format != (evaluator.request.latent_format or evaluator.request.dtype):
        notes.append("caches are quantized because nothing fits otherwise: check quality with longprefill align")
    finalists = _finalists(found, evaluator)
    refined = [_refined(evaluator, estimate) for estimate in finalists]
    best = _preferred(refined)
    deadline = evaluator.request.deadline_s
    if deadline is not None:
        best = _meeting(refined, found, evaluator, deadline)
    alternatives = [*other_meshes(evaluator, best, [*refined, *found], misfits), *variants_of(evaluator, best)]
    alternatives += _unknown(evaluator)
    return Choice(best=best, alternatives=tuple(alternatives), notes=tuple(notes))


def _roughly(evaluator: Evaluator) -> tuple[list[Estimate], list[tuple[Candidate, int]]]:
    """Every mesh's best that fits, by time, and those that do not fit with the memory they have. Formats are quantized
    and caches sharded only where nothing else fits."""
    request = evaluator.request
    formats = [(request.latent_format or request.dtype, request.index_format or request.dtype)]
    if request.latent_format is None and request.index_format is None:
        formats.append((QUANTIZED["latent"], QUANTIZED["index"]))
    misfits: list[tuple[Candidate, int]] = []
    for latent, index in formats:
        for is_sharded in (False, True):
            found: list[Estimate] = []
            for mesh in _meshes_by_size(evaluator):
                fitting = _fitting(evaluator, mesh, latent, index, is_sharded, misfits)
                found += _fastest(evaluator, fitting)
            if found or evaluator.unknown:
                return sorted(found, key=lambda estimate: estimate.ttft_s), misfits
    return [], misfits


def _meshes_by_size(evaluator: Evaluator) -> Iterator[list[tuple[int, int]]]:
    """For every tensor-parallel degree that is allowed, its meshes from the largest to one group.

    Raises:
        PlanError: none is.
    """
    request, machines = evaluator.request, evaluator.machines
    largest = max(machine.num_devices for machine in machines.machines)
    degrees = (
        [request.tp] if request.tp is not None else [1 << power for power in range(min(largest, MOST_TP).bit_length())]
    )
    if request.tp is not None:
        check_tp(evaluator.config, request.tp)
    is_any = False
    for num_tp in degrees:
        slots = machines.num_slots(num_tp)
        if not slots or not _divides(evaluator, num_tp):
            continue
        most = min(slots, MOST_CP)
        sizes = sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True)
        if request.cp is not None:
            sizes = [request.cp] if request.cp <= slots else []
        if sizes:
            is_any = True
            yield [(num_cp, num_tp) for num_cp in sizes]
    if not is_any:
        raise PlanError(no_mesh(evaluator))


def _divides(evaluator: Evaluator, num_tp: int) -> bool:
    try:
        check_tp(evaluator.config, num_tp)
    except UserError:
        return False
    return True


def _fitting(
    evaluator: Evaluator,
    meshes: Sequence[tuple[int, int]],
    latent: str,
    index: str,
    is_sharded: bool,
    misfits: list[tuple[Candidate, int]],
) -> Iterator[Candidate]:
    """The meshes that fit, each with its longest step, experts whole where they fit."""
    request = evaluator.request
    for num_cp, num_tp in meshes:
        if is_sharded and num_cp == 1:
            continue
        site = evaluator.machines.site(num_cp, num_tp)
        if site is None:
            continue
        spread = [False, True] if request.expert_parallel is None else [request.expert_parallel]
        if not evaluator.has_experts or num_cp * num_tp == 1:
            spread = [False]
        for is_expert_parallel in spread:
            candidate = Candidate(
                cp=num_cp,
                tp=num_tp,
                step_tokens=request.step_tokens or PAGE_TOKENS,
                latent_format=latent,
                index_format=index,
                layout=request.layout or "zigzag",
                exchange=request.exchange or ("all_gather" if num_cp <= 4 else "head_transposed"),
                is_expert_parallel=is_expert_parallel,
                is_cache_sharded=is_sharded,
            )
            room = evaluator.largest_step(candidate, site.memory_bytes)
            if room < candidate.step_tokens:
                misfits.append((candidate, site.memory_bytes))
                continue
            yield _sized(candidate, request, room)
            break


def _sized(candidate: Candidate, request: PlanRequest, room: int) -> Candidate:
    """The candidate with its longest useful step: the fewest steps that fit, of about one length."""
    if request.step_tokens is not None:
        return candidate
    rest = request.tokens - request.cached
    most = min(room, MOST_TOKENS_PER_RANK * candidate.cp)
    unit = 2 * candidate.cp * PAGE_TOKENS
    unit = unit if most >= unit and rest > unit else PAGE_TOKENS
    num_steps = -(-rest // (most // unit * unit))
    each = -(-rest // num_steps)
    return replace(candidate, step_tokens=-(-each // unit) * unit)


def _fastest(evaluator: Evaluator, candidates: Iterator[Candidate]) -> list[Estimate]:
    """Rough estimates from the largest mesh down, until they have got worse three times for one prompt."""
    found: list[Estimate] = []
    num_worse = 0
    for candidate in candidates:
        estimate = evaluator.rough(_packed(evaluator, candidate))
        if estimate is None:
            continue
        is_worse = bool(found) and estimate.ttft_s > 1.05 * min(other.ttft_s for other in found)
        num_worse = num_worse + 1 if is_worse else 0
        found.append(estimate)
        if num_worse == 3 and evaluator.request.concurrent == 1 and evaluator.request.deadline_s is None:
            break
    return found


def _packed(evaluator: Evaluator, candidate: Candidate) -> Candidate:
    """With more prompts than groups: as many to a step as fit in it, when that is faster than one after another."""
    request = evaluator.request
    num_groups = max(evaluator.machines.num_slots(candidate.tp) // candidate.cp, 1)
    waiting = -(-request.concurrent // num_groups)
    site = evaluator.machines.site(candidate.cp, candidate.tp)
    if waiting <= 1 or site is None or request.cached:
        return candidate
    pages = -(-request.tokens // PAGE_TOKENS) * PAGE_TOKENS
    number = min(waiting, MOST_TOKENS_PER_RANK * candidate.cp // pages, MOST_PROMPTS)
    while number > 1:
        packed = replace(candidate, jobs_per_step=number, step_tokens=number * pages)
        if evaluator.memory(packed).total <= site.memory_bytes and request.step_tokens is None:
            alone, together = evaluator.rough(candidate), evaluator.rough(packed)
            is_faster = alone is not None and together is not None and together.ttft_s < alone.ttft_s
            return packed if is_faster else candidate
        number //= 2
    return candidate


def _finalists(found: Sequence[Estimate], evaluator: Evaluator) -> list[Estimate]:
    """The best meshes; with a deadline also the smaller ones that may meet it."""
    deadline = evaluator.request.deadline_s
    finalists = list(found[:FINALISTS])
    if deadline is not None:
        meeting = [estimate for estimate in found if estimate.ttft_s <= 1.1 * deadline]
        finalists += sorted(meeting, key=lambda estimate: estimate.candidate.num_devices)[:FINALISTS]
    return list({estimate.candidate: estimate for estimate in finalists}.values())


def _refined(evaluator: Evaluator, rough: Estimate) -> Estimate:
    """The mesh with its best exchange, layout and step, one after another."""
    best = rough
    for change in changes_of(evaluator, rough.candidate):
        estimate = evaluator.rough(change)
        if estimate is not None and estimate.ttft_s < best.ttft_s and fits(estimate):
            best = estimate
    return evaluator.estimate(best.candidate) or best


def _unknown(evaluator: Evaluator) -> list[Alternative]:
    """One line for each kind of mesh that could not be estimated."""
    first = {candidate.describe(): reason for candidate, reason in reversed(evaluator.unknown)}
    return [Alternative(what=what, estimate=None, reason=reason) for what, reason in list(first.items())[-3:]]


def _preferred(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest; of those about as fast the one with fewest devices."""
    fastest = min(estimate.ttft_s for estimate in estimates)
    equal = [estimate for estimate in estimates if estimate.ttft_s <= (1 + EQUAL) * fastest]
    return min(equal, key=lambda estimate: (estimate.candidate.num_devices, estimate.ttft_s))


def _meeting(
    refined: Sequence[Estimate], found: Sequence[Estimate], evaluator: Evaluator, deadline_s: float
) -> Estimate:
    """The smallest mesh that meets the deadline.

    Raises:
        PlanError: none does, with the fastest.
    """
    meeting = [estimate for estimate in refined if estimate.ttft_s <= deadline_s]
    if meeting:
        return min(meeting, key=lambda estimate: (estimate.candidate.num_devices, estimate.ttft_s))
    fastest = min((*refined, *found), key=lambda estimate: estimate.ttft_s)
    raise PlanError(
        f"--deadline-s {deadline_s:g}: the fastest plan ({fastest.candidate.describe()} on "
        f"{fastest.candidate.num_devices} of {evaluator.machines.num_devices} devices) needs {fastest.ttft_s:.3g} s: "
        "allow more time, a shorter prompt, or more devices"
    )
