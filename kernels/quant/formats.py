"""Row formats of the caches: how a vector of numbers lies in bytes, and which numbers come back.

The compiled codecs (cpu.py) and the torch operators here give the same bits, but for sign and payload of a NaN in the
bf16 part of a latent row; the faster one that serves is taken.

Legend: T rows, W numbers a row, B bytes a row, N tiles or groups of a row, S numbers of a tile or group, R latent rank.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from longprefill.kernels.paged import RowFormat

from . import cpu

E4M3_MAX = 448.0
"""Largest finite E4M3 (fn) number, 1.75 * 2^8."""
E4M3_NAN = 0x7F
LATENT_TILE = 128
"""Numbers that share one fp32 scale in the FP8 latent."""
SMALLEST_SCALE = 2.0**-126
"""Floor of an fp32 tile scale: the smallest normal number, so that a zero tile gets codes 0."""
MX_GROUP = 32
"""Numbers that share one E8M0 scale (OCP MX v1.0, 6.3)."""
E8M0_NAN = 0xFF

DECODE_BLOCK = 1 << 17
"""Numbers decoded at a time: 0.5 MiB of fp32, which stay in a core's level-2 cache until they are scaled and stored."""


class Fp32Rows(RowFormat):
    """fp32 as it is: 4 W bytes. Every bit pattern survives, NaN and -0 too. fp64 rows are rounded to fp32."""

    def __init__(self, width: int) -> None:
        self.name = "fp32"
        self.width = check_positive("width", width)
        self.row_bytes = 4 * width

    def encode(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """uint8 [T, 4 W]. Raises ValueError for rows of another width."""
        return _as_bytes(_checked(self, rows_TW).to(torch.float32))

    def decode(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, W] in `dtype`; a view of the bytes when that is fp32 and their alignment allows it."""
        return _view_as(bytes_TB, torch.float32).to(dtype)


class Bf16Rows(RowFormat):
    """bf16, rounded to nearest even: 2 W bytes. NaN stays NaN, a magnitude above the largest bf16 becomes inf."""

    def __init__(self, width: int) -> None:
        self.name = "bf16"
        self.width = check_positive("width", width)
        self.row_bytes = 2 * width

    def encode(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """uint8 [T, 2 W]. Raises ValueError for rows of another width."""
        return _as_bytes(_checked(self, rows_TW).to(torch.bfloat16))

    def decode(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, W] in `dtype`; a view of the bytes when that is bf16 and their alignment allows it."""
        return _view_as(bytes_TB, torch.bfloat16).to(dtype)


class Fp8LatentRows(RowFormat):
    """[c_KV in E4M3 | one fp32 scale a tile of 128 | k_R in bf16], interleaved per token: 656 bytes at 512 + 64.

    scale = max(amax / 448, 2^-126), code = E4M3(clamp(x / scale, -448, 448)), round to nearest even; the number that is
    read is fp32(code * scale), cast. The last tile may be shorter than 128. -0 keeps its sign. A tile that holds NaN or
    inf becomes all NaN (codes 0x7F, scale NaN): it is never silently finite. k_R is bf16, with bf16's own NaN and inf.
    """

    def __init__(self, latent_rank: int, rope_dim: int) -> None:
        self.name = "fp8"
        self.latent_rank = check_positive("latent_rank", latent_rank)
        if rope_dim < 0:
            raise ValueError(f"rope_dim={rope_dim}: 0 or more numbers of a latent row stay bf16")
        self.rope_dim = rope_dim
        self.width = latent_rank + rope_dim
        self.num_tiles = -(-latent_rank // LATENT_TILE)
        self.row_bytes = latent_rank + 4 * self.num_tiles + 2 * rope_dim

    def encode(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """uint8 [T, R + 4 tiles + 2 rope]. Raises ValueError for rows of another width."""
        if cpu.encodes(_checked(self, rows_TW)):
            return cpu.encode_fp8(rows_TW, latent_rank=self.latent_rank)
        return self.encode_plain(rows_TW)

    def encode_plain(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """`encode` in torch operators, on any device."""
        rows_TW = rows_TW.to(torch.float32)
        tiles_TNS = _grouped(rows_TW[:, : self.latent_rank], LATENT_TILE)
        amax_TN = tiles_TNS.abs().amax(-1)
        scale_TN = (amax_TN / E4M3_MAX).clamp(min=SMALLEST_SCALE)
        is_broken_TN = ~torch.isfinite(amax_TN)
        scale_TN = scale_TN.masked_fill(is_broken_TN, torch.nan)
        codes_TNS = _e4m3_codes(tiles_TNS / scale_TN[..., None], is_broken_TN)
        codes_TR = codes_TNS.flatten(1)[:, : self.latent_rank]
        rope_TP = rows_TW[:, self.latent_rank :].to(torch.bfloat16)
        return torch.cat([codes_TR, _as_bytes(scale_TN), _as_bytes(rope_TP)], dim=1)

    def decode(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, R + rope] in `dtype`. Raises ValueError for rows of another byte length."""
        _check_bytes(self, bytes_TB)
        if cpu.decodes(bytes_TB, dtype):
            return cpu.decode_fp8(bytes_TB, width=self.width, latent_rank=self.latent_rank, dtype=dtype)
        return self.decode_plain(bytes_TB, dtype)

    def decode_plain(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`decode` in torch operators, on any device."""
        scale_end = self.latent_rank + 4 * self.num_tiles
        scale_TN = _view_as(bytes_TB[:, self.latent_rank : scale_end], torch.float32)
        rope_TP = _view_as(bytes_TB[:, scale_end:], torch.bfloat16)
        rows_TW = torch.empty(len(bytes_TB), self.width, dtype=dtype, device=bytes_TB.device)
        _scaled_codes(bytes_TB[:, : self.latent_rank], scale_TN, LATENT_TILE, out_TW=rows_TW[:, : self.latent_rank])
        rows_TW[:, self.latent_rank :] = rope_TP
        return rows_TW


class Mxfp8Rows(RowFormat):
    """[E4M3 codes | one E8M0 scale a group of 32]: 132 bytes at 128 (OCP MX v1.0, 6.3). The last group may be shorter.

    The scale's exponent comes from the integer bits of amax = 1.m * 2^E: `rounding` "up" takes the smallest power of
    two that saturates nothing, E - 8 + [m > .75]; "floor" (OCP's text) takes E - 8 and clamps to +-448. Exponents below
    -127 become -127 (byte 0), so a zero group has byte 0 and codes 0. -0 keeps its sign. A group that holds NaN or inf
    becomes all NaN (byte 255, codes 0x7F). Codes times scales are exact in fp32; only magnitudes from 1.9375 * 2^127
    on, which "up" rounds to 2^128, come back as inf.
    """

    def __init__(self, width: int, rounding: Literal["up", "floor"] = "up") -> None:
        if rounding not in ("up", "floor"):
            raise ValueError(f"rounding={rounding!r}: MXFP8 scales round 'up' or by 'floor'")
        self.name = "mxfp8" if rounding == "up" else "mxfp8_floor"
        self.width = check_positive("width", width)
        self.rounding = rounding
        self.num_groups = -(-width // MX_GROUP)
        self.row_bytes = width + self.num_groups

    def encode(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """uint8 [T, W + groups]. Raises ValueError for rows of another width."""
        if cpu.encodes(_checked(self, rows_TW)):
            return cpu.encode_mxfp8(rows_TW, rounds_up=self.rounding == "up")
        return self.encode_plain(rows_TW)

    def encode_plain(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """`encode` in torch operators, on any device."""
        rows_TW = rows_TW.to(torch.float32)
        groups_TNS = _grouped(rows_TW, MX_GROUP)
        amax_TN = groups_TNS.abs().amax(-1)
        bits_TN = amax_TN.contiguous().view(torch.int32)
        exponent_TN = (bits_TN >> 23) - 8
        if self.rounding == "up":
            exponent_TN = exponent_TN + ((bits_TN & 0x7FFFFF) > 0x600000)
        exponent_TN = exponent_TN.clamp(min=0)
        # 2^(127 - exponent): the reciprocal is a normal number for every exponent that occurs, so the product is exact.
        reciprocal_TN = ((254 - exponent_TN) << 23).to(torch.int32).view(torch.float32)
        is_broken_TN = ~torch.isfinite(amax_TN)
        codes_TNS = _e4m3_codes(groups_TNS * reciprocal_TN[..., None], is_broken_TN)
        scale_TN = exponent_TN.masked_fill(is_broken_TN, E8M0_NAN).to(torch.uint8)
        return torch.cat([codes_TNS.flatten(1)[:, : self.width], scale_TN], dim=1)

    def decode(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, W] in `dtype`. Raises ValueError for rows of another byte length."""
        _check_bytes(self, bytes_TB)
        if cpu.decodes(bytes_TB, dtype):
            return cpu.decode_mxfp8(bytes_TB, width=self.width, dtype=dtype)
        return self.decode_plain(bytes_TB, dtype)

    def decode_plain(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`decode` in torch operators, on any device."""
        scale_TN = bytes_TB[:, self.width :].contiguous().view(torch.float8_e8m0fnu).to(torch.float32)
        rows_TW = torch.empty(len(bytes_TB), self.width, dtype=dtype, device=bytes_TB.device)
        _scaled_codes(bytes_TB[:, : self.width], scale_TN, MX_GROUP, out_TW=rows_TW)
        return rows_TW


FORMAT_NAMES: dict[str, tuple[str, ...]] = {
    "latent": ("fp32", "bf16", "fp8"),
    "index_key": ("fp32", "bf16", "mxfp8", "mxfp8_floor"),
}
"""The formats of each kind of cache row."""


def make_format(kind: Literal["latent", "index_key"], name: str, *, width: int, rope_dim: int = 0) -> RowFormat:
    """The row format called `name` for rows of `width` numbers; of a latent row the last `rope_dim` are k_R.

    Raises:
        ValueError: unknown kind or name; the message lists what is allowed.
    """
    if kind not in FORMAT_NAMES:
        raise ValueError(f"kind={kind!r}: cache rows are one of {', '.join(FORMAT_NAMES)}")
    if name not in FORMAT_NAMES[kind]:
        raise ValueError(f"format {name!r} for {kind} rows: use one of {', '.join(FORMAT_NAMES[kind])}")
    if name == "fp32":
        return Fp32Rows(width)
    if name == "bf16":
        return Bf16Rows(width)
    if name == "fp8":
        return Fp8LatentRows(width - rope_dim, rope_dim)
    return Mxfp8Rows(width, "up" if name == "mxfp8" else "floor")


def check_positive(name: str, value: int) -> int:
    """`value`, or ValueError when it is not 1 or more."""
    if value < 1:
        raise ValueError(f"{name}={value}: a cache row has at least one number")
    return value


def _checked(row_format: RowFormat, rows_TW: torch.Tensor) -> torch.Tensor:
    if rows_TW.ndim != 2 or rows_TW.shape[1] != row_format.width:
        raise ValueError(
            f"rows of shape {tuple(rows_TW.shape)} for format {row_format.name}: encode takes [T, {row_format.width}]"
        )
    return rows_TW


def _check_bytes(row_format: RowFormat, bytes_TB: torch.Tensor) -> None:
    if bytes_TB.ndim != 2 or bytes_TB.shape[1] != row_format.row_bytes:
        raise ValueError(
            f"bytes of shape {tuple(bytes_TB.shape)} for format {row_format.name}: "
            f"decode takes [T, {row_format.row_bytes}]"
        )


def _as_bytes(rows_TW: torch.Tensor) -> torch.Tensor:
    if rows_TW.shape[1] == 0:  # however strided, it counts as contiguous
        return rows_TW.new_empty(rows_TW.shape, dtype=torch.uint8)
    return rows_TW.contiguous().view(torch.uint8)


def _view_as(bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes read as numbers of `dtype`: a view where offset and strides are aligned to it, else of a copy."""
    if bytes_TB.shape[1] == 0:
        return bytes_TB.new_empty(bytes_TB.shape, dtype=dtype)
    size = dtype.itemsize
    aligned = bytes_TB.stride(-1) == 1 and bytes_TB.storage_offset() % size == 0 and bytes_TB.stride(0) % size == 0
    return (bytes_TB if aligned else bytes_TB.clone(memory_format=torch.contiguous_format)).view(dtype)


def _grouped(rows_TW: torch.Tensor, size: int) -> torch.Tensor:
    """[T, N, size], the last group filled up with zeros, which change no amax."""
    num_groups = -(-rows_TW.shape[1] // size)
    missing = num_groups * size - rows_TW.shape[1]
    return functional.pad(rows_TW, (0, missing)).reshape(len(rows_TW), num_groups, size)


def _e4m3_codes(scaled_TNS: torch.Tensor, is_broken_TN: torch.Tensor) -> torch.Tensor:
    """uint8 codes, round to nearest even. Clamped first: torch before 2.12 turned what lies above 464 into NaN."""
    codes_TNS = scaled_TNS.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes_TNS.masked_fill(is_broken_TN[..., None], E4M3_NAN)


def _scaled_codes(codes_TW: torch.Tensor, scale_TN: torch.Tensor, size: int, *, out_TW: torch.Tensor) -> None:
    """Writes fp32(code * scale) into `out_TW`, group by group of `size` columns, in blocks of rows that stay in cache.

    A table look-up takes a quarter of the time of torch's own cast from E4M3 on a CPU, and is bit for bit the same.
    """
    codes = torch.arange(256, dtype=torch.uint8, device=codes_TW.device)
    table = codes.view(torch.float8_e4m3fn).to(torch.float32)
    width, num_groups = codes_TW.shape[1], scale_TN.shape[1]
    num_rows = max(1, DECODE_BLOCK // width)
    for begin in range(0, len(codes_TW), num_rows):
        rows = slice(begin, begin + num_rows)
        values_TW = table.index_select(0, codes_TW[rows].reshape(-1).to(torch.int32)).view(-1, width)
        if width == num_groups * size:
            values_TNS = values_TW.view(-1, num_groups, size)
            out_TW[rows] = values_TNS.mul_(scale_TN[rows, :, None]).view(-1, width)
        else:
            out_TW[rows] = values_TW.mul_(scale_TN[rows].repeat_interleave(size, dim=1)[:, :width])
