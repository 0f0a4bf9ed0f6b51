"""Where the choice would be another: by length, by cached length, by bandwidth. Time alone; memory is not looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import Link, ProfileError, scaled_link
from longprefill.orchestrator.planner.candidate import MOST_CP, Candidate
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator
from longprefill.orchestrator.planner.machines import Site
from longprefill.partition.layout import PAGE_TOKENS, Slice

LONGEST = 1 << 24
CACHED_STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
AS_FAST = 1.05
"""A contiguous step within this of the zigzag one is as fast: half its summaries are saved elsewhere."""
FACTORS = (2.0**-14, 2.0**18)
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
    """A step of the plan's size that starts here or later takes at most 5 % longer contiguous than in zigzag."""
    contiguous_looked_at_tokens: int | None
    """Up to where that was looked for; None: there is no cut to compare."""
    break_even_gb_per_s: float | None
    """Received by a device over `link`: from here on the wide mesh is faster than the narrow one."""
    link: str | None
    """node or network."""
    narrow_cp: int | None
    wide_cp: int | None
    """Context-parallel ranks of the mesh that does without the link, and of the one that needs it."""


def crossovers(evaluator: Evaluator, best: Estimate) -> Crossovers:
    """The plan's borders; None also where a rate that the comparison needs is not known."""
    candidate = best.candidate
    slots = evaluator.machines.num_slots(candidate.tp)
    wide = candidate if candidate.cp > 1 else replace(candidate, cp=2, exchange="all_gather", jobs_per_step=1)
    pays = efficient = contiguous = looked_at = even = None
    with suppress(ProfileError):
        if slots >= wide.cp:
            speed_up = cache(lambda tokens: _speed_up(evaluator, wide, tokens))
            pays = _first_length(lambda tokens: speed_up(tokens) > 1.0)
            efficient = _first_length(lambda tokens: speed_up(tokens) >= wide.cp / 2)
    with suppress(ProfileError):
        if candidate.cp > 1 and candidate.step_tokens >= 2 * candidate.cp * PAGE_TOKENS:
            contiguous, looked_at = _contiguous_from(evaluator, candidate)
    with suppress(ProfileError):
        even = _break_even(evaluator, best)
    return Crossovers(
        cp=wide.cp,
        cp_pays_from_tokens=pays,
        cp_efficient_from_tokens=efficient,
        contiguous_from_cached_tokens=contiguous,
        contiguous_looked_at_tokens=looked_at,
        break_even_gb_per_s=None if even is None else even.gb_per_s,
        link=None if even is None else even.link,
        narrow_cp=None if even is None else even.narrow_cp,
        wide_cp=None if even is None else even.wide_cp,
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
        if estimate is None:
            raise ProfileError(other.unknown[-1][1])
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


def _contiguous_from(evaluator: Evaluator, candidate: Candidate) -> tuple[int | None, int]:
    """The first cached length looked at from which on contiguous steps are within 5 %, and the last one looked at."""
    last = 0
    for number in CACHED_STEPS:
        start = number * candidate.step_tokens
        if start + candidate.step_tokens > evaluator.config.max_tokens:
            break
        zigzag, contiguous = (evaluator.step(candidate, kind, start).seconds for kind in ("zigzag", "contiguous"))
        last = start
        if contiguous <= AS_FAST * zigzag:
            return start, last
    return None, last


class _Even(NamedTuple):
    gb_per_s: float
    link: str
    narrow_cp: int
    wide_cp: int


def _break_even(evaluator: Evaluator, best: Estimate) -> _Even | None:
    """The bandwidth at which a mesh that needs a link is as fast as the largest one that does not: between machines
    where there are several, else between devices. None: nothing to compare, or no such bandwidth in FACTORS."""
    candidate, machines = best.candidate, evaluator.machines
    scope = "network" if len(machines.machines) > 1 else "node"
    slots = machines.num_slots(candidate.tp)
    if best.site.num_machines > 1:
        narrow, wide = replace(candidate, cp=best.site.placement.cp_per_node), candidate
    elif scope == "network":
        narrow, wide = candidate, replace(candidate, cp=min(slots, MOST_CP), exchange="head_transposed")
    else:
        narrow, wide = replace(candidate, cp=1), candidate
    narrow, narrow_site = _with_room(evaluator, narrow)
    wide, wide_site = _with_room(evaluator, wide)
    if narrow.cp >= wide.cp or narrow_site is None or wide_site is None:
        return None
    placement = wide_site.placement
    bandwidth = _bandwidth(placement.links, scope)
    if bandwidth is None:
        return None
    request = evaluator.request
    start = request.cached + (request.tokens - request.cached) // 2 // PAGE_TOKENS * PAGE_TOKENS
    piece = Slice(job=0, start=start, end=min(start + candidate.step_tokens, request.tokens))
    narrow_s = evaluator.costs(narrow, narrow_site).step([piece], narrow.layout).seconds
    costs = evaluator.costs(wide, wide_site)

    def is_slower(factor: float) -> bool:
        return costs.on(_scaled(placement, scope, factor)).step([piece], wide.layout).seconds > narrow_s

    low, high = FACTORS
    if is_slower(high) or not is_slower(low):
        return None
    for _ in range(8):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_slower(middle) else (low, middle)
    return _Even(bandwidth * high / 1e9, scope, narrow.cp, wide.cp)


def _with_room(evaluator: Evaluator, candidate: Candidate) -> tuple[Candidate, Site | None]:
    """The candidate, with its experts spread where it does not fit otherwise, and its site; None: it does not fit."""
    site = evaluator.machines.site(candidate.cp, candidate.tp)
    if site is None or evaluator.largest_step(candidate, site.memory_bytes):
        return candidate, site
    spread = replace(candidate, is_expert_parallel=evaluator.has_experts and candidate.num_devices > 1)
    return spread, site if evaluator.largest_step(spread, site.memory_bytes) else None


def _bandwidth(links: Sequence[Link], scope: str) -> float | None:
    """Of the first link of a scope: as given, or of its largest message."""
    for link in links:
        if link.scope == scope:
            return link.bytes_per_s or link.points[-1][0] / link.points[-1][1]
    return None


def _scaled(placement: Placement, scope: str, factor: float) -> Placement:
    """The placement with the links of one scope so many times as fast."""

    def faster(links: tuple[Link, ...]) -> tuple[Link, ...]:
        return tuple(scaled_link(link, bandwidth=factor) if link.scope == scope else link for link in links)

    profiles = tuple(replace(profile, links=faster(profile.links)) for profile in placement.profiles)
    return replace(placement, profiles=profiles, network=faster(placement.network))
