"""Latent attention: sparse over random rows of a large cache, and dense.

Legend: T queries, H heads, L cached rows, S selected rows, R latent rank, P rope dim, N nope dim, V value dim.
Sparse: 2 H (2 R + P) flops a selection. Dense: 2 H (N + P + V) a visible pair and 2 H R (N + V) a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from longprefill.kernels.mla import cpu, plain, reference
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Bf16Rows, Fp8LatentRows

from .measure import Case, assert_close
from .pages import scattered

T, H, L, S, R, P = 64, 64, 131072, 2048, 512, 64
SCALE = 192**-0.5


def bf16_rows(seed: int) -> Iterator[Case]:
    """bf16 rows. The peer `torch` gathers and runs torch's fused attention."""
    q, latents, chosen = _inputs(seed)
    rows = scattered(latents, Bf16Rows(R + P), seed)
    yield _case(q, rows, chosen, {"torch": lambda: plain.sparse(q, rows, chosen, scale=SCALE, latent_rank=R)})


def fp8_rows(seed: int) -> Iterator[Case]:
    """FP8 rows. The peer `bf16 rows` is our own kernel over bf16 rows, in the same turns."""
    q, latents, chosen = _inputs(seed)
    rows, wide = scattered(latents, Fp8LatentRows(R, P), seed), scattered(latents, Bf16Rows(R + P), seed)
    yield _case(q, rows, chosen, {"bf16 rows": lambda: cpu.sparse(q, wide, chosen, scale=SCALE, latent_rank=R)})


def dense(seed: int) -> Iterator[Case]:
    """A fresh prompt, and a step behind a long prefix. The peer `torch` runs torch's fused attention block by block."""
    for queries, start in ((4096, 0), (4096, 28672)):
        generator = torch.Generator().manual_seed(seed)
        heads, nope, value = 8, 128, 128
        q = torch.randn(queries, heads, nope + P, generator=generator).bfloat16()
        rows = scattered(torch.randn(start + queries, R + P, generator=generator), Bf16Rows(R + P), seed)
        w_uk = (torch.randn(heads, nope, R, generator=generator) * R**-0.5).bfloat16()
        w_uv = (torch.randn(heads, value, R, generator=generator) * R**-0.5).bfloat16()
        yield _dense_case(q, rows, w_uk, w_uv, start)


def _dense_case(q: torch.Tensor, rows: PagedRows, w_uk: torch.Tensor, w_uv: torch.Tensor, start: int) -> Case:
    queries, heads, width = q.shape
    nope, value = w_uk.shape[1], w_uv.shape[1]

    def check() -> None:
        found = cpu.dense(q[:2], rows, w_uk, w_uv, start=start, scale=SCALE)
        precise = (q[:2].double(), rows, w_uk.double(), w_uv.double())
        assert_close(found, reference.dense(*precise, start=start, scale=SCALE), 5e-3)

    pairs = queries * start + queries * (queries + 1) // 2
    return Case(
        shape=f"T={queries} start={start} H={heads} R={R} P={P} N={nope} V={value}",
        dtype="bf16",
        run=lambda: cpu.dense(q, rows, w_uk, w_uv, start=start, scale=SCALE),
        check=check,
        flops=2 * heads * (pairs * (width + value) + (start + queries) * R * (nope + value)),
        bytes=(start + queries) * rows.format.row_bytes + 2 * queries * heads * (width + value),
        bound="bf16",
        peers={"torch": lambda: plain.dense(q, rows, w_uk, w_uv, start=start, scale=SCALE)},
    )


def _case(q: torch.Tensor, rows: PagedRows, chosen: torch.Tensor, peers: Mapping[str, Callable[[], Any]]) -> Case:
    def check() -> None:
        found = cpu.sparse(q[:2], rows, chosen[:2], scale=SCALE, latent_rank=R)
        assert_close(found, reference.sparse(q[:2].double(), rows, chosen[:2], scale=SCALE, latent_rank=R), 5e-3)

    return Case(
        shape=f"T={T} H={H} L={L} S={S} R={R} P={P}",
        dtype=f"bf16, {rows.format.name} rows",
        run=lambda: cpu.sparse(q, rows, chosen, scale=SCALE, latent_rank=R),
        check=check,
        flops=2 * T * H * S * (2 * R + P),
        bytes=T * (S * (rows.format.row_bytes + 4) + 2 * H * (2 * R + P)),
        bound="bf16",
        peers=peers,
    )


def _inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, latents = torch.randn(T, H, R + P, generator=generator), torch.randn(L, R + P, generator=generator)
    chosen = torch.stack([torch.randperm(L, generator=generator)[:S].sort().values for _ in range(T)])
    return q.bfloat16(), latents, chosen.to(torch.int32)
