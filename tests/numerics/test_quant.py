"""Row formats: bytes against exact fractions and integers, special values, and what comes back.

Legend: T rows, W numbers a row, B bytes a row, N groups of a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longprefill.kernels.quant.formats import FORMAT_NAMES, Bf16Rows, Fp8LatentRows, Fp32Rows, Mxfp8Rows, make_format

from .compiled import compiled_backends
from .dsa_cases import make_generator

E4M3_VALUES = [
    Fraction(code & 7, 8) * Fraction(2) ** -6
    if code < 8
    else (1 + Fraction(code & 7, 8)) * Fraction(2) ** ((code >> 3) - 7)
    for code in range(0x7F)
]
"""The finite E4M3 numbers by code, from the format's definition."""
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
FP32_MAX = torch.finfo(torch.float32).max


QUANTIZED = [
    pytest.param(row_format, id=f"{row_format.name}-{row_format.width}")
    for row_format in [
        *(Mxfp8Rows(width, rounding) for width in (1, 40, 128, 200) for rounding in ("up", "floor")),
        *(Fp8LatentRows(*sizes) for sizes in ((1, 0), (40, 7), (128, 64), (200, 30), (512, 64))),
    ]
]


def nearest_code(value: Fraction, is_negative: bool) -> int:
    """E4M3 code nearest to |value|, ties to the even code, saturating at 448."""
    magnitude = min(abs(value), Fraction(448))
    above = bisect_left(E4M3_VALUES, magnitude)
    code = min((max(above - 1, 0), above), key=lambda c: (abs(E4M3_VALUES[c] - magnitude), c & 1))
    return code | (0x80 if is_negative else 0)


def mx_exponent(amax: Fraction, rounding: str) -> int:
    """Exponent of the group's scale by exact comparison: "up" is the smallest e with amax <= 448 * 2^e."""
    exponent = -127
    if rounding == "up":
        while exponent < 127 and amax > 448 * Fraction(2) ** exponent:
            exponent += 1
        return exponent
    while exponent < 119 and amax >= Fraction(2) ** (exponent + 9):
        exponent += 1
    return exponent


def encode_mx_by_hand(row: list[float], rounding: str) -> bytes:
    codes, scales = [], []
    for first in range(0, len(row), 32):
        group = [Fraction(x) for x in row[first : first + 32]]
        exponent = mx_exponent(max(abs(x) for x in group), rounding)
        scales.append(exponent + 127)
        for number, exact in zip(row[first : first + 32], group, strict=True):
            codes.append(nearest_code(exact / Fraction(2) ** exponent, math.copysign(1, number) < 0))
    return bytes(codes + scales)


@settings(max_examples=60)
@given(row=st.lists(FINITE, min_size=1, max_size=70), rounding=st.sampled_from(["up", "floor"]))
@example(row=[448.0, 1.0], rounding="up")
@example(row=[448.1, 1.0], rounding="up")
@example(row=[-1.75 * 2.0**-30, 2.0**-40], rounding="up")
@example(row=[-1.7500001192092896 * 2.0**-30, 2.0**-40], rounding="up")
@example(row=[511.0, 2.0**-140], rounding="floor")
@example(row=[FP32_MAX, -FP32_MAX], rounding="up")
@example(row=[FP32_MAX, 1.0], rounding="floor")
@example(row=[2.0**-149, -(2.0**-149)], rounding="up")
@example(row=[2.0**-118, 2.0**-119 * 1.75], rounding="floor")
@example(row=[0.0, -0.0] * 20, rounding="up")
def test_mx_bytes_against_exact_fractions(row: list[float], rounding: Any) -> None:
    row_format = Mxfp8Rows(len(row), rounding)
    encoded = row_format.encode(torch.tensor([row], dtype=torch.float32))
    assert bytes(encoded[0].tolist()) == encode_mx_by_hand(row, rounding)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("latent_rank", [1, 128, 130])
def test_latent_rows_without_a_rope_part_in_any_strides(num_rows: int, latent_rank: int) -> None:
    row_format = Fp8LatentRows(latent_rank, 0)
    rows_TW = torch.randn(num_rows, latent_rank, generator=make_generator(0))
    by_columns_TW = rows_TW.t().contiguous().t()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        expected = row_format.encode(rows_TW.to(dtype))
        assert torch.equal(row_format.encode_plain(by_columns_TW.to(dtype)), expected)
        assert torch.equal(row_format.encode(by_columns_TW.to(dtype)), expected)


