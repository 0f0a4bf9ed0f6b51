"""A rank's paged cache: one pool of pages a layer and kind, all inside one buffer that its holder owns.

    kind "latent"     [c (r) | k_R (d_r)]     64 rows a page
    kind "index_key"  indexer key (or pooled) 64 / pool rows a page

The buffer is a flat uint8 tensor (shared memory on a CPU) that outlives the process group; a `CachePool` is only a view
of it. Page tables come from the controller's `PageAllocator`, so ranks with replicated caches agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longprefill.kernels.paged import PagedRows, RowFormat
from longprefill.kernels.quant.formats import make_format
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.config import MlaConfig, ModelConfig

Kind = Literal["latent", "index_key"]
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormats:
    """Names of the row formats: latent in {fp32, bf16, fp8}, index key in {fp32, bf16, mxfp8}."""

    latent: str
    index_key: str

    def __post_init__(self) -> None:
        for kind, name, allowed in (
            ("latent", self.latent, ("fp32", "bf16", "fp8")),
            ("index", self.index_key, ("fp32", "bf16", "mxfp8")),
        ):
            if name not in allowed:
                raise UserError(f"--{kind}-format {name!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class CacheKind:
    """Geometry of one layer's pages of one kind."""

    layer: int
    kind: Kind
    format: RowFormat
    tokens_per_row: int

    @property
    def page_rows(self) -> int:
        return PAGE_TOKENS // self.tokens_per_row

    @property
    def page_bytes(self) -> int:
        return self.page_rows * self.format.row_bytes

    def num_rows(self, num_tokens: int) -> int:
        """Complete rows after `num_tokens` tokens (a pooled key exists once its last token does)."""
        return num_tokens // self.tokens_per_row


def cache_kinds(config: ModelConfig, formats: CacheFormats) -> tuple[CacheKind, ...]:
    """Every (layer, kind) that has pages, in layer order."""
    kinds: list[CacheKind] = []
    for layer, spec in enumerate(config.layers):
        mla = spec.mixer
        if not isinstance(mla, MlaConfig):
            continue
        latent = make_format("latent", formats.latent, width=mla.kv_lora_rank + mla.rope_dim, rope_dim=mla.rope_dim)
        kinds.append(CacheKind(layer=layer, kind="latent", format=latent, tokens_per_row=1))
        if mla.indexer is not None:
            key = make_format("index_key", formats.index_key, width=mla.indexer.head_dim)
            kinds.append(CacheKind(layer=layer, kind="index_key", format=key, tokens_per_row=mla.indexer.pool))
    return tuple(kinds)


def pool_bytes(kinds: tuple[CacheKind, ...], num_pages: int) -> int:
    """Size of the buffer that holds `num_pages` pages of every kind."""
    return sum(_aligned(kind.page_bytes * num_pages) for kind in kinds)


class PoolLayout:
    """Where pages lie in a buffer of `num_pages` pages of every kind: of this rank's pool or of another's, which may be
    larger or smaller."""

    def __init__(self, kinds: tuple[CacheKind, ...], num_pages: int) -> None:
        self._kinds: dict[tuple[int, str], tuple[int, int]] = {}
        offset = 0
        for kind in kinds:
            self._kinds[kind.layer, kind.kind] = offset, kind.page_bytes
            offset += _aligned(kind.page_bytes * num_pages)

    def byte_range(self, layer: int, kind: str, physical_page: int) -> tuple[int, int]:
        """(offset, length) of a page in the buffer: what a transport copies."""
        offset, page_bytes = self._kinds[layer, kind]
        return offset + physical_page * page_bytes, page_bytes


