"""Prefix caches against a slow oracle, and the hindsight yardstick against all choices."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.simulator.prefix_cache import PrefixCache
from longprefill.orchestrator.simulator.prefix_study import (
    GLM_FLASH,
    GLM_FLASH_QUANTIZED,
    KIMI_LINEAR,
    hindsight_gains,
    online_hits,
    page_hits,
    study,
)
from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS, Request


@st.composite
def prompts(draw: st.DrawFn) -> list[Request]:
    """Prompts out of a small tree: a block's id says its whole path."""
    requests = []
    for number in range(draw(st.integers(1, 14))):
        path, blocks = 1, []
        for branch in draw(st.lists(st.integers(0, 1), min_size=0, max_size=5)):
            path = 2 * path + branch
            blocks.append(path)
        requests.append(Request(float(number), len(blocks) * BLOCK_TOKENS + 1, 1, (*blocks, -number - 1)))
    return requests


@given(requests=prompts())
def test_without_limits_states_are_what_ends_and_branches_made(requests: list[Request]) -> None:
    cache = PrefixCache(num_blocks=None, num_states=None)
    pages: set[int] = set()
    states: set[int] = set()
    for request in requests:
        blocks = request.full_blocks
        match = cache.match(blocks)
        num_pages = next((depth for depth, block in enumerate(blocks) if block not in pages), len(blocks))
        depths = [depth for depth in range(1, num_pages + 1) if blocks[depth - 1] in states]
        assert match.page_tokens == num_pages * BLOCK_TOKENS
        assert match.resume_tokens == max(depths, default=0) * BLOCK_TOKENS
        cache.insert(blocks, match, 0)
        pages.update(blocks)
        states.update({blocks[-1]} if blocks else set())
        states.update({blocks[num_pages - 1]} if num_pages else set())
    assert (cache.num_blocks, cache.num_states) == (len(pages), len(states))


@given(requests=prompts(), num_blocks=st.integers(0, 8), num_states=st.integers(0, 4))
def test_limits_hold_and_a_state_has_all_its_pages(requests: list[Request], num_blocks: int, num_states: int) -> None:
    cache = PrefixCache(num_blocks=num_blocks, num_states=num_states)
    for request in requests:
        cache.insert(request.full_blocks, cache.match(request.full_blocks), 0)
        assert cache.num_blocks <= num_blocks
        assert cache.num_states <= num_states
    for request in requests:
        match = cache.match(request.full_blocks)
        assert match.resume_tokens <= match.page_tokens


@settings(max_examples=30)
@given(requests=prompts())
def test_hindsight_is_near_the_best_set(requests: list[Request]) -> None:
    """Each of all sets of one or two states, counted request by request."""
    gains = hindsight_gains(requests)
    assert all(first >= second for first, second in pairwise(gains))
    assert sum(gains) == page_hits(requests)  # with every state that helps, pages alone limit
    candidates = sorted({block for request in requests for block in request.full_blocks})
    for size in (1, 2):
        best = max((hits_of_set(requests, set(chosen)) for chosen in combinations(candidates, size)), default=0)
        assert sum(gains[:size]) >= (1 - 1 / 2.718281828) * best
        assert size > 1 or sum(gains[:1]) == best


def hits_of_set(requests: list[Request], states: set[int]) -> int:
    seen: set[int] = set()
    hits = 0
    for request in requests:
        depths = [depth for depth, block in enumerate(request.full_blocks, 1) if block in states and block in seen]
        hits += max(depths, default=0) * BLOCK_TOKENS
        seen.update(request.full_blocks)
    return hits


@given(requests=prompts(), num_states=st.integers(0, 30))
def test_states_never_beat_pages(requests: list[Request], num_states: int) -> None:
    assert online_hits(requests, num_states) <= page_hits(requests)
    assert online_hits(requests, 0) == 0


def test_a_useful_state_outlives_a_stream_of_useless_ones() -> None:
    """Least recent use would drop the shared start after two prompts that nobody asks about again."""
    shared = tuple(range(20))
    requests = [Request(0.0, 20 * BLOCK_TOKENS + 1, 1, (*shared, 999))]
    for number in range(30):
        requests.append(Request(1.0 + number, BLOCK_TOKENS + 1, 1, (1000 + number, -1)))
        if number % 10 == 9:
            requests.append(Request(1.5 + number, 20 * BLOCK_TOKENS + 1, 1, (*shared, 2000 + number)))
    assert online_hits(requests, 2) == 3 * 20 * BLOCK_TOKENS


def test_a_lost_unit_takes_its_states() -> None:
    cache = PrefixCache(num_blocks=None, num_states=None)
    cache.insert((1, 2), cache.match((1, 2)), 3)
    cache.drop_states({2})
    assert cache.match((1, 2)).resume_tokens == 2 * BLOCK_TOKENS
    cache.drop_states({3})
    assert cache.match((1, 2)) == (2 * BLOCK_TOKENS, 0, -1)


def test_a_lost_machine_takes_pages_and_what_continues_them() -> None:
    cache = PrefixCache(num_blocks=None, num_states=None)
    cache.insert((1, 2, 3), cache.match((1, 2, 3)), 0)
    cache.insert((1, 4), cache.match((1, 4)), 1)
    cache.insert((5,), cache.match((5,)), 2)
    cache.drop({1})  # block 1 was last used there, and nothing behind it is of use without it
    assert cache.match((1, 2, 3)) == cache.match((1, 4)) == (0, 0, -1)
    assert cache.match((5,)) == (BLOCK_TOKENS, BLOCK_TOKENS, 2)
    assert (cache.num_blocks, cache.num_states) == (1, 1)


@pytest.mark.parametrize(("shape", "tokens"), [(KIMI_LINEAR, 5384), (GLM_FLASH, 9530), (GLM_FLASH_QUANTIZED, 17_028)])
def test_a_state_costs_thousands_of_tokens(shape, tokens: int) -> None:
    assert shape.state_tokens == pytest.approx(tokens, rel=1e-3)


def test_study_gives_a_row_a_model_and_share() -> None:
    blocks = tuple(range(40))
    requests = [Request(float(number), 40 * BLOCK_TOKENS, 1, blocks) for number in range(3)]
    rows = study(requests, (KIMI_LINEAR,), (0.1, 0.5))
    assert [row.state_share for row in rows] == [0.1, 0.5]
    assert [row.num_states for row in rows] == [0, 3]
    assert (rows[0].online, rows[0].ratio) == (0.0, 1.0)
    assert (rows[1].online, rows[1].hindsight) == (1.0, 1.0)
