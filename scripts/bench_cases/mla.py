"""Latent attention: sparse over random rows of a large cache, dense, and decode in both.

Legend: T queries, H heads, L cached rows, S selected rows, R latent rank, P rope dim, N nope dim, V value dim.
Sparse: 2 H (2 R + P) flops a selection. Dense: 2 H (N + P + V) a visible pair and 2 H R (N + V) a row. Decode: sparse
flops of the rows that it reads, and 2 H R (N + V) of the query's way into the latent space and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from longprefill.kernels.mla import cpu, plain, reference
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Bf16Rows, Fp8LatentRows

from .measure import Case, assert_close
from .pages import scattered

T, H, L, S, R, P = 64, 64, 131072, 2048, 512, 64
DECODE_LAYERS, N, V = 4, 128, 128
"""Layers that decode goes through: 64 MiB of weights and rows of its own each, as it meets them (not in cache)."""
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


class _Layer(NamedTuple):
    """What one layer's query meets in decode."""

    rows: PagedRows
    indices_1S: torch.Tensor
    w_uk_HNR: torch.Tensor
    w_uv_HVR: torch.Tensor


def decode(seed: int) -> Iterator[Case]:
    """One query a layer, from expanded query to values: over S rows in bf16, with `plain` as the peer `torch`; the same
    in FP8, with our own kernel over bf16 rows; and dense over the L / DECODE_LAYERS rows of each layer."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, H, N + P, generator=generator).bfloat16()
    weights = [
        [(torch.randn(H, width, R, generator=generator) * R**-0.5).bfloat16() for width in (N, V)]
        for _ in range(DECODE_LAYERS)
    ]
    _, latents, chosen = _inputs(seed)
    wide, narrow = scattered(latents, Bf16Rows(R + P), seed), scattered(latents, Fp8LatentRows(R, P), seed)
    sparse, sparse_fp8 = (
        [_Layer(rows, chosen[n : n + 1], *pair) for n, pair in enumerate(weights)] for rows in (wide, narrow)
    )
    visible = L // DECODE_LAYERS
    every = torch.arange(visible, dtype=torch.int32)[None]
    dense_layers = [_Layer(_part(wide, n * visible, visible), every, *pair) for n, pair in enumerate(weights)]

    def selected(backend: Any, layers: list[_Layer]) -> list[torch.Tensor]:
        return [backend.selected(q, *layer, start=layer.rows.num_rows - 1, scale=SCALE) for layer in layers]

    def densely() -> list[torch.Tensor]:
        return [
            cpu.dense(q, layer.rows, layer.w_uk_HNR, layer.w_uv_HVR, start=visible - 1, scale=SCALE)
            for layer in dense_layers
        ]

    yield _decode_case(q, sparse, lambda: selected(cpu, sparse), {"torch": lambda: selected(plain, sparse)})
    yield _decode_case(q, sparse_fp8, lambda: selected(cpu, sparse_fp8), {"bf16 rows": lambda: selected(cpu, sparse)})
    yield _decode_case(q, dense_layers, densely, {"torch": lambda: selected(plain, dense_layers)})


def _decode_case(
    q: torch.Tensor,
    layers: list[_Layer],
    run: Callable[[], list[torch.Tensor]],
    peers: Mapping[str, Callable[[], Any]],
) -> Case:
    rows, num_read = layers[0].rows, layers[0].indices_1S.shape[1]

    def check() -> None:
        for found, layer in zip(run(), layers, strict=True):
            absorbed = plain.absorbed(q.double(), layer.w_uk_HNR.double())
            latent = reference.sparse(absorbed, layer.rows, layer.indices_1S, scale=SCALE, latent_rank=R)
            assert_close(found, plain.values_of(latent, layer.w_uv_HVR.double()), 1e-2)

    return Case(
        shape=f"layers={len(layers)} T=1 H={H} L={rows.num_rows} S={num_read} R={R} P={P} N={N} V={V}",
        dtype=f"bf16, {rows.format.name} rows",
        run=run,
        check=check,
        flops=2 * len(layers) * H * (num_read * (2 * R + P) + R * (N + V)),
        bytes=len(layers) * (num_read * (rows.format.row_bytes + 4) + 2 * H * (R + 1) * (N + V) + 2 * H * P),
        bound="memory",
        peers=peers,
    )


def _part(rows: PagedRows, start: int, count: int) -> PagedRows:
    table = rows.table[start // rows.page_rows : (start + count) // rows.page_rows]
    return PagedRows(pages_NPB=rows.pages_NPB, table=table, num_rows=count, format=rows.format)


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