def test_mx_bytes_of_many_random_groups() -> None:
    generator = make_generator(0)
    rows_TW = torch.randn(40, 96, generator=generator) * torch.randint(-60, 60, (40, 1), generator=generator).exp2()
    for rounding in ("up", "floor"):
        encoded = Mxfp8Rows(96, rounding).encode(rows_TW)
        for row, found in zip(rows_TW.tolist(), encoded.tolist(), strict=True):
            assert bytes(found) == encode_mx_by_hand(row, rounding)


@pytest.mark.parametrize("byte", [0, 1, 2, 100, 127, 200, 247, 255])
def test_mx_decoding_is_exact(byte: int) -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    row_format = Mxfp8Rows(len(codes))
    scales = [byte] * row_format.num_groups
    decoded = row_format.decode(torch.tensor([codes + scales], dtype=torch.uint8), torch.float32)[0]
    if byte == 255:
        assert bool(decoded.isnan().all())
        return
    for code, value in zip(codes, decoded.tolist(), strict=True):
        exact = E4M3_VALUES[code & 0x7F] * Fraction(2) ** (byte - 127) * (-1 if code & 0x80 else 1)
        if abs(exact) >= Fraction(2) ** 128:
            assert math.isinf(value)
        else:
            assert Fraction(value) == exact
        assert math.copysign(1, value) == (-1 if code & 0x80 else 1)


@settings(max_examples=40)
@given(row=st.lists(FINITE, min_size=9, max_size=9))
@example(row=[0.0, -0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -0.0])
@example(row=[FP32_MAX, 1.0, -FP32_MAX, 0.0, 2.0**-149, 1e-45, 3.0, FP32_MAX, 2.0**-149])
def test_fp8_latent_bytes_against_exact_fractions(row: list[float]) -> None:
    row_format = Fp8LatentRows(7, 2)
    encoded = row_format.encode(torch.tensor([row], dtype=torch.float32))[0]
    assert encoded.shape == (7 + 4 + 4,)
    amax = torch.tensor(max(abs(x) for x in row[:7]), dtype=torch.float32)
    scale = max(float(amax / 448), 2.0**-126)
    assert float(encoded[7:11].clone().view(torch.float32)) == scale
    for number, code in zip(row[:7], encoded[:7].tolist(), strict=True):
        # The quotient is an fp32 number, then E4M3: the format's definition rounds twice.
        quotient = float(torch.tensor(number, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32))
        assert code == nearest_code(Fraction(quotient), math.copysign(1, number) < 0)
    tail = encoded[11:].clone().view(torch.bfloat16)
    assert torch.equal(tail, torch.tensor(row[7:], dtype=torch.float32).to(torch.bfloat16))


@pytest.mark.parametrize("latent_rank", [1, 127, 128, 129, 512])
def test_fp8_latent_of_any_rank(latent_rank: int) -> None:
    row_format = Fp8LatentRows(latent_rank, 6)
    rows_TW = torch.randn(50, latent_rank + 6, generator=make_generator(1))
    encoded = row_format.encode(rows_TW)
    assert encoded.shape == (50, row_format.row_bytes)
    decoded = row_format.decode(encoded, torch.float32)
    tiles = [slice(first, min(first + 128, latent_rank)) for first in range(0, latent_rank, 128)]
    for tile in tiles:
        amax_T1 = rows_TW[:, tile].abs().amax(1, keepdim=True)
        assert bool(((decoded[:, tile] - rows_TW[:, tile]).abs() <= amax_T1 * (16 / 448) * 1.0001).all())
    assert torch.equal(decoded[:, latent_rank:], rows_TW[:, latent_rank:].to(torch.bfloat16).float())


def test_byte_counts_of_the_published_formats() -> None:
    assert Fp8LatentRows(512, 64).row_bytes == 656
    assert Bf16Rows(576).row_bytes == 1152
    assert Mxfp8Rows(128).row_bytes == 132
    assert Bf16Rows(128).row_bytes == 256


def formats(width: int = 40) -> list[Any]:
    made = [Fp32Rows(width), Bf16Rows(width), Fp8LatentRows(width - 8, 8), Mxfp8Rows(width), Mxfp8Rows(width, "floor")]
    return [pytest.param(row_format, id=row_format.name) for row_format in made]


@pytest.mark.parametrize("row_format", formats())
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_never_silently_finite(row_format: Any, broken: float) -> None:
    rows_TW = torch.randn(4, 40, generator=make_generator(2))
    rows_TW[1, 3] = broken
    rows_TW[2, 39] = broken
    decoded = row_format.decode(row_format.encode(rows_TW), torch.float32)
    assert not torch.isfinite(decoded[1, 3])
    assert not torch.isfinite(decoded[2, 39])
    assert bool(torch.isfinite(decoded[[0, 3]]).all())
    if row_format.name in ("fp8", "mxfp8", "mxfp8_floor"):
        assert bool(decoded[1, :32].isnan().all())
        assert int(row_format.encode(rows_TW)[1, 0]) == 0x7F
    else:
        assert torch.equal(decoded[[1, 2]].isnan(), rows_TW[[1, 2]].isnan())
    if row_format.name.startswith("mxfp8"):
        assert row_format.encode(rows_TW)[1, 40] == 255
        assert row_format.encode(rows_TW)[2, 41] == 255


