"""MXFP8 bytes against torchao's 0.18, bit by bit, in both of its rounding modes that we have. B blocks of 32 numbers.

Where torchao differs is stated exactly (kernels/quant/README.md has it in words) and asserted both ways: blocks outside
of the stated sets are equal, blocks inside differ as stated. A torchao that changes turns this red.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from longprefill.kernels.quant.formats import E8M0_NAN, MX_GROUP, Mxfp8Rows

from .compiled import compiled_backends
from .dsa_cases import make_generator

MODES = {"up": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}
SCALE = MX_GROUP
"""Column of the scale behind a block's codes."""
NUM_BLOCKS = 100_000
DRAWN_BLOCKS = 25_000
TINY_FACTOR = {"up": 1.0, "floor": 2.0**126}
"""What torchao multiplies a block by whose scale is 2^-127 (byte 0), instead of 2^127."""
MOST_UNITS = 40
"""How far above 1.75 * 2^n, in units of the last bit, a logarithm in fp32 may still round to a whole number."""

rounding_modes = pytest.mark.parametrize("rounding", MODES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
codecs = pytest.mark.parametrize("codec", [pytest.param(None, id="plain"), *compiled_backends("quant")])


def random_blocks() -> Iterator[torch.Tensor]:
    """Blocks over the whole range of exponents, each number of a block within some binades of the others."""
    generator = make_generator(0)
    while True:
        values_BG = torch.randn(DRAWN_BLOCKS, MX_GROUP, generator=generator)
        binade_B1 = torch.randint(-149, 120, (DRAWN_BLOCKS, 1), generator=generator)
        spread_BG = torch.randint(-12, 1, (DRAWN_BLOCKS, MX_GROUP), generator=generator)
        yield torch.ldexp(values_BG, binade_B1 + spread_BG).clamp(-3e38, 3e38)


def special_blocks() -> torch.Tensor:
    """All zero, -0, one number alone in every binade and just below and above its edges, equal numbers, ramps."""
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


def blocks_above_1_75() -> torch.Tensor:
    """Largest numbers from 1.75 * 2^n on, bit by bit, in every binade, beside smaller ones."""
    bits = (torch.arange(1, 255)[:, None] << 23) | torch.arange(0x600000 - 8, 0x600000 + MOST_UNITS + 24)
    amax_B = bits.to(torch.int32).view(torch.float32).reshape(-1)
    blocks_BG = torch.zeros(len(amax_B), MX_GROUP)
    blocks_BG[:, 3], blocks_BG[:, 4], blocks_BG[:, 17] = amax_B, amax_B * 2.0**-8, amax_B * -0.37
    return blocks_BG


def bytes_of_torchao(blocks_BG: torch.Tensor, rounding: str) -> torch.Tensor:
    """uint8 [B, 33]: codes, then the scale."""
    scale_B1, codes_BG = to_mx(blocks_BG, torch.float8_e4m3fn, MX_GROUP, MODES[rounding])
    return torch.cat([codes_BG.view(torch.uint8), scale_B1.view(torch.uint8).reshape(-1, 1)], dim=1)


def bytes_of_ours(blocks_BG: torch.Tensor, rounding: Any, codec: Any = None) -> torch.Tensor:
    """The same by the torch operators of formats.py, or by a compiled codec."""
    if codec is None:
        return Mxfp8Rows(MX_GROUP, rounding=rounding).encode_plain(blocks_BG)
    return codec.encode_mxfp8(blocks_BG, rounds_up=rounding == "up")


def codes_of(blocks_BG: torch.Tensor, factor: float) -> torch.Tensor:
    """E4M3 of the numbers times a power of two, by torch's cast, from fp64: no product is rounded twice."""
    scaled_BG = (blocks_BG.double() * factor).float().clamp(-448.0, 448.0)
    return scaled_BG.to(torch.float8_e4m3fn).view(torch.uint8)


def has_lower_scale(blocks_BG: torch.Tensor) -> torch.Tensor:
    """Blocks whose exponent torchao's RCEIL makes too small by one: log2(amax / 448) in fp32 rounds to a whole number
    that it is above of. bool [B]."""
    amax_B = blocks_BG.float().abs().amax(1)
    rounded_B = torch.log2(amax_B / 448.0)
    is_above_B = amax_B.double() > 448.0 * torch.exp2(rounded_B.double())
    return (rounded_B == rounded_B.round()) & is_above_B & (rounded_B >= -127.0)


def assert_equal_bytes(ours: torch.Tensor, theirs: torch.Tensor, blocks_BG: torch.Tensor, what: str) -> None:
    is_other_B = (ours != theirs).reshape(len(ours), -1).any(1)
    if bool(is_other_B.any()):
        first = int(is_other_B.nonzero()[0])
        pytest.fail(
            f"{what}: {int(is_other_B.sum())} of {len(ours)} blocks differ, first {blocks_BG[first].tolist()}: "
            f"{ours[first].tolist()}, torchao {theirs[first].tolist()}"
        )


def compare(blocks_BG: torch.Tensor, rounding: str, codec: Any) -> int:
    """Scales of all blocks, the tiny ones too (RCEIL's rounded logarithms apart, a few of a million fp32 blocks), and
    codes of all but those of scale 2^-127, whose codes are what TINY_FACTOR says; returns how many blocks were equal in
    all bytes because they had to be."""
    ours, theirs = bytes_of_ours(blocks_BG, rounding, codec), bytes_of_torchao(blocks_BG, rounding)
    if rounding == "up":
        is_lower_B = has_lower_scale(blocks_BG)
        assert torch.equal(ours[is_lower_B, SCALE], theirs[is_lower_B, SCALE] + 1)
        ours, theirs, blocks_BG = ours[~is_lower_B], theirs[~is_lower_B], blocks_BG[~is_lower_B]
    assert_equal_bytes(ours[:, SCALE], theirs[:, SCALE], blocks_BG, "scales")
    is_tiny_B = theirs[:, SCALE] == 0
    assert_equal_bytes(ours[~is_tiny_B], theirs[~is_tiny_B], blocks_BG[~is_tiny_B], "codes")
    tiny_BG = blocks_BG[is_tiny_B]
    assert_equal_bytes(ours[is_tiny_B, :SCALE], codes_of(tiny_BG, 2.0**127), tiny_BG, "our codes at 2^-127")
    stated = codes_of(tiny_BG, TINY_FACTOR[rounding])
    assert_equal_bytes(stated, theirs[is_tiny_B, :SCALE], tiny_BG, "what is stated of torchao at 2^-127")
    return int((~is_tiny_B).sum())


@rounding_modes
@dtypes
@codecs
def test_random_blocks_have_the_bytes_of_torchao(rounding: Any, dtype: torch.dtype, codec: Any) -> None:
    compared = 0
    for blocks_BG in random_blocks():
        compared += compare(blocks_BG.to(dtype), rounding, codec)
        if compared >= NUM_BLOCKS:
            break


@rounding_modes
@dtypes
@codecs
def test_special_blocks_have_the_bytes_of_torchao(rounding: Any, dtype: torch.dtype, codec: Any) -> None:
    blocks_BG = special_blocks().to(dtype)
    compared = compare(blocks_BG[torch.isfinite(blocks_BG).all(1)], rounding, codec)
    assert compared > 8000


@codecs
def test_rceil_scales_differ_where_a_logarithm_in_fp32_is_rounded(codec: Any) -> None:
    blocks_BG = blocks_above_1_75()
    ours, theirs = bytes_of_ours(blocks_BG, "up", codec), bytes_of_torchao(blocks_BG, "up")
    is_lower_B = has_lower_scale(blocks_BG)
    assert_equal_bytes(ours[~is_lower_B, SCALE], theirs[~is_lower_B, SCALE], blocks_BG[~is_lower_B], "scales")
    assert torch.equal(ours[is_lower_B, SCALE], theirs[is_lower_B, SCALE] + 1)
    units_B = (blocks_BG.amax(1).view(torch.int32) & 0x7FFFFF) - 0x600000
    assert int(is_lower_B.sum()) > 5000
    assert int(units_B[is_lower_B].min()) >= 1
    assert int(units_B[is_lower_B].max()) == MOST_UNITS
    # theirs saturates at 448, ours says 224 at twice the scale: the same number, whose error is below 2^-17
    is_whole_B = is_lower_B & (theirs[:, SCALE] > 0)
    decode = Mxfp8Rows(MX_GROUP).decode
    for encoded in (ours, theirs):
        ratio_B = decode(encoded[is_whole_B], torch.float32)[:, 3].double() / blocks_BG[is_whole_B, 3].double()
        assert float((ratio_B - 1.0).abs().max()) < 2.0**-17


@pytest.mark.parametrize(("rounding", "limit"), [("up", 1.75 * 2.0**-119), ("floor", 2.0**-118)])
def test_codes_differ_only_in_tiny_blocks(rounding: str, limit: float) -> None:
    """Scale 2^-127 is the least that a byte can say. Where an amax is below `limit`, our codes belong to that scale;
    RCEIL writes zeros, FLOOR halves the numbers. README.md has these sets."""
    generator = make_generator(1)
    binade_B1 = torch.randint(-150, -110, (NUM_BLOCKS, 1), generator=generator)
    blocks_BG = torch.ldexp(torch.randn(NUM_BLOCKS, MX_GROUP, generator=generator), binade_B1)
    ours, theirs = bytes_of_ours(blocks_BG, rounding), bytes_of_torchao(blocks_BG, rounding)
    assert_equal_bytes(ours[:, SCALE], theirs[:, SCALE], blocks_BG, "scales")
    amax_B = blocks_BG.abs().amax(1).double()
    is_tiny_B = (amax_B <= limit) if rounding == "up" else (amax_B < limit)
    assert torch.equal(ours[:, SCALE] == 0, is_tiny_B)
    differs_B = (ours != theirs).any(1)
    if rounding == "up":
        assert bool((theirs[is_tiny_B, :SCALE] & 0x7F == 0).all()), "torchao writes signed zeros"
        # half of the least number, 2^-9 * 2^-127, is a tie that rounds to zero in both
        assert torch.equal(differs_B, is_tiny_B & (amax_B > 2.0**-137))
    else:
        doubled = codes_of(blocks_BG, 2.0**127) != codes_of(blocks_BG, 2.0**126)
        assert torch.equal(differs_B, is_tiny_B & doubled.any(1))
        assert bool(differs_B[is_tiny_B & (amax_B > 1.5 * 2.0**-136)].all())
    assert int(differs_B.sum()) > NUM_BLOCKS // 3


@rounding_modes
@codecs
def test_our_tiny_blocks_come_back_right(rounding: Any, codec: Any) -> None:
    blocks_BG = special_blocks()
    blocks_BG = blocks_BG[blocks_BG.abs().amax(1) < 2.0**-117]
    decoded_BG = Mxfp8Rows(MX_GROUP, rounding=rounding).decode(bytes_of_ours(blocks_BG, rounding, codec), torch.float32)
    amax_B1 = blocks_BG.double().abs().amax(1, keepdim=True)
    # Half a unit of E4M3's 4 significant bits, or of its subnormals under the smallest scale; floor may saturate.
    allowed_B1 = (amax_B1 * (2.0**-4 if rounding == "up" else 2.0**-3)).clamp(min=2.0 ** (-127 - 10))
    assert bool(((decoded_BG.double() - blocks_BG.double()).abs() <= allowed_B1).all())


@rounding_modes
@codecs
def test_a_tiny_block_reads_as_zeros_where_denormals_are_flushed(rounding: Any, codec: Any) -> None:
    """As a prefill step reads it: 2^-127 is itself a denormal."""
    tiny_BG = torch.ldexp(torch.linspace(-1.0, 1.0, 2 * MX_GROUP).view(2, MX_GROUP), torch.tensor([[-120], [-117]]))
    encoded = bytes_of_ours(tiny_BG, rounding, codec)
    row_format = Mxfp8Rows(MX_GROUP, rounding=rounding)
    kept = row_format.decode(encoded, torch.float32)
    torch.set_flush_denormal(True)
    try:
        flushed = row_format.decode(encoded, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert encoded[:, SCALE].tolist()[0] == 0
    assert int((kept[0] != 0).sum()) == MX_GROUP
    assert bool((flushed[0] == 0).all())
    assert torch.equal(flushed[1], kept[1])


@rounding_modes
@codecs
def test_a_block_that_holds_nan_is_nan_in_both(rounding: Any, codec: Any) -> None:
    blocks_BG = torch.ones(4, MX_GROUP)
    blocks_BG[1, 7] = torch.nan
    blocks_BG[2] = torch.nan
    ours, theirs = bytes_of_ours(blocks_BG, rounding, codec), bytes_of_torchao(blocks_BG, rounding)
    assert torch.equal(ours[[0, 3]], theirs[[0, 3]])
    assert ours[1:3, SCALE].tolist() == theirs[1:3, SCALE].tolist() == [E8M0_NAN] * 2
    assert bool((ours[1:3, :SCALE] == 0x7F).all())
    # FLOOR divides the finite numbers by infinity and writes zeros: the scale alone says NaN. All else is equal.
    has_zeros = rounding == "floor"
    stated = torch.full((MX_GROUP,), 0 if has_zeros else 0x7F)
    stated[7] = 0x7F
    assert theirs[1, :SCALE].tolist() == stated.tolist()
    assert bool((theirs[2, :SCALE] == 0x7F).all())
    for encoded in (ours, theirs):
        decoded_BG = Mxfp8Rows(MX_GROUP, rounding=rounding).decode(encoded, torch.float32)
        assert decoded_BG.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("rounding", "scale"), [("up", 254), ("floor", 247)])
@codecs
def test_a_block_that_holds_inf_is_nan_here_and_loses_its_other_numbers_in_torchao(
    rounding: Any, scale: int, codec: Any
) -> None:
    blocks_BG = torch.ones(3, MX_GROUP)
    blocks_BG[0, 7], blocks_BG[1, 7] = torch.inf, -torch.inf
    ours, theirs = bytes_of_ours(blocks_BG, rounding, codec), bytes_of_torchao(blocks_BG, rounding)
    assert torch.equal(ours[2], theirs[2])
    assert ours[:2].tolist() == [[0x7F] * MX_GROUP + [E8M0_NAN]] * 2
    codes = [0] * MX_GROUP
    codes[7] = 0x7E  # 448: 1.75 * 2^128 and more, which is inf again in fp32
    assert theirs[0].tolist() == [*codes, scale]
    codes[7] = 0xFE
    assert theirs[1].tolist() == [*codes, scale]
