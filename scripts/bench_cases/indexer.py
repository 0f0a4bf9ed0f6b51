"""Lightning indexer, top-k included: the last queries of a prompt over all of its keys.

Legend: T queries, L keys, X index dim. 2 HEADS X flops a query and visible key.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from longprefill.kernels.dsa import cpu, plain, reference
from longprefill.kernels.paged import PagedRows, RowFormat
from longprefill.kernels.quant.formats import Bf16Rows, Mxfp8Rows

from .measure import Case
from .pages import scattered

T, L, HEADS, X, TOPK = 1024, 65536, 32, 128, 2048
PEER_QUERIES = 64
"""Torch would take half a minute for all of them."""


def bf16_keys(seed: int) -> Iterator[Case]:
    """bf16 queries and keys. The peers are torch compositions over PEER_QUERIES queries: `plain`, in blocks with
    running lists, and the formula as it stands."""
    q, w, keys = _inputs(seed, Bf16Rows(X))
    last = slice(T - PEER_QUERIES, T)
    start = L - PEER_QUERIES
    peers = {
        f"torch, {PEER_QUERIES} of {T} queries": lambda: plain.select(q[last], w[last], keys, start=start, topk=TOPK),
        f"torch by the formula, {PEER_QUERIES} of {T} queries": lambda: _by_the_formula(q[last], w[last], keys, start),
    }
    yield _case(q, w, keys, peers)


def mxfp8_keys(seed: int) -> Iterator[Case]:
    """MXFP8 keys. The peer `bf16 keys` is our own kernel over bf16 keys, in the same turns."""
    q, w, keys = _inputs(seed, Mxfp8Rows(X))
    *_, wide = _inputs(seed, Bf16Rows(X))
    yield _case(q, w, keys, {"bf16 keys": lambda: cpu.select(q, w, wide, start=L - T, topk=TOPK)})


def _by_the_formula(q: torch.Tensor, w: torch.Tensor, keys: PagedRows, start: int) -> torch.Tensor:
    """All scores of eight queries at a time, then top-k (whose ties are not the contract's)."""
    k = keys.read(0, keys.num_rows, torch.float32)
    columns, chosen = torch.arange(keys.num_rows), []
    for first in range(0, len(q), 8):
        rows = slice(first, first + 8)
        products = torch.einsum("tix,lx->til", q[rows].float(), k).relu_()
        scores = torch.einsum("til,ti->tl", products, w[rows])
        scores.masked_fill_(columns > start + torch.arange(len(q))[rows, None], -torch.inf)
        chosen.append(scores.topk(TOPK, dim=1).indices)
    return torch.cat(chosen)


def _case(q: torch.Tensor, w: torch.Tensor, keys: PagedRows, peers: dict) -> Case:
    def check() -> None:
        start = 4096
        few = PagedRows(pages_NPB=keys.pages_NPB, table=keys.table[:65], num_rows=start + 3, format=keys.format)
        found = cpu.select(q[:3], w[:3], few, start=start, topk=TOPK)
        expected = reference.select(q[:3].double(), w[:3].double(), few, start=start, topk=TOPK)
        common = [len(set(a) & set(b)) for a, b in zip(found.tolist(), expected.tolist(), strict=True)]
        assert min(common) >= TOPK - 2, f"{common} of {TOPK} positions agree: not timed"

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
    )


def _inputs(seed: int, row_format: RowFormat) -> tuple[torch.Tensor, torch.Tensor, PagedRows]:
    generator = torch.Generator().manual_seed(seed)
    q, w = torch.randn(T, HEADS, X, generator=generator).bfloat16(), torch.randn(T, HEADS, generator=generator)
    return q, w, scattered(torch.randn(L, X, generator=generator), row_format, seed)
