"""Row formats as the compiled kernels see them, and the codecs of the quantized ones (cpu_src/quant.cpp).

Legend: T rows, W numbers a row, B bytes a row.
"""

from __future__ import annotations

import torch

from longprefill.kernels.paged import PagedRows, RowFormat

CODES = {"fp32": 0, "bf16": 1, "fp8": 2, "mxfp8": 3, "mxfp8_floor": 3}
"""`RowFormat` of native/include/longprefill/rows.h by name; both MXFP8 roundings are read alike."""


def format_code(row_format: RowFormat) -> int | None:
    """The number that the compiled kernels know a format by; None for one that they cannot read."""
    return CODES.get(row_format.name)


def page_arguments(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(pages, table int64, number of rows) as the compiled kernels take them."""
    return rows.pages_NPB, torch.tensor(rows.table, dtype=torch.int64), rows.num_rows
