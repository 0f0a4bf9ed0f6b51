"""What is kept of finished prompts: pages, by block, and boundary states, few and sparse.

To resume, a job needs both: the pages of all its tokens up to a point and the boundary state of exactly that point. A
state is as large as thousands of tokens of pages, so which states to keep decides how much of the pages is of use.

Pages go by least recent use, ends of chains first, so a kept block has all blocks before it. States are made where
they are likely to be wanted again: at the end of a prompt (a conversation goes on there) and where a prompt left what
was cached (others will leave there too). They go by greedy dual ageing: a state's worth is the tokens it saves over the
next kept state before it, times how often it was used, on top of the worth of the last state that had to go.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS


class Match(NamedTuple):
    """What a cache has of a prompt, in tokens. Resuming computes everything after `resume_tokens` again."""

    page_tokens: int
    resume_tokens: int
    unit: int
    """Where the state was made; -1 when there is none."""


@dataclass(slots=True)
class _Block:
    depth: int
    """Blocks of the prefix that ends with it."""
    before: int | None
    unit: int
    """Where its prefix was last used."""


@dataclass(slots=True)
class _State:
    unit: int
    saved: int
    """Blocks that it saves over the state before it, when it was made."""
    num_uses: int
    worth: float


class PrefixCache:
    """One cache of a fleet. `num_blocks` and `num_states` limit it; None: no limit."""

    def __init__(self, *, num_blocks: int | None, num_states: int | None) -> None:
        self._most_blocks = num_blocks
        self._most_states = num_states
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._states: dict[int, _State] = {}
        self._queue: list[tuple[float, int]] = []
        self._floor = 0.0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_states(self) -> int:
        return len(self._states)

    def match(self, blocks: Sequence[int]) -> Match:
        """What is cached of a prompt with these full blocks. Changes nothing."""
        num_pages = 0
        for block in blocks:
            if block not in self._blocks:
                break
            num_pages += 1
        for depth in range(num_pages, 0, -1):
            state = self._states.get(blocks[depth - 1])
            if state is not None:
                return Match(num_pages * BLOCK_TOKENS, depth * BLOCK_TOKENS, state.unit)
        return Match(num_pages * BLOCK_TOKENS, 0, -1)

    def insert(self, blocks: Sequence[int], match: Match, unit: int) -> None:
        """A prompt with these full blocks was computed on `unit`, resumed as `match` says: keeps what is worth it."""
        before: int | None = None
        for depth, block in enumerate(blocks, start=1):
            if block in self._blocks:
                self._blocks[block].unit = unit
            else:
                self._blocks[block] = _Block(depth, before, unit)
            before = block
        for block in reversed(blocks):
            self._blocks.move_to_end(block)
        used = match.resume_tokens // BLOCK_TOKENS
        if used and blocks[used - 1] in self._states:
            self._states[blocks[used - 1]].num_uses += 1
            self._value(blocks[used - 1])
        left = match.page_tokens // BLOCK_TOKENS
        for depth in {min(left, len(blocks)), len(blocks)} - {0}:
            if depth > used:
                self._keep(blocks[depth - 1], unit)
        self._evict()

    def drop_states(self, units: Collection[int]) -> None:
        """The states that were made on lost units are gone; pages have copies elsewhere on their machines."""
        for block in [block for block, state in self._states.items() if state.unit in units]:
            del self._states[block]

    def drop(self, units: Collection[int]) -> None:
        """All that lay on units whose machines are lost: states, and pages with those that continue them."""
        self.drop_states(units)
        lost: set[int] = set()
        for block, kept in sorted(self._blocks.items(), key=lambda item: item[1].depth):
            if kept.unit in units or kept.before in lost:
                lost.add(block)
        for block in lost:
            del self._blocks[block]
            self._states.pop(block, None)

    def _keep(self, block: int, unit: int) -> None:
        if block in self._states:
            self._states[block].unit = unit
        else:
            self._states[block] = _State(unit, self._saved(block), 1, 0.0)
        self._value(block)

    def _saved(self, block: int) -> int:
        depth = self._blocks[block].depth
        before = self._blocks[block].before
        while before is not None and before not in self._states:
            before = self._blocks[before].before
        return depth - (0 if before is None else self._blocks[before].depth)

    def _value(self, block: int) -> None:
        state = self._states[block]
        state.worth = self._floor + state.num_uses * state.saved
        heapq.heappush(self._queue, (state.worth, block))

    def _evict(self) -> None:
        while self._most_blocks is not None and len(self._blocks) > self._most_blocks:
            block, _ = self._blocks.popitem(last=False)
            self._states.pop(block, None)
        while self._most_states is not None and len(self._states) > self._most_states:
            worth, block = heapq.heappop(self._queue)
            state = self._states.get(block)
            if state is not None and state.worth == worth:
                self._floor = worth
                del self._states[block]
        if len(self._queue) > 64 + 4 * len(self._states):
            self._queue = [(state.worth, block) for block, state in self._states.items()]
            heapq.heapify(self._queue)
