"""Reading cache rows out of scattered, poisoned pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Fp32Rows, make_format

from .dsa_cases import make_generator, paged


@settings(max_examples=60)
@given(
    num_rows=st.integers(0, 300),
    page_rows=st.sampled_from([1, 3, 16, 64]),
    bounds=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    name=st.sampled_from(["fp32", "bf16", "mxfp8"]),
)
def test_ranges_and_gathers_return_the_written_rows(
    num_rows: int, page_rows: int, bounds: tuple[int, int], name: str
) -> None:
    rows_TW = torch.randn(num_rows, 12, generator=make_generator(num_rows))
    row_format = make_format("index_key", name, width=12)
    cache = paged(rows_TW, row_format, page_rows=page_rows)
    expected = row_format.decode(row_format.encode(rows_TW), torch.float32)
    start, end = sorted(min(bound, num_rows) for bound in bounds)
    assert torch.equal(cache.read(start, end, torch.float32), expected[start:end])
    assert torch.equal(cache.read_bytes(start, end), row_format.encode(rows_TW)[start:end])
    if num_rows:
        indices = torch.randint(0, num_rows, (4, 5), generator=make_generator(start), dtype=torch.int32)
        assert torch.equal(cache.gather(indices, torch.float32), expected[indices])


def test_consecutive_pages_are_read_without_a_copy() -> None:
    pool_NPB = torch.zeros(6, 64, 16, dtype=torch.uint8)
    row_format = Fp32Rows(4)
    neighbours = PagedRows(pages_NPB=pool_NPB, table=(2, 3, 4), num_rows=150, format=row_format)
    scattered = PagedRows(pages_NPB=pool_NPB, table=(2, 4, 3), num_rows=150, format=row_format)
    pool_storage = pool_NPB.untyped_storage().data_ptr()
    assert neighbours.read(70, 150, torch.float32).untyped_storage().data_ptr() == pool_storage
    assert scattered.read(70, 150, torch.float32).untyped_storage().data_ptr() != pool_storage


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 11), (11, 11)])
def test_ranges_outside_the_rows_are_refused(start: int, end: int) -> None:
    cache = paged(torch.zeros(10, 4))
    with pytest.raises(IndexError, match=r"outside \[0, 10\)"):
        cache.read_bytes(start, end)
