"""Lightning indexer, top-k included: the last queries of a prompt over all of its keys, the same over pooled keys, and
decode.

Legend: T queries, L keys, X index dim, U tokens a pooled key. 2 HEADS X flops a query and visible key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from longprefill.kernels.dsa import cpu, plain, reference
from longprefill.kernels.paged import PagedRows, RowFormat
from longprefill.kernels.quant.formats import Bf16Rows, Mxfp8Rows

from .measure import Case
from .pages import scattered

T, L, HEADS, X, TOPK = 1024, 65536, 32, 128, 2048
POOL = 4
"""U of GLM-5.3-Flash. L pooled keys are of U L tokens."""
DECODE_LAYERS = 8
"""Caches that decode goes through: 128 MiB of keys, as it meets them (not in cache)."""
PEER_QUERIES = 64
"""Torch would take half a minute for all of them."""
PEER_SHARE = (PEER_QUERIES * L - PEER_QUERIES * (PEER_QUERIES - 1) // 2) / (T * L - T * (T - 1) // 2)
"""Of the visible pairs; what does not grow with queries (decoding the keys) is a hundredth of the peers' time."""


def bf16_keys(seed: int) -> Iterator[Case]:
    """bf16 queries and keys. The peers are torch compositions over the last PEER_QUERIES queries, their seconds scaled
    to all: `plain`, in blocks with running lists, and the formula as it stands."""
    q, w, keys = _inputs(seed, Bf16Rows(X))
    last, start = slice(T - PEER_QUERIES, T), L - PEER_QUERIES
    k = keys.read(0, L, torch.float32)
    peers = {
        _scaled("torch"): lambda: plain.select(q[last], w[last], keys, start=start, topk=TOPK),
        _scaled("torch by the formula"): lambda: _by_the_formula(q[last], w[last], k, start),
    }
    yield _case(q, w, keys, peers, dict.fromkeys(peers, PEER_SHARE))


def mxfp8_keys(seed: int) -> Iterator[Case]:
    """MXFP8 keys. The peer `bf16 keys` is our own kernel over bf16 keys, in the same turns."""
    q, w, keys = _inputs(seed, Mxfp8Rows(X))
    *_, wide = _inputs(seed, Bf16Rows(X))
    yield _case(q, w, keys, {"bf16 keys": lambda: cpu.select(q, w, wide, start=L - T, topk=TOPK)}, {})


def pooled_keys(seed: int) -> Iterator[Case]:
    """k-pool: L pooled keys of U tokens each compete for topk / U places, and the incomplete pool joins them. The peer
    `torch` is `plain` over the last PEER_QUERIES queries, scaled to all."""
    q, w, keys = _inputs(seed, Bf16Rows(X))
    start = POOL * L - T

    def check() -> None:
        few, first = _first_keys(keys, 4096), 4 * 4096 - 3
        found = cpu.select_pooled(q[:3], w[:3], few, start=first, topk=TOPK, pool=POOL)
        expected = reference.select_pooled(q[:3].double(), w[:3].double(), few, start=first, topk=TOPK, pool=POOL)
        _assert_same_positions(found, expected, allowed=2 * POOL)

    visible = _visible_pools(start, T)
    last = slice(T - PEER_QUERIES, T)
    peer_start = POOL * L - PEER_QUERIES
    peer = _scaled("torch")
    yield Case(
        shape=f"T={T} L={POOL * L} U={POOL} I={HEADS} X={X} topk={TOPK}",
        dtype="bf16, bf16 keys",
        run=lambda: cpu.select_pooled(q, w, keys, start=start, topk=TOPK, pool=POOL),
        check=check,
        flops=2 * visible * HEADS * X,
        bytes=L * keys.format.row_bytes + T * (2 * HEADS * X + 4 * HEADS + 4 * (TOPK + POOL - 1)),
        bound="bf16",
        peers={
            peer: lambda: plain.select_pooled(q[last], w[last], keys, start=peer_start, topk=TOPK, pool=POOL),
        },
        peer_shares={peer: _visible_pools(peer_start, PEER_QUERIES) / visible},
        measures_memory=True,
    )


def decode(seed: int) -> Iterator[Case]:
    """One query over L keys, in DECODE_LAYERS caches one after the other: bf16 keys with `plain` as the peer `torch`,
    then MXFP8 keys with our own kernel over bf16 keys."""
    q, w, _ = _inputs(seed, Bf16Rows(X), num_keys=0)
    wide = [_inputs(seed + layer, Bf16Rows(X))[2] for layer in range(DECODE_LAYERS)]
    narrow = [_inputs(seed + layer, Mxfp8Rows(X))[2] for layer in range(DECODE_LAYERS)]

    def run(backend: Any, layers: list[PagedRows]) -> None:
        for keys in layers:
            backend.select(q[:1], w[:1], keys, start=L - 1, topk=TOPK)

    for layers, peers in ((wide, {"torch": lambda: run(plain, wide)}), (narrow, {"bf16 keys": lambda: run(cpu, wide)})):
        yield _decode_case(q, w, layers, lambda layers=layers: run(cpu, layers), peers)