@pytest.mark.parametrize("row_format", formats())
def test_zeros_keep_their_sign(row_format: Any) -> None:
    rows_TW = torch.zeros(2, 40)
    rows_TW[:, ::2] = -0.0
    rows_TW[1, 7] = 5.0
    decoded = row_format.decode(row_format.encode(rows_TW), torch.float32)
    assert torch.equal(decoded[0], torch.zeros(40))
    assert torch.equal(torch.signbit(decoded), torch.signbit(rows_TW))


@pytest.mark.parametrize("row_format", formats())
def test_subnormal_numbers_stay_finite(row_format: Any) -> None:
    rows_TW = torch.full((2, 40), 2.0**-149)
    rows_TW[1] = 2.0**-127
    decoded = row_format.decode(row_format.encode(rows_TW), torch.float32)
    assert bool(torch.isfinite(decoded).all())
    assert bool((decoded >= 0).all())
    assert bool((decoded <= 2.0**-126).all())


@pytest.mark.parametrize("row_format", formats())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decoding_is_one_number_rounded_to_the_dtype(row_format: Any, dtype: torch.dtype) -> None:
    encoded = row_format.encode(torch.randn(9, 40, generator=make_generator(3)))
    decoded = row_format.decode(encoded, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded, row_format.decode(encoded, torch.float32).to(dtype))


@pytest.mark.parametrize("row_format", formats())
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), power=st.integers(-20, 20))
def test_requantizing_decoded_rows_changes_nothing(row_format: Any, seed: int, power: int) -> None:
    rows_TW = torch.randn(3, 40, generator=make_generator(seed)) * 2.0**power
    once = row_format.decode(row_format.encode(rows_TW), torch.float32)
    twice = row_format.decode(row_format.encode(once), torch.float32)
    if row_format.name == "fp8":  # amax / 448 * 448 may miss amax by one rounding
        torch.testing.assert_close(twice, once, rtol=2e-7, atol=0)
    else:
        assert torch.equal(twice, once)


@pytest.mark.parametrize("row_format", formats())
def test_quantize_then_gather_is_gather_then_quantize(row_format: Any) -> None:
    rows_TW = torch.randn(30, 40, generator=make_generator(4))
    order = torch.randperm(30, generator=make_generator(5))
    assert torch.equal(row_format.encode(rows_TW)[order], row_format.encode(rows_TW[order]))
    parts = [row_format.encode(part) for part in rows_TW.split([1, 0, 12, 17])]
    assert torch.equal(torch.cat(parts), row_format.encode(rows_TW))


@pytest.mark.parametrize("row_format", formats())
def test_unaligned_and_strided_bytes(row_format: Any) -> None:
    rows_TW = torch.randn(6, 40, generator=make_generator(6))
    encoded = row_format.encode(rows_TW)
    wide = torch.zeros(6, row_format.row_bytes + 5, dtype=torch.uint8)
    wide[:, 3:-2] = encoded
    assert torch.equal(row_format.decode(wide[:, 3:-2], torch.float32), row_format.decode(encoded, torch.float32))
    columns = rows_TW.T.contiguous().T
    assert torch.equal(row_format.encode(columns), encoded)
    assert row_format.encode(rows_TW[:0]).shape == (0, row_format.row_bytes)
    assert row_format.decode(encoded[:0], torch.float32).shape == (0, 40)


def test_round_up_loses_less_than_floor() -> None:
    rows_TW = torch.randn(2000, 128, generator=make_generator(7))
    errors = {}
    for rounding in ("up", "floor"):
        row_format = Mxfp8Rows(128, rounding)
        decoded = row_format.decode(row_format.encode(rows_TW), torch.float32)
        errors[rounding] = float((decoded - rows_TW).square().mean().sqrt())
        largest = float(
            ((decoded - rows_TW).abs() / rows_TW.view(-1, 4, 32).abs().amax(2).repeat_interleave(32, 1)).max()
        )
        assert (largest > 0.1) == (rounding == "floor")  # floor cuts up to an eighth off a group's largest number
    assert errors["up"] == pytest.approx(0.0266, abs=2e-4)
    assert errors["floor"] == pytest.approx(0.0293, abs=2e-4)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FORMAT_NAMES.items() for name in names])