class CachePool:
    """Views of the holder's buffer, one [pages, rows a page, row bytes] tensor a (layer, kind).

    Raises:
        ValueError: the buffer is not uint8 or is smaller than `pool_bytes`.
    """

    def __init__(self, buffer: torch.Tensor, kinds: tuple[CacheKind, ...], num_pages: int) -> None:
        needed = pool_bytes(kinds, num_pages)
        if buffer.dtype != torch.uint8 or buffer.numel() < needed:
            raise ValueError(f"cache buffer {buffer.dtype} of {buffer.numel()} bytes: need uint8 of at least {needed}")
        self.buffer = buffer
        self.kinds = kinds
        self.num_pages = num_pages
        self.kind_of: dict[tuple[int, str], CacheKind] = {(kind.layer, kind.kind): kind for kind in kinds}
        self.layout = PoolLayout(kinds, num_pages)
        self._pages: dict[tuple[int, str], torch.Tensor] = {}
        for kind in kinds:
            offset, _ = self.layout.byte_range(kind.layer, kind.kind, 0)
            rows_B = buffer[offset : offset + kind.page_bytes * num_pages]
            shape = (num_pages, kind.page_rows, kind.format.row_bytes)
            self._pages[kind.layer, kind.kind] = rows_B.view(shape)

    def pages(self, layer: int, kind: Kind) -> torch.Tensor:
        """uint8 [pages, rows a page, row bytes]."""
        return self._pages[layer, kind]

    def byte_range(self, layer: int, kind: str, physical_page: int) -> tuple[int, int]:
        """(offset, length) of a page in this pool's buffer."""
        return self.layout.byte_range(layer, kind, physical_page)


class JobCache:
    """One job's pages in a pool: its page table and the two things done with it, writing rows and reading them."""

    def __init__(self, pool: CachePool, table: tuple[int, ...]) -> None:
        if len(set(table)) != len(table) or not all(0 <= page < pool.num_pages for page in table):
            raise ValueError(f"page table {table} has duplicates or pages outside [0, {pool.num_pages})")
        self.pool = pool
        self.table = table

    @property
    def max_tokens(self) -> int:
        return len(self.table) * PAGE_TOKENS

    def rows(self, layer: int, kind: Kind, num_tokens: int) -> PagedRows:
        """The complete rows of the first `num_tokens` tokens."""
        geometry = self.pool.kind_of[layer, kind]
        return PagedRows(
            pages_NPB=self.pool.pages(layer, kind),
            table=self.table,
            num_rows=geometry.num_rows(num_tokens),
            format=geometry.format,
        )

    def write(self, layer: int, kind: Kind, first_row: int, bytes_TB: torch.Tensor) -> None:
        """Puts encoded rows [T, row bytes] at cache rows first_row, first_row + 1, ...

        Raises:
            IndexError: beyond the job's pages.
        """
        pages = self.pool.pages(layer, kind)
        page_rows = pages.shape[1]
        end = first_row + bytes_TB.shape[0]
        if end > len(self.table) * page_rows:
            raise IndexError(f"rows [{first_row}, {end}) of layer {layer} exceed the job's {len(self.table)} pages")
        flat = pages.view(-1, pages.shape[2])
        row = first_row
        while row < end:
            logical = row // page_rows
            last = logical
            while last + 1 < len(self.table) and self.table[last + 1] == self.table[last] + 1:
                last += 1
            stop = min(end, (last + 1) * page_rows)
            target = self.table[logical] * page_rows + row % page_rows
            flat[target : target + stop - row] = bytes_TB[row - first_row : stop - first_row]
            row = stop


class PageAllocator:
    """The controller's free list: which physical pages a job may use. Lowest free pages first, so tables stay
    consecutive."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._held: dict[int, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, job: int, num_tokens: int) -> tuple[int, ...]:
        """Page table for `num_tokens` tokens.

        Raises:
            UserError: too few free pages.
            ValueError: the job already has pages.
        """
        if job in self._held:
            raise ValueError(f"job {job} already holds pages")
        needed = -(-num_tokens // PAGE_TOKENS)
        if needed > len(self._free):
            raise UserError(
                f"{num_tokens} tokens need {needed} cache pages, {len(self._free)} are free: "
                "wait for a job to finish or start the cluster with a larger max_tokens"
            )
        table, self._free = tuple(self._free[:needed]), self._free[needed:]
        self._held[job] = table
        return table

    def release(self, job: int) -> None:
        """Takes a job's pages back; raises KeyError for a job that holds none."""
        self._free = sorted((*self._free, *self._held.pop(job)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
