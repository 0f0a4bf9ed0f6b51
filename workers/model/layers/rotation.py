"""A layer's position encoding: its frequencies, and the rotation itself.

T rows, H heads, P rotated dims
"""

from __future__ import annotations

import torch

from longprefill.kernels.contracts import RopeKernels
from longprefill.kernels.rope.frequencies import inverse_frequencies
from longprefill.workers.model.config import RopeConfig


def rope_frequencies(rope: RopeConfig | None, dim: int) -> torch.Tensor | None:
    """fp64 [dim / 2] (fp32 would be off by a quarter radian at 4 M tokens); None: nothing rotates."""
    if rope is None or dim == 0:
        return None
    return torch.tensor(inverse_frequencies(rope.theta, dim, rope.inv_freq_scale), dtype=torch.float64)


def rotate(
    x_THP: torch.Tensor, positions_T: torch.Tensor, inv_freq: torch.Tensor, rope: RopeConfig, kernels: RopeKernels
) -> torch.Tensor:
    """x at these positions, times `rope.magnitude`; in x's dtype."""
    rotated_THP = kernels.rotate(x_THP, positions_T, inv_freq, rope.pairing)
    return rotated_THP if rope.magnitude == 1.0 else rotated_THP * rope.magnitude
