"""How close is close: one table of RMS ratios by operation and dtype, the same everywhere.

The ratio is RMS(actual - expected) / RMS(expected), expected values in fp64. bf16 entries allow for one rounding
of the result (2^-9 at most, 1.7e-3 in the mean) and what the operation's own casts add.
"""

from __future__ import annotations

import torch

TOLERANCES: dict[tuple[str, torch.dtype], float] = {
    ("kda", torch.float64): 1e-12,
    ("kda", torch.float32): 2e-6,
    ("kda", torch.bfloat16): 5e-3,
    # beta = 2 on near-identical keys makes (I + L) ill-conditioned: 3e-5 by every tile form (kernels/kda/README.md).
    ("kda.negative_eigenvalues", torch.float32): 6e-5,
    ("kda.third_party", torch.float32): 4e-6,
    ("kda.gate", torch.float64): 1e-14,
    ("kda.gate", torch.float32): 1e-6,
    ("kda.inputs", torch.float64): 1e-13,
    ("kda.inputs", torch.float32): 1e-6,
    ("kda.inputs", torch.bfloat16): 3e-3,
    ("conv", torch.float64): 1e-14,
    ("conv", torch.float32): 1e-6,
    ("conv", torch.bfloat16): 3e-3,
    ("attn_res", torch.float64): 1e-13,
    ("attn_res", torch.float32): 1e-6,
    ("attn_res", torch.bfloat16): 3e-3,
    ("linear", torch.float64): 1e-14,
    ("linear", torch.float32): 2e-6,
    ("linear", torch.bfloat16): 4e-3,
    ("norm", torch.float64): 1e-14,
    ("norm", torch.float32): 5e-7,
    ("norm", torch.bfloat16): 4e-3,
    ("rope", torch.float64): 1e-13,
    ("rope", torch.float32): 5e-7,
    ("rope", torch.bfloat16): 3e-3,
}

FLOOR = 1e-30
"""An expected RMS below this counts as this: what has decayed to nothing has no relative error."""


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor, floor: float = FLOOR) -> float:
    """RMS(actual - expected) / max(RMS(expected), floor) in fp64; 0 for empty tensors."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp_min(floor))


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, op: str, dim: int | None = None, floor: float = FLOOR
) -> None:
    """Fails unless shapes agree, all is finite and the RMS ratio is within the table's entry for (op, actual's dtype).

    With `dim`, every slice along it is held to the tolerance by itself, so that no large head hides a wrong small one.
    `floor` is the smallest expected RMS that errors are measured against.
    """
    assert actual.shape == expected.shape, f"{op}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{op}: {int((~torch.isfinite(actual)).sum())} values are not finite"
    allowed = TOLERANCES[op, actual.dtype]
    slices = [(actual, expected)]
    if dim is not None:
        slices = list(zip(actual.unbind(dim), expected.unbind(dim), strict=True))
    for index, (a, e) in enumerate(slices):
        ratio = rms_ratio(a, e, floor)
        place = "" if dim is None else f" in slice {index} of dim {dim}"
        assert ratio <= allowed, f"{op}{place}: RMS ratio {ratio:.2e}, allowed {allowed:.0e} for {actual.dtype}"
