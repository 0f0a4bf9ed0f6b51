"""Shapes of operands: a smaller one that torch would broadcast is an error in every backend."""

from __future__ import annotations

import torch


def check_shape(x: torch.Tensor, name: str, *wanted: int) -> None:
    """ValueError unless `x` has just this shape, in the words of the compiled kernels."""
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name} has shape {list(x.shape)}: must be {list(wanted)}")
