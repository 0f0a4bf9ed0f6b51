"""Rotary frequencies and the yarn correction. Pure Python, so that a model config can be read without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def inverse_frequencies(theta: float, dim: int, scale: Sequence[float] | None = None) -> tuple[float, ...]:
    """theta^(-2 i / dim) for i < dim / 2 in radians a token, times `scale` where given.

    Kept in double precision: at position 4 million an fp32 frequency is a quarter of a radian off.

    Raises:
        ValueError: `dim` is odd or not positive, `theta` not above 0, or `scale` has another length than dim / 2.
    """
    if dim <= 0 or dim % 2 or theta <= 0:
        raise ValueError(f"dim={dim}, theta={theta}: need an even dim above 0 and a theta above 0")
    factors = (1.0,) * (dim // 2) if scale is None else tuple(scale)
    if len(factors) != dim // 2:
        raise ValueError(f"{len(factors)} frequency factors for dim={dim}: need {dim // 2}, one a pair")
    return tuple(factor * theta ** (-2 * i / dim) for i, factor in enumerate(factors))


def yarn_factors(
    theta: float,
    dim: int,
    *,
    factor: float,
    original_max_tokens: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """What yarn (arXiv 2309.00071) multiplies each frequency by: 1 for the fast ones, 1 / factor for the slow ones.

    A frequency that turns `beta_fast` times or more within the original length is kept, one that turns `beta_slow`
    times or less is interpolated, and a ramp in the frequency's index lies between (its ends rounded outwards to whole
    indices if `truncate`).

    Raises:
        ValueError: a length, factor or beta that is not above 0, or beta_fast below beta_slow.
    """
    if min(factor, original_max_tokens, beta_slow) <= 0 or beta_fast < beta_slow:
        raise ValueError(
            f"yarn factor={factor}, original_max_tokens={original_max_tokens}, beta_fast={beta_fast}, "
            f"beta_slow={beta_slow}: all must be above 0 and beta_fast at least beta_slow"
        )

    def index_of_turns(turns: float) -> float:
        return dim * math.log(original_max_tokens / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = index_of_turns(beta_fast), index_of_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramps = (min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2))
    return tuple(ramp / factor + (1 - ramp) for ramp in ramps)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1, or 1 without extension.

    Attention's scale takes its square with mscale_all_dim; cos and sin take the quotient of the values for mscale and
    mscale_all_dim, which is 1 in the released models.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
