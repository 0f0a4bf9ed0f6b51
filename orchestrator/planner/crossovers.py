"""Where the choice would be another: by length, by cached length, by bandwidth. Time alone; memory is not looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import Link
from longprefill.orchestrator.planner.candidate import Candidate
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator
from longprefill.partition.layout import PAGE_TOKENS, Slice

LONGEST = 1 << 24
CACHED_STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
FACTORS = (2.0**-14, 2.0**6)
"""Of the bandwidth: what is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossovers:
    """None: not within what was looked at, or there is nothing to compare."""

    cp: int
    """Context-parallel ranks that the length is for."""
    cp_pays_from_tokens: int | None
    """A prompt from this length on is faster on `cp` ranks than on one."""
    cp_efficient_from_tokens: int | None
    """And uses them to a half at least."""
    contiguous_from_cached_tokens: int | None
    """A step of the plan's size that starts here or later is as fast in a contiguous cut as in zigzag."""
    break_even_gb_per_s: float | None
    """Received by a device: below this the plan loses to the largest mesh without that link."""
    link: str | None
    """node or network: which link that is."""


def crossovers(evaluator: Evaluator, best: Estimate) -> Crossovers:
    """The plan's borders."""
    candidate = best.candidate
    slots = evaluator.machines.num_slots(candidate.tp)
    wide = candidate if candidate.cp > 1 else replace(candidate, cp=2, exchange="all_gather", jobs_per_step=1)
    pays = efficient = None
    if slots >= wide.cp:
        pays = _first_length(lambda tokens: _speed_up(evaluator, wide, tokens) > 1.0)
        efficient = _first_length(lambda tokens: _speed_up(evaluator, wide, tokens) >= wide.cp / 2)
    is_cut = candidate.step_tokens >= 2 * candidate.cp * PAGE_TOKENS
    contiguous = _contiguous_from(evaluator, candidate) if candidate.cp > 1 and is_cut else None
    gb_per_s, link = _break_even(evaluator, best)
    return Crossovers(
        cp=wide.cp,
        cp_pays_from_tokens=pays,
        cp_efficient_from_tokens=efficient,
        contiguous_from_cached_tokens=contiguous,
        break_even_gb_per_s=gb_per_s,
        link=link,
    )


def _speed_up(evaluator: Evaluator, wide: Candidate, num_tokens: int) -> float:
    """One group's time over that of the mesh, for a prompt in steps of at most the plan's share of a rank."""
    other = evaluator.with_tokens(num_tokens)
    share = max(wide.step_tokens // wide.cp, PAGE_TOKENS)
    times: list[float] = []
    for num_cp in (1, wide.cp):
        step = min(share * num_cp, -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS)
        step = max(step // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS)
        changed = replace(wide, cp=num_cp, step_tokens=step, jobs_per_step=1, layout="zigzag")
        estimate = other.rough(changed)
        assert estimate is not None
        times.append(estimate.prompt.seconds)
    return times[0] / times[1]


def _first_length(is_so: Callable[[int], bool]) -> int | None:
    """The smallest length, to an eighth, from which on it is so; it is taken to change once."""
    low, high = 0, LONGEST.bit_length() - 1
    if not is_so(1 << high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(1 << middle) else (middle + 1, high)
    above = 1 << low
    below = above // 2
    while above - below > max(above // 8, 1):
        middle = (above + below) // 2
        below, above = (below, middle) if is_so(middle) else (middle, above)
    return above


def _contiguous_from(evaluator: Evaluator, candidate: Candidate) -> int | None:
    for number in CACHED_STEPS:
        start = number * candidate.step_tokens
        zigzag, contiguous = (evaluator.step(candidate, kind, start).seconds for kind in ("zigzag", "contiguous"))
        if contiguous <= zigzag:
            return start
    return None


def _break_even(evaluator: Evaluator, best: Estimate) -> tuple[float | None, str | None]:
    """The bandwidth at which the plan is as fast as the largest mesh that needs no such link."""
    candidate, placement = best.candidate, best.site.placement
    if candidate.cp == 1:
        return None, None
    is_network = best.site.num_machines > 1
    scope = "network" if is_network else "node"
    inside = placement.cp_per_node if is_network else 1
    alone = replace(candidate, cp=inside, exchange="head_transposed" if inside > 4 else "all_gather")
    site = evaluator.machines.site(inside, candidate.tp)
    links = (*placement.network, *placement.profiles[0].links)
    link = next((link for link in links if link.scope == scope), None)
    if (
        site is None
        or link is None
        or link.bytes_per_s is None
        or evaluator.largest_step(alone, site.memory_bytes) == 0
    ):
        return None, None
    request = evaluator.request
    start = request.cached + (request.tokens - request.cached) // 2 // PAGE_TOKENS * PAGE_TOKENS
    length = min(candidate.step_tokens, request.tokens - start)
    piece = Slice(job=0, start=start, end=start + max(length, 1))
    alone_s = evaluator.costs(alone, site).step([piece], alone.layout).seconds

    costs = evaluator.costs(candidate, best.site)

    def is_slower(factor: float) -> bool:
        return costs.on(_scaled(placement, scope, factor)).step([piece], candidate.layout).seconds > alone_s

    low, high = FACTORS
    if is_slower(high) or not is_slower(low):
        return None, scope
    for _ in range(8):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_slower(middle) else (low, middle)
    return link.bytes_per_s * high / 1e9, scope


def _scaled(placement: Placement, scope: str, factor: float) -> Placement:
    """The placement with the links of one scope so many times as fast."""

    def faster(links: tuple[Link, ...]) -> tuple[Link, ...]:
        return tuple(
            replace(link, bytes_per_s=link.bytes_per_s * factor)
            if link.scope == scope and link.bytes_per_s is not None
            else link
            for link in links
        )

    profiles = tuple(replace(profile, links=faster(profile.links)) for profile in placement.profiles)
    return replace(placement, profiles=profiles, network=faster(placement.network))