def _decode_case(
    q: torch.Tensor,
    w: torch.Tensor,
    layers: list[PagedRows],
    run: Callable[[], Any],
    peers: Mapping[str, Callable[[], Any]],
) -> Case:
    row_format = layers[0].format

    def check() -> None:
        few = _first_keys(layers[0], 4096)
        found = cpu.select(q[:1], w[:1], few, start=4095, topk=TOPK)
        expected = reference.select(q[:1].double(), w[:1].double(), few, start=4095, topk=TOPK)
        _assert_same_positions(found, expected, allowed=2)

    return Case(
        shape=f"layers={DECODE_LAYERS} T=1 L={L} I={HEADS} X={X} topk={TOPK}",
        dtype=f"bf16, {row_format.name} keys",
        run=run,
        check=check,
        flops=2 * DECODE_LAYERS * L * HEADS * X,
        bytes=DECODE_LAYERS * (L * row_format.row_bytes + 2 * HEADS * X + 4 * HEADS + 4 * TOPK),
        bound="memory",
        peers=peers,
    )


def _by_the_formula(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor, start: int) -> torch.Tensor:
    """All scores of eight queries at a time, then top-k (whose ties are not the contract's)."""
    columns, chosen = torch.arange(len(k)), []
    for first in range(0, len(q), 8):
        rows = slice(first, first + 8)
        products = torch.einsum("tix,lx->til", q[rows].float(), k).relu_()
        scores = torch.einsum("til,ti->tl", products, w[rows])
        scores.masked_fill_(columns > start + torch.arange(len(q))[rows, None], -torch.inf)
        chosen.append(scores.topk(TOPK, dim=1).indices)
    return torch.cat(chosen)


def _case(
    q: torch.Tensor, w: torch.Tensor, keys: PagedRows, peers: Mapping[str, Callable[[], Any]], shares: dict[str, float]
) -> Case:
    def check() -> None:
        start = 4096
        few = _first_keys(keys, start + 3)
        found = cpu.select(q[:3], w[:3], few, start=start, topk=TOPK)
        expected = reference.select(q[:3].double(), w[:3].double(), few, start=start, topk=TOPK)
        _assert_same_positions(found, expected, allowed=2)

    visible = T * L - T * (T - 1) // 2
    return Case(
        shape=f"T={T} L={L} I={HEADS} X={X} topk={TOPK}",
        dtype=f"bf16, {keys.format.name} keys",
        run=lambda: cpu.select(q, w, keys, start=L - T, topk=TOPK),
        check=check,
        flops=2 * visible * HEADS * X,
        bytes=L * keys.format.row_bytes + T * (2 * HEADS * X + 4 * HEADS + 4 * TOPK),
        bound="bf16",
        peers=peers,
        peer_shares=shares,
        measures_memory=True,
    )


def _scaled(peer: str) -> str:
    return f"{peer}, scaled from {PEER_QUERIES} of {T} queries"


def _first_keys(keys: PagedRows, count: int) -> PagedRows:
    pages = -(-count // keys.page_rows)
    return PagedRows(pages_NPB=keys.pages_NPB, table=keys.table[:pages], num_rows=count, format=keys.format)


def _assert_same_positions(found: torch.Tensor, expected: torch.Tensor, *, allowed: int) -> None:
    """Up to `allowed` positions may differ: near ties of fp64 that fp32 sums turn round."""
    common = [len(set(a) & set(b)) for a, b in zip(found.tolist(), expected.tolist(), strict=True)]
    width = found.shape[1]
    assert min(common) >= width - allowed, f"{common} of {width} positions agree: not timed"


def _visible_pools(start: int, count: int) -> int:
    return sum((start + t + 1) // POOL for t in range(count))


def _inputs(seed: int, row_format: RowFormat, *, num_keys: int = L) -> tuple[torch.Tensor, torch.Tensor, PagedRows]:
    generator = torch.Generator().manual_seed(seed)
    q, w = torch.randn(T, HEADS, X, generator=generator).bfloat16(), torch.randn(T, HEADS, generator=generator)
    return q, w, scattered(torch.randn(num_keys, X, generator=generator), row_format, seed)
