"""Rotary positions by blocks of rows; interleaved pairs are complex numbers as they lie in memory.

Legend: T tokens, H heads, P rotated dims, P2 = P / 2 pairs, L rows of a block.
"""

from __future__ import annotations

from typing import Literal

import torch

BLOCK_ELEMENTS = 1 << 18
"""Elements a block of rows: about 1 MiB in fp32."""


def rotate(
    x_THP: torch.Tensor, positions_T: torch.Tensor, inv_freq_P2: torch.Tensor, pairing: Literal["interleaved", "half"]
) -> torch.Tensor:
    """Every pair (a, b) of dims turned by position * frequency, in place of itself: x's shape, order and dtype.

    "interleaved" pairs dims (0, 1), (2, 3), ...; "half" pairs (i, i + P / 2). Angles in fp64, the rotation in fp32
    (fp64 for fp64 x).

    Raises:
        ValueError: an unknown pairing, an odd P, or another number of frequencies than P / 2.
    """
    check_rotation(x_THP, inv_freq_P2, pairing)
    dtype = torch.float64 if x_THP.dtype == torch.float64 else torch.float32
    num_pairs = x_THP.shape[-1] // 2
    frequency_P2 = inv_freq_P2.to(torch.float64)
    out_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    size = max(1, BLOCK_ELEMENTS // max(1, x_THP[:1].numel()))
    for start in range(0, x_THP.shape[0], size):
        rows = slice(start, start + size)
        angle_L1P2 = (positions_T[rows].to(torch.float64).unsqueeze(-1) * frequency_P2).unsqueeze(1)
        cos, sin = angle_L1P2.cos().to(dtype), angle_L1P2.sin().to(dtype)
        block_LHP = x_THP[rows].to(dtype)
        if pairing == "interleaved":
            # A fresh copy: a view of x may start at an odd number, where no complex number can lie.
            fresh_LHP = torch.empty(block_LHP.shape, dtype=dtype, device=x_THP.device).copy_(block_LHP)
            pairs = torch.view_as_complex(fresh_LHP.unflatten(-1, (num_pairs, 2)))
            out_THP[rows] = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        else:
            a, b = block_LHP[..., :num_pairs], block_LHP[..., num_pairs:]
            out_THP[rows, :, :num_pairs] = torch.addcmul(a * cos, b, sin, value=-1)
            out_THP[rows, :, num_pairs:] = torch.addcmul(a * sin, b, cos)
    return out_THP


def check_rotation(x_THP: torch.Tensor, inv_freq_P2: torch.Tensor, pairing: str) -> None:
    """Raises ValueError for what has no pairs or not one frequency a pair."""
    if pairing not in ("interleaved", "half"):
        raise ValueError(f"pairing={pairing!r}: use 'interleaved' or 'half'")
    num_dims = x_THP.shape[-1]
    if num_dims % 2 or tuple(inv_freq_P2.shape) != (num_dims // 2,):
        raise ValueError(
            f"x of shape {list(x_THP.shape)} with frequencies of shape {list(inv_freq_P2.shape)}: "
            "the last dim must be even, and there is one frequency a pair"
        )
