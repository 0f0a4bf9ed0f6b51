"""Attention Residuals: the two-phase form of one block, as a layer runs it.

Legend: T tokens, D hidden, B finished blocks, Q queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from longprefill.kernels.residual import cpu, plain, reference

from .measure import Case, assert_close

T, D, B, Q = 2048, 4096, 4, 4
EPS = 1e-6


def attn_res(seed: int) -> Iterator[Case]:
    """Phase 1 for Q queries over B blocks, then phase 2 of each query with the running partial."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(T, D, generator=generator).bfloat16() for _ in range(B)]
    partial, queries = torch.randn(T, D, generator=generator).bfloat16(), torch.randn(Q, D, generator=generator)

    def run(backend: Any, rows: int = T) -> list[torch.Tensor]:
        phase1 = backend.prepare([block[:rows] for block in blocks], queries, eps=EPS)
        return [backend.update(partial[:rows], phase1, i, queries[i], eps=EPS) for i in range(Q)]

    def check() -> None:
        wide = [block[:64].double() for block in (*blocks, partial)]
        for i, found in enumerate(run(cpu, 64)):
            assert_close(found, reference.mix(wide, queries[i].double(), eps=EPS), 3e-3)

    yield Case(
        shape=f"T={T} D={D} blocks={B} queries={Q}",
        dtype="bf16",
        run=lambda: run(cpu),
        check=check,
        flops=T * D * (B * (2 + 4 * Q) + Q * 7),
        bytes=T * D * 2 * (B + Q + Q),  # the blocks; each query's partial, another one in a layer, and its result
        bound="memory",
        peers={"plain": lambda: run(plain)},
    )
