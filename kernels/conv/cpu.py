"""Depthwise causal convolution and SiLU by the compiled kernel (cpu_src/conv.cpp); fp64 and fp16 go to `plain`.

Legend: T tokens, N segments, C channels, W conv width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops
from longprefill.kernels.segments import segment_bounds

from . import plain


def causal_conv_silu(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, *, offsets: Sequence[int], history_NWC: torch.Tensor
) -> torch.Tensor:
    """y_t = silu(sum_j w_j x_{t - W + 1 + j}) within each segment, [T, C] in x's dtype, computed in fp32.

    Raises:
        ValueError: `offsets` do not cover the T rows, or shapes that do not fit each other.
    """
    if x_TC.dtype not in COMPILED_DTYPES:
        return plain.causal_conv_silu(x_TC, weight_CW, offsets=offsets, history_NWC=history_NWC)
    segment_bounds(offsets, x_TC.shape[0])
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    history_NWC = history_NWC.to(x_TC.dtype if history_NWC.dtype == x_TC.dtype else torch.float32).contiguous()
    return ops().causal_conv_silu(x_TC, weight_CW.float().t().contiguous(), list(offsets), history_NWC)
