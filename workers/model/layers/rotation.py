"""Rotation frequencies of a layer's position encoding."""

from __future__ import annotations

import torch

from longprefill.kernels.rope.frequencies import inverse_frequencies
from longprefill.workers.model.config import RopeConfig


def rope_frequencies(rope: RopeConfig | None, dim: int) -> torch.Tensor | None:
    """fp64 [dim / 2] (fp32 would be off by a quarter radian at 4 M tokens); None: nothing rotates."""
    if rope is None or dim == 0:
        return None
    return torch.tensor(inverse_frequencies(rope.theta, dim, rope.inv_freq_scale), dtype=torch.float64)
