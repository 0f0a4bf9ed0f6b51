"""MXFP8 bytes against torchao's, bit by bit, in both of its rounding modes that we have. B blocks of 32 numbers.

Two kinds of blocks are left out, in which torchao 0.18 is not what it says. Below 2^-118 it divides by 2^-126 and
stores 2^-127, so numbers come back halved. With RCEIL it takes amax * (1 / 448) for amax / 448, which for a mantissa
one unit above 1.75 rounds down to a power of two: such a block saturates. A block with an infinity, which torchao makes
finite, is all NaN here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from longprefill.kernels.quant.formats import MX_GROUP, Mxfp8Rows

from .compiled import compiled_backends
from .dsa_cases import make_generator

MODES = {"up": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}
NUM_BLOCKS = 100_000


def random_blocks() -> torch.Tensor:
    """Blocks over the whole range of exponents, each number of a block within some binades of the others."""
    generator = make_generator(0)
    values_BG = torch.randn(NUM_BLOCKS, MX_GROUP, generator=generator)
    binade_B = torch.randint(-140, 120, (NUM_BLOCKS, 1), generator=generator)
    spread_BG = torch.randint(-12, 1, (NUM_BLOCKS, MX_GROUP), generator=generator)
    return torch.ldexp(values_BG, binade_B + spread_BG).clamp(-3e38, 3e38)


def special_blocks() -> torch.Tensor:
    """All zero, -0, one number alone in every binade and just below and above its edges, equal numbers, saturation."""
    edges = torch.cat(
        [torch.ldexp(torch.tensor([1.0, 1.75, 1.875, 1.9375]), torch.tensor(e)) for e in range(-149, 128)]
    )
    edges = torch.cat([edges, torch.nextafter(edges, torch.zeros(())), torch.nextafter(edges, torch.tensor(torch.inf))])
    edges = edges[torch.isfinite(edges) & (edges < 1.9375 * 2.0**127)]
    alone_BG = torch.zeros(len(edges), MX_GROUP)
    alone_BG[:, 5] = edges
    equal_BG = edges[:, None].repeat(1, MX_GROUP)
    equal_BG[:, 1::2] *= -1
    ramp_BG = edges[:, None] * torch.linspace(-1, 1, MX_GROUP)
    return torch.cat([torch.zeros(1, MX_GROUP), torch.full((1, MX_GROUP), -0.0), alone_BG, equal_BG, ramp_BG])


def bytes_of_torchao(blocks_BG: torch.Tensor, mode: ScaleCalculationMode) -> torch.Tensor:
    """uint8 [B, 33]: codes, then the scale."""
    scale_B1, codes_BG = to_mx(blocks_BG, torch.float8_e4m3fn, MX_GROUP, mode)
    return torch.cat([codes_BG.view(torch.uint8), scale_B1.view(torch.uint8).reshape(-1, 1)], dim=1)


def is_exact_in_torchao(blocks_BG: torch.Tensor, rounding: str) -> torch.Tensor:
    amax_B = blocks_BG.float().abs().amax(1)
    is_exact_B = (amax_B == 0) | (amax_B >= 2.0**-118)
    if rounding == "up":
        mantissa_B = amax_B.view(torch.int32) & 0x7FFFFF
        is_exact_B &= mantissa_B != 0x600001
    return is_exact_B


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("blocks", [random_blocks, special_blocks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [pytest.param(None, id="plain"), *compiled_backends("quant")])
def test_mxfp8_bytes_are_those_of_torchao(rounding: Any, blocks: Any, dtype: torch.dtype, codec: Any) -> None:
    blocks_BG = blocks().to(dtype)
    blocks_BG = blocks_BG[torch.isfinite(blocks_BG).all(1) & is_exact_in_torchao(blocks_BG, rounding)]
    expected = bytes_of_torchao(blocks_BG, MODES[rounding])
    if codec is None:
        actual = Mxfp8Rows(MX_GROUP, rounding=rounding).encode_plain(blocks_BG)
    else:
        actual = codec.encode_mxfp8(blocks_BG, rounds_up=rounding == "up")
    differing = (actual != expected).any(1)
    first = int(differing.nonzero()[0]) if bool(differing.any()) else 0
    assert not bool(differing.any()), (
        f"{int(differing.sum())} of {len(blocks_BG)} blocks differ, first {blocks_BG[first].tolist()}: "
        f"{actual[first].tolist()}, torchao {expected[first].tolist()}"
    )


@pytest.mark.parametrize("rounding", MODES)
def test_blocks_that_are_left_out_come_back_right(rounding: Any) -> None:
    blocks_BG = special_blocks()
    blocks_BG = blocks_BG[~is_exact_in_torchao(blocks_BG, rounding)].double()
    row_format = Mxfp8Rows(MX_GROUP, rounding=rounding)
    decoded_BG = row_format.decode(row_format.encode(blocks_BG.float()), torch.float32).double()
    amax_B1 = blocks_BG.abs().amax(1, keepdim=True)
    # Half a unit of E4M3's 4 significant bits, or of its subnormals under the smallest scale; floor may saturate.
    allowed_B1 = (amax_B1 * (2.0**-4 if rounding == "up" else 2.0**-3)).clamp(min=2.0 ** (-127 - 10))
    assert bool(((decoded_BG - blocks_BG).abs() <= allowed_B1).all())


@pytest.mark.parametrize("rounding", MODES)
def test_a_block_that_holds_nan_is_nan_in_both(rounding: Any) -> None:
    blocks_BG = torch.ones(3, MX_GROUP)
    blocks_BG[1, 7] = torch.nan
    theirs = bytes_of_torchao(blocks_BG, MODES[rounding])
    row_format = Mxfp8Rows(MX_GROUP, rounding=rounding)
    ours = row_format.encode(blocks_BG)
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
    assert int(ours[1, -1]) == int(theirs[1, -1]) == 255
    assert bool(row_format.decode(ours, torch.float32)[1].isnan().all())
