"""Cache rows in pages: the kernels' view of one job's cache in one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


class RowFormat(ABC):
    """How one cache row (a vector of `width` numbers) lies in `row_bytes` bytes. Instances: kernels/quant."""

    name: str
    width: int
    row_bytes: int

    @abstractmethod
    def encode(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """uint8 [T, row_bytes]."""

    @abstractmethod
    def decode(self, bytes_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, width] in `dtype`, the numbers that every kernel must read."""


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Rows [0, num_rows) of one job in one layer, spread over physical pages of a pool."""

    pages_NPB: torch.Tensor
    """uint8 [pool pages, tokens a page, row bytes]."""
    table: tuple[int, ...]
    """Physical page of each logical page."""
    num_rows: int
    format: RowFormat

    def __post_init__(self) -> None:
        if self.pages_NPB.ndim != 3 or self.pages_NPB.shape[2] != self.format.row_bytes:
            raise ValueError(
                f"pages of shape {list(self.pages_NPB.shape)} for {self.format.name} rows of {self.format.width} "
                f"numbers: must be [pages, rows a page, {self.format.row_bytes}]"
            )

    @property
    def page_rows(self) -> int:
        return self.pages_NPB.shape[1]

    def read_bytes(self, start: int, end: int) -> torch.Tensor:
        """uint8 [end - start, row_bytes]: a view where the pages are consecutive in the pool, else a copy."""
        if not 0 <= start <= end <= self.num_rows:
            raise IndexError(f"rows [{start}, {end}) are outside [0, {self.num_rows})")
        size = self.page_rows
        first, last = start // size, -(-end // size)
        physical = self.table[first:last]
        if not physical:
            return self.pages_NPB.new_empty(0, self.format.row_bytes)
        if min(physical) < 0 or max(physical) >= len(self.pages_NPB):
            raise IndexError(
                f"page table holds {min(physical)} to {max(physical)}: "
                f"the pool has pages 0 to {len(self.pages_NPB) - 1}"
            )
        if physical == tuple(range(physical[0], physical[0] + len(physical))):
            pages = self.pages_NPB[physical[0] : physical[0] + len(physical)]
        else:
            pages = self.pages_NPB[torch.tensor(physical, device=self.pages_NPB.device)]
        flat = pages.reshape(-1, self.format.row_bytes)
        return flat[start - first * size : end - first * size]

    def read(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """[end - start, width] dequantized."""
        return self.format.decode(self.read_bytes(start, end), dtype)

    def gather(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows at any positions ([...] int, all within [0, num_rows)): [..., width] dequantized."""
        table = torch.tensor(self.table, device=self.pages_NPB.device)
        flat_index = table[indices // self.page_rows] * self.page_rows + indices % self.page_rows
        flat = self.pages_NPB.reshape(-1, self.format.row_bytes)
        picked = flat.index_select(0, flat_index.reshape(-1))
        return self.format.decode(picked, dtype).reshape(*indices.shape, self.format.width)
