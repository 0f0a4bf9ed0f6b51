"""The cache formats written down a second time, from their definitions alone: what a page must hold for given rows.

`kernels/quant` encodes and decodes for the engine, in torch and in C++. `align` must not ask the same code whether it
is right, so here is the slow way: a table of all E4M3 magnitudes and a search. Sources: OCP OFP8 (E4M3), OCP MX v1.0,
6.3 (groups of 32, E8M0), and the latent row of DeepSeek-V3.2's FP8 cache (tiles of 128, fp32 scales, k_R in bf16).

    N rows, W numbers a row, C of them in E4M3, R the rest, B bytes a row, G groups or tiles of a row, S numbers of one,
    M magnitudes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_LARGEST = 448.0
MX_GROUP = 32
LATENT_TILE = 128
SMALLEST_NORMAL = 2.0**-126
SCALE_TOLERANCE = 1e-6
"""Relative, of fp32 scales and of products with them: the last bit of an operation."""
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class CodeDifference:
    """Stored rows beside those of the definition."""

    share: float = 0.0
    """Of the codes that are not the right ones."""
    worst_steps: int = 0
    """Between a stored code and the right one, in the order of the numbers that codes stand for."""
    problem: str = ""
    """What is beyond rounding: a code more than one step off, a scale, a size, a row that is read back as something
    else."""


def compare_codes(
    name: str, bytes_NB: torch.Tensor, rows_NW: torch.Tensor, read_NW: torch.Tensor, *, rope_dim: int
) -> CodeDifference:
    """Stored rows, uint8, beside the fp32 rows that they were made of; `read_NW` is what the engine reads back, fp32.
    `name` is the format that was asked for: fp32, bf16, mxfp8 or fp8 (whose last `rope_dim` numbers are bf16)."""
    num_rows, width = rows_NW.shape
    num_coded = width - (rope_dim if name == "fp8" else 0)
    num_scales = {"fp8": -(-num_coded // LATENT_TILE), "mxfp8": -(-num_coded // MX_GROUP)}.get(name, 0)
    size = {"fp32": 4 * width, "bf16": 2 * width, "mxfp8": num_coded + num_scales}.get(
        name, num_coded + 4 * num_scales + 2 * rope_dim
    )
    if tuple(bytes_NB.shape) != (num_rows, size):
        return CodeDifference(problem=f"{bytes_NB.shape[1]} bytes a row instead of {size} in {name}")
    if name in PLAIN:
        right_NW = rows_NW.to(PLAIN[name])
        stored_NW = _numbers(bytes_NB, PLAIN[name])
        return _difference(_ordered_plain(stored_NW), _ordered_plain(right_NW), stored_NW.double(), read_NW, "")
    group = LATENT_TILE if name == "fp8" else MX_GROUP
    groups_NGS = _grouped(rows_NW[:, :num_coded].double(), group)
    largest_NG = groups_NGS.abs().amax(dim=-1)
    scale_NG = (_tile_scales if name == "fp8" else _mx_scales)(largest_NG)
    right_NC = _e4m3_codes((groups_NGS / scale_NG[..., None]).float().double()).flatten(1)[:, :num_coded]
    coded_NC = bytes_NB[:, :num_coded]
    scale_bytes, rest = bytes_NB[:, num_coded:].tensor_split([(4 if name == "fp8" else 1) * num_scales], dim=1)
    stored_scale_NG = _numbers(scale_bytes, torch.float32).double() if name == "fp8" else _powers_of_two(scale_bytes)
    stored_NR, right_NR = _numbers(rest, torch.bfloat16), rows_NW[:, num_coded:].to(torch.bfloat16)
    meant_NC = _e4m3_numbers(coded_NC) * stored_scale_NG.repeat_interleave(group, dim=1)[:, :num_coded]
    return _difference(
        torch.cat((_ordered(coded_NC.long(), 0x7F), _ordered_plain(stored_NR)), dim=1),
        torch.cat((_ordered(right_NC.long(), 0x7F), _ordered_plain(right_NR)), dim=1),
        torch.cat((meant_NC, stored_NR.double()), dim=1),
        read_NW,
        _scale_problem(stored_scale_NG, scale_NG),
    )


def _magnitudes() -> torch.Tensor:
    """fp64 [127] of the codes 0 to 126: 3 bits of mantissa, exponents from -6 with subnormals below."""
    code_M = torch.arange(127)
    exponent_M, mantissa_M = code_M >> 3, (code_M & 7).double()
    return torch.where(
        exponent_M == 0,
        torch.ldexp(mantissa_M, torch.tensor(-9)),
        torch.ldexp(8 + mantissa_M, exponent_M - 10),
    )


def _e4m3_codes(scaled: torch.Tensor) -> torch.Tensor:
    """uint8: the nearest magnitude, between two the even code; beyond the largest the largest; NaN for NaN."""
    magnitude_M = _magnitudes()
    middle_M = (magnitude_M[1:] + magnitude_M[:-1]) / 2
    size = scaled.abs().clamp(max=E4M3_LARGEST).nan_to_num(0.0)
    below, above = torch.searchsorted(middle_M, size), torch.searchsorted(middle_M, size, right=True)
    code = torch.where(below % 2 == 0, below, above)
    code = torch.where(torch.signbit(scaled), code + 0x80, code)
    return torch.where(scaled.isnan(), 0x7F, code).to(torch.uint8)


def _e4m3_numbers(codes: torch.Tensor) -> torch.Tensor:
    """fp64; codes 0x7F and 0xFF are NaN."""
    magnitude_M = torch.cat((_magnitudes(), torch.tensor([torch.nan], dtype=torch.float64)))
    magnitude = magnitude_M[codes.long() & 0x7F]
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def _tile_scales(largest_NG: torch.Tensor) -> torch.Tensor:
    """The largest number becomes the largest code; no scale is subnormal; a tile that is not finite has none."""
    scale_NG = (largest_NG / E4M3_LARGEST).float().double().clamp(min=SMALLEST_NORMAL)
    return torch.where(torch.isfinite(largest_NG), scale_NG, torch.nan)


def _mx_scales(largest_NG: torch.Tensor) -> torch.Tensor:
    """The smallest power of two from 2^-127 on with which the largest number does not exceed the largest code."""
    fraction_NG, exponent_NG = torch.frexp(largest_NG.nan_to_num(0.0, posinf=0.0))
    # largest = fraction 2^exponent, fraction in [1/2, 1), and 448 = 7/8 2^9
    power_NG = (exponent_NG - 9 + (fraction_NG > 0.875).int()).clamp(min=-127)
    power_NG = torch.where(largest_NG == 0, -127, power_NG)
    scale_NG = torch.ldexp(torch.ones_like(largest_NG), power_NG)
    return torch.where(torch.isfinite(largest_NG), scale_NG, torch.nan)


def _powers_of_two(bytes_NG: torch.Tensor) -> torch.Tensor:
    """E8M0: 2^(byte - 127), 255 is NaN."""
    scale_NG = torch.ldexp(torch.ones(bytes_NG.shape, dtype=torch.float64), bytes_NG.int() - 127)
    return torch.where(bytes_NG == 0xFF, torch.nan, scale_NG)


def _scale_problem(stored_NG: torch.Tensor, right_NG: torch.Tensor) -> str:
    differs_NG = ~torch.isclose(stored_NG, right_NG, rtol=SCALE_TOLERANCE, atol=0.0, equal_nan=True)
    if not bool(differs_NG.any()):
        return ""
    row, group = differs_NG.nonzero()[0].tolist()
    return (
        f"{int(differs_NG.sum())} of {differs_NG.numel()} scales differ, the first in row {row}, group {group}: "
        f"{float(stored_NG[row, group]):.3e} instead of {float(right_NG[row, group]):.3e}"
    )


def _difference(
    stored: torch.Tensor, right: torch.Tensor, meant_NW: torch.Tensor, read_NW: torch.Tensor, problem: str
) -> CodeDifference:
    """Codes as integers in the order of their numbers, and what is read back beside what is stored."""
    steps = (stored - right).abs()
    num_differing, worst = int((steps > 0).sum()), int(steps.max()) if steps.numel() else 0
    if not problem and worst > 1:
        problem = f"{num_differing} of {steps.numel()} codes differ, by up to {worst} steps"
    is_read = torch.isclose(read_NW, meant_NW.float(), rtol=SCALE_TOLERANCE, atol=0.0, equal_nan=True)
    if not problem and not bool(is_read.all()):
        problem = f"{int((~is_read).sum())} of {is_read.numel()} numbers are read otherwise than they are stored"
    return CodeDifference(share=num_differing / max(steps.numel(), 1), worst_steps=worst, problem=problem)


def _ordered_plain(numbers: torch.Tensor) -> torch.Tensor:
    """fp32 or bf16 as int64 in the order of the numbers, both zeros 0, every NaN the same."""
    bits = 8 * numbers.dtype.itemsize
    word = {16: torch.int16, 32: torch.int32}[bits]
    ordered = _ordered(numbers.contiguous().view(word).long() & ((1 << bits) - 1), (1 << (bits - 1)) - 1)
    return ordered.masked_fill(numbers.isnan(), 1 << bits)


def _ordered(bits: torch.Tensor, magnitude_mask: int) -> torch.Tensor:
    magnitude = bits & magnitude_mask
    return torch.where(bits > magnitude_mask, -magnitude, magnitude)


def _numbers(bytes_NB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes, wherever they lie, as numbers of `dtype`."""
    copy_B = bytes_NB.clone(memory_format=torch.contiguous_format).flatten()
    return copy_B.view(dtype).view(bytes_NB.shape[0], bytes_NB.shape[1] // dtype.itemsize)


def _grouped(rows_NW: torch.Tensor, size: int) -> torch.Tensor:
    """[N, G, S], the last group filled with zeros, which change no scale."""
    missing = -rows_NW.shape[1] % size
    return torch.nn.functional.pad(rows_NW, (0, missing)).unflatten(1, (-1, size))
