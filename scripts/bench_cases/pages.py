"""Rows in pages that lie scattered over a pool, as a cache holds them after some hours."""

from __future__ import annotations

import torch

from longprefill.kernels.paged import PagedRows, RowFormat

PAGE_ROWS = 64


def scattered(rows_TW: torch.Tensor, row_format: RowFormat, seed: int) -> PagedRows:
    """The encoded rows in a pool of exactly their pages, in random order."""
    num_pages = -(-len(rows_TW) // PAGE_ROWS)
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    pool_NPB = torch.zeros(num_pages, PAGE_ROWS, row_format.row_bytes, dtype=torch.uint8)
    for page, physical in enumerate(table.tolist()):
        encoded = row_format.encode(rows_TW[page * PAGE_ROWS : (page + 1) * PAGE_ROWS])
        pool_NPB[physical, : len(encoded)] = encoded
    return PagedRows(pages_NPB=pool_NPB, table=tuple(table.tolist()), num_rows=len(rows_TW), format=row_format)
