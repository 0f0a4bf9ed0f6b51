"""Sparse latent attention: random rows of a large cache.

Legend: T queries, H heads, L cached rows, S selected rows, R latent rank, P rope dim. 2 H (2 R + P) flops a selection.
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