def test_make_format(kind: Any, name: str) -> None:
    row_format = make_format(kind, name, width=576, rope_dim=64)
    assert (row_format.name, row_format.width) == (name, 576)
    rows_TW = torch.randn(2, 576, generator=make_generator(8))
    assert row_format.encode(rows_TW).shape == (2, row_format.row_bytes)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="cache rows are one of latent, index_key"):
        make_format("state", "bf16", width=4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="use one of fp32, bf16, fp8"):
        make_format("latent", "mxfp8", width=4)
    with pytest.raises(ValueError, match="latent_rank=0"):
        make_format("latent", "fp8", width=4, rope_dim=4)
    with pytest.raises(ValueError, match=r"encode takes \[T, 8\]"):
        Fp32Rows(8).encode(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"decode takes \[T, 9\]"):
        Mxfp8Rows(8).decode(torch.zeros(2, 8, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="round 'up' or by 'floor'"):
        Mxfp8Rows(8, "even")  # pyright: ignore[reportArgumentType]


def special_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern, all magnitudes, ties, subnormal groups, zeros, and rows of one number apart from the rest."""
    generator = make_generator(12)
    shape = (400, width)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    powers = torch.randint(-140, 128, (400, 1), generator=generator).float().exp2()
    ties = (
        torch.randint(-512, 512, shape, generator=generator) / torch.randint(1, 9, (400, 1), generator=generator).exp2()
    )
    tiny = torch.randn(shape, generator=generator) * 2.0**-140
    zeros = torch.zeros(40, width)
    zeros[::2] = -0.0
    rows = [bits, torch.randn(shape, generator=generator) * powers, ties, tiny, zeros]
    for number in (math.nan, math.inf, -math.inf, FP32_MAX, 1.75, 1.7500001, 448.0, 449.0, 2.0**-149):
        alone = torch.zeros(2, width)
        alone[0, width // 2] = number
        alone[1] = number
        rows.append(alone)
    return torch.cat(rows).to(dtype)


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("codec", compiled_backends("quant"))
@pytest.mark.parametrize("row_format", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_codecs_have_the_bits_of_the_plain_ones(codec: Any, row_format: Any, dtype: torch.dtype) -> None:
    rows_TW = special_rows(row_format.width, dtype)
    expected = row_format.encode_plain(rows_TW)
    if isinstance(row_format, Fp8LatentRows):
        rank = row_format.latent_rank
        actual = codec.encode_fp8(rows_TW, latent_rank=rank)
        tail = row_format.row_bytes - 2 * row_format.rope_dim
        assert torch.equal(actual[:, :tail], expected[:, :tail])
        if row_format.rope_dim:  # the tail is bf16, whose NaN has many bit patterns
            tails = [x[:, tail:].contiguous().view(torch.bfloat16) for x in (actual, expected)]
            assert_same_numbers(*tails)
        decode = partial(codec.decode_fp8, expected, width=row_format.width, latent_rank=rank)
    else:
        actual = codec.encode_mxfp8(rows_TW, rounds_up=row_format.rounding == "up")
        assert torch.equal(actual, expected)
        decode = partial(codec.decode_mxfp8, expected, width=row_format.width)
    for to in (torch.float32, torch.bfloat16):
        assert_same_numbers(decode(dtype=to), row_format.decode_plain(expected, to))


@pytest.mark.parametrize("codec", compiled_backends("quant"))
def test_compiled_decoders_read_every_code_under_every_scale(codec: Any) -> None:
    codes_TW = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales_TN = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    bytes_TB = torch.cat([codes_TW, scales_TN], dim=1)
    for dtype in (torch.float32, torch.bfloat16):
        actual = codec.decode_mxfp8(bytes_TB, width=256, dtype=dtype)
        assert_same_numbers(actual, Mxfp8Rows(256).decode_plain(bytes_TB, dtype))


@pytest.mark.parametrize("codec", compiled_backends("quant"))
def test_compiled_codecs_take_strided_and_empty_rows(codec: Any) -> None:
    wide_TW = torch.randn(9, 100, generator=make_generator(13))
    row_format = Mxfp8Rows(40)
    encoded = codec.encode_mxfp8(wide_TW[:, 7:47], rounds_up=True)
    assert torch.equal(encoded, row_format.encode_plain(wide_TW[:, 7:47]))
    padded = torch.zeros(9, 60, dtype=torch.uint8)
    padded[:, 3:45] = encoded
    decoded = codec.decode_mxfp8(padded[:, 3:45], width=40, dtype=torch.float32)
    assert torch.equal(decoded, row_format.decode_plain(encoded, torch.float32))
    assert codec.encode_mxfp8(wide_TW[:0, :40], rounds_up=False).shape == (0, 42)
