"""Depthwise causal convolution and SiLU as the formula stands.

Legend: T tokens, N segments, C channels, W conv width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.segments import segment_bounds
from longprefill.kernels.shapes import check_shape


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
    outs = [x_TC.new_zeros(0, x_TC.shape[1])]
    for segment, (start, end) in enumerate(bounds):
        if start == end:
            continue
        padded = torch.cat([history_NWC[segment].to(dtype), x_TC[start:end].to(dtype)])
        windows_TCW = padded.unfold(0, width, 1)
        conv_TC = (windows_TCW * weight_CW.to(dtype)).sum(-1)
        outs.append((conv_TC * torch.sigmoid(conv_TC)).to(x_TC.dtype))
    return torch.cat(outs)
