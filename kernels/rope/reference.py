"""Rotary positions as the formula stands.

Legend: T tokens, H heads, P rotated dims, P2 = P / 2 pairs.
"""

from __future__ import annotations

from typing import Literal

import torch

from .plain import check_rotation


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
    num_pairs = x_THP.shape[-1] // 2
    dtype = torch.float64 if x_THP.dtype == torch.float64 else torch.float32
    angle_T1P2 = (positions_T.to(torch.float64).unsqueeze(-1) * inv_freq_P2.to(torch.float64)).unsqueeze(1)
    cos, sin = angle_T1P2.cos().to(dtype), angle_T1P2.sin().to(dtype)
    if pairing == "interleaved":
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, num_pairs), slice(num_pairs, None)
    a, b = x_THP[..., first].to(dtype), x_THP[..., second].to(dtype)
    out_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    out_THP[..., first] = (a * cos - b * sin).to(x_THP.dtype)
    out_THP[..., second] = (a * sin + b * cos).to(x_THP.dtype)
    return out_THP
