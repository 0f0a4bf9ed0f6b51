"""Depthwise causal convolution and SiLU as W shifted multiply-adds over blocks of rows that stay in cache.

Legend: T tokens, N segments, C channels, W conv width, L rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.segments import segment_bounds
from longprefill.kernels.shapes import check_shape

BLOCK_ELEMENTS = 1 << 18
"""Elements a block of rows: about 1 MiB in fp32."""


def causal_conv_silu(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, *, offsets: Sequence[int], history_NWC: torch.Tensor
) -> torch.Tensor:
    """y_t = silu(sum_j w_j x_{t - W + 1 + j}) within each segment, [T, C] in x's dtype.

    Computed in fp32 (fp64 for fp64 x).

    Raises:
        ValueError: `offsets` do not cover the T rows, or shapes that do not fit each other.
    """
    bounds = segment_bounds(offsets, x_TC.shape[0])
    num_channels, width = x_TC.shape[1], weight_CW.shape[1]
    check_shape(weight_CW, "weight", num_channels, width)
    check_shape(history_NWC, "history", len(bounds), width - 1, num_channels)
    dtype = torch.float64 if x_TC.dtype == torch.float64 else torch.float32
    taps_WC = weight_CW.to(dtype).t().contiguous()
    block = max(width, BLOCK_ELEMENTS // max(1, num_channels))  # a second block never reaches back into the history
    out_TC = torch.empty_like(x_TC)
    scratch_LC = torch.empty(block, num_channels, dtype=dtype, device=x_TC.device)
    for segment, (start, end) in enumerate(bounds):
        for first in range(start, end, block):
            last = min(first + block, end)
            if first == start:
                source = torch.cat([history_NWC[segment].to(dtype), x_TC[first:last].to(dtype)])
            else:
                source = x_TC[first - width + 1 : last].to(dtype)
            rows = last - first
            sum_LC = torch.mul(source[:rows], taps_WC[0], out=scratch_LC[:rows])
            for tap in range(1, width):
                sum_LC.addcmul_(source[tap : tap + rows], taps_WC[tap])
            out_TC[first:last] = torch.nn.functional.silu(sum_LC, inplace=True)
    return out_TC
