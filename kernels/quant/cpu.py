"""Row formats as the compiled kernels see them, and the codecs of the quantized ones (cpu_src/quant.cpp).

Legend: T rows, W numbers a row, B bytes a row.
"""

from __future__ import annotations

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops, refusal
from longprefill.kernels.paged import PagedRows, RowFormat

CODES = {"fp32": 0, "bf16": 1, "fp8": 2, "mxfp8": 3, "mxfp8_floor": 3}
"""`RowFormat` of native/include/longprefill/rows.h by name; both MXFP8 roundings are read alike."""


def format_code(row_format: RowFormat) -> int | None:
    """The number that the compiled kernels know a format by; None for one that they cannot read."""
    return CODES.get(row_format.name)


def page_arguments(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(pages, table int64, number of rows) as the compiled kernels take them."""
    return rows.pages_NPB, torch.tensor(rows.table, dtype=torch.int64), rows.num_rows


def encodes(rows_TW: torch.Tensor) -> bool:
    """Whether the compiled encoders take these rows: fp32 or bf16 on a CPU that has the library."""
    return rows_TW.dtype in COMPILED_DTYPES and refusal(rows_TW.device.type) is None


def decodes(bytes_TB: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled decoders write this dtype for these bytes."""
    return dtype in COMPILED_DTYPES and refusal(bytes_TB.device.type) is None


def encode_mxfp8(rows_TW: torch.Tensor, *, rounds_up: bool) -> torch.Tensor:
    """uint8 [T, W + groups] of fp32 or bf16 rows: bit for bit `Mxfp8Rows.encode`."""
    return ops().quant_encode_mxfp8(_rows_contiguous(rows_TW), rounds_up)


def encode_fp8(rows_TW: torch.Tensor, *, latent_rank: int) -> torch.Tensor:
    """uint8 [T, R + 4 tiles + 2 rope] of fp32 or bf16 rows: bit for bit `Fp8LatentRows.encode`, but for
    the bits of a NaN in the rope part."""
    return ops().quant_encode_fp8(_rows_contiguous(rows_TW), latent_rank)


def decode_mxfp8(bytes_TB: torch.Tensor, *, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, W] fp32 or bf16: bit for bit `Mxfp8Rows.decode`."""
    is_bf16 = dtype == torch.bfloat16
    return ops().quant_decode(_rows_contiguous(bytes_TB), CODES["mxfp8"], width, width, is_bf16)


def decode_fp8(bytes_TB: torch.Tensor, *, width: int, latent_rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, R + rope] fp32 or bf16: bit for bit `Fp8LatentRows.decode`."""
    is_bf16 = dtype == torch.bfloat16
    return ops().quant_decode(_rows_contiguous(bytes_TB), CODES["fp8"], width, latent_rank, is_bf16)


def _rows_contiguous(x_TN: torch.Tensor) -> torch.Tensor:
    return x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
