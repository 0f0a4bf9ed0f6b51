"""How much of the cached pages states make usable: online, against the best fixed set that hindsight can choose.

Pages are kept without limit; states get a share of all bytes, so a share x allows x / (1 - x) of the pages' bytes. Hits
are in tokens over the hits of pages alone, which a model without recurrence would have.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from longprefill.orchestrator.simulator.prefix_cache import PrefixCache
from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Bytes of a model's caches on one rank that holds all of it."""

    name: str
    token_bytes: int
    state_bytes: int

    @property
    def state_tokens(self) -> float:
        """Tokens whose pages are as large as a state."""
        return self.state_bytes / self.token_bytes


def hybrid_cache(
    name: str, *, kda_layers: int, heads: int, key: int, value: int, conv_width: int, latent_layers: int, row_bytes: int
) -> CacheShape:
    """fp32 states of [heads, key, value] and bf16 conv tails a KDA layer; `row_bytes` a token and latent layer."""
    state = 4 * heads * key * value + 2 * (conv_width - 1) * heads * (2 * key + value)
    return CacheShape(name=name, token_bytes=latent_layers * row_bytes, state_bytes=kda_layers * state)


KIMI_LINEAR = hybrid_cache(
    "Kimi-Linear", kda_layers=20, heads=32, key=128, value=128, conv_width=4, latent_layers=7, row_bytes=1152
)
GLM_FLASH = hybrid_cache(
    "GLM-5.3-Flash", kda_layers=34, heads=64, key=128, value=128, conv_width=4, latent_layers=11, row_bytes=1408
)
"""bf16: a latent row of 1152 bytes and an index key of 256 that is kept before pooling."""
GLM_FLASH_QUANTIZED = replace(GLM_FLASH, name="GLM-5.3-Flash, quantized", token_bytes=11 * 788)
"""656 + 132 bytes a row."""
STUDIED = (KIMI_LINEAR, GLM_FLASH, GLM_FLASH_QUANTIZED)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One share of one model."""

    model: str
    state_share: float
    num_states: int
    online: float
    """Hit tokens over those of pages alone."""
    hindsight: float

    @property
    def ratio(self) -> float:
        return self.online / self.hindsight if self.hindsight else 1.0


def study(
    requests: Sequence[Request], shapes: Sequence[CacheShape] = STUDIED, shares: Sequence[float] = SHARES
) -> list[StudyRow]:
    """Online and hindsight hits at each state share of the bytes."""
    num_blocks = len({block for request in requests for block in request.full_blocks})
    ideal = max(page_hits(requests), 1)
    gains = hindsight_gains(requests)
    rows: list[StudyRow] = []
    for shape in shapes:
        for share in shares:
            num_bytes = share / (1 - share) * num_blocks * BLOCK_TOKENS * shape.token_bytes
            num_states = int(num_bytes / shape.state_bytes)
            rows.append(
                StudyRow(
                    model=shape.name,
                    state_share=share,
                    num_states=num_states,
                    online=online_hits(requests, num_states) / ideal,
                    hindsight=sum(gains[:num_states]) / ideal,
                )
            )
    return rows


def page_hits(requests: Sequence[Request]) -> int:
    """Tokens of full blocks that an earlier request had."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        for block in request.full_blocks:
            if block not in seen:
                break
            hits += BLOCK_TOKENS
        seen.update(request.full_blocks)
    return hits


def online_hits(requests: Sequence[Request], num_states: int) -> int:
    """Tokens resumed from states of a cache with unlimited pages that sees one request after another."""
    cache = PrefixCache(num_blocks=None, num_states=num_states)
    hits = 0
    for request in requests:
        match = cache.match(request.full_blocks)
        hits += match.resume_tokens
        cache.insert(request.full_blocks, match, 0)
    return hits


def hindsight_gains(requests: Sequence[Request]) -> list[int]:
    """Hit tokens that each further state adds when the best is added next, knowing all requests.

    A state exists from the first request with its block on and is kept for ever. Saved tokens are submodular in the
    set, so the greedy choice is within 1 - 1/e of the best set, and near it here: prefixes are chains.
    """
    users: dict[int, list[int]] = {}
    depths: dict[int, int] = {}
    for number, request in enumerate(requests):
        for depth, block in enumerate(request.full_blocks, start=1):
            users.setdefault(block, []).append(number)
            depths[block] = depth * BLOCK_TOKENS
    saved = [0] * len(requests)

    def gain(block: int) -> int:
        depth = depths[block]
        return sum(max(depth - saved[number], 0) for number in users[block][1:])

    heap = [(-gain(block), block) for block, numbers in users.items() if len(numbers) > 1]
    heapq.heapify(heap)
    gains: list[int] = []
    while heap:
        _, block = heapq.heappop(heap)
        now = gain(block)
        if heap and now < -heap[0][0]:
            # gains only shrink: this one is looked at again when its turn comes
            if now > 0:
                heapq.heappush(heap, (-now, block))
            continue
        if now <= 0:
            break
        gains.append(now)
        for number in users[block][1:]:
            saved[number] = max(saved[number], depths[block])
    return gains
