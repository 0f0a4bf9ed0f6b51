"""Codecs of the quantized row formats: index keys in MXFP8, latents in FP8.

Legend: T rows, X index dim, R latent rank, P rope dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from longprefill.kernels.quant.formats import Fp8LatentRows, Mxfp8Rows

from .measure import Case

KEYS, X = 262144, 128
LATENTS, R, P = 65536, 512, 64


def mxfp8_encode(seed: int) -> Iterator[Case]:
    yield _encode(Mxfp8Rows(X), _rows(seed, KEYS, X))


def mxfp8_decode(seed: int) -> Iterator[Case]:
    yield _decode(Mxfp8Rows(X), _rows(seed, KEYS, X))


def fp8_encode(seed: int) -> Iterator[Case]:
    yield _encode(Fp8LatentRows(R, P), _rows(seed, LATENTS, R + P))


def fp8_decode(seed: int) -> Iterator[Case]:
    yield _decode(Fp8LatentRows(R, P), _rows(seed, LATENTS, R + P))


def _encode(row_format: Any, rows: torch.Tensor) -> Case:
    def check() -> None:
        assert torch.equal(row_format.encode(rows[:999]), row_format.encode_plain(rows[:999])), "wrong bytes"

    return _case(row_format, rows, lambda: row_format.encode(rows), check, lambda: row_format.encode_plain(rows))


def _decode(row_format: Any, rows: torch.Tensor) -> Case:
    encoded, dtype = row_format.encode(rows), torch.bfloat16

    def check() -> None:
        assert torch.equal(row_format.decode(encoded[:999], dtype), row_format.decode_plain(encoded[:999], dtype))

    def plain() -> torch.Tensor:
        return row_format.decode_plain(encoded, dtype)

    return _case(row_format, rows, lambda: row_format.decode(encoded, dtype), check, plain)


def _case(
    row_format: Any, rows: torch.Tensor, run: Callable[[], Any], check: Callable[[], None], plain: Callable[[], Any]
) -> Case:
    return Case(
        shape=f"T={len(rows)} W={row_format.width}",
        dtype=f"bf16, {row_format.name}",
        run=run,
        check=check,
        flops=0,
        bytes=len(rows) * (2 * row_format.width + row_format.row_bytes),
        bound="memory",
        peers={"torch": plain},
    )


def _rows(seed: int, num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
