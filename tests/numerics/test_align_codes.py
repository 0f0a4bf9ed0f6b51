"""The definition that `align` holds cache rows against, beside the engine's encoders and decoders: the same bits."""

from __future__ import annotations

import pytest
import torch

from longprefill.kernels.paged import RowFormat
from longprefill.kernels.quant.formats import Bf16Rows, Fp8LatentRows, Fp32Rows, Mxfp8Rows
from longprefill.orchestrator.align.codes import CodeDifference, compare_codes

FORMATS: dict[str, tuple[RowFormat, int]] = {
    "fp32": (Fp32Rows(40), 0),
    "bf16": (Bf16Rows(40), 0),
    "fp8": (Fp8LatentRows(300, 6), 6),
    "fp8 of one number": (Fp8LatentRows(1, 0), 0),
    "mxfp8": (Mxfp8Rows(72), 0),
    "mxfp8 of one number": (Mxfp8Rows(1), 0),
}


def rows_of_all_sizes(width: int) -> torch.Tensor:
    """Random rows over fp32's range, zeros, subnormals, ties between codes, the largest code, what is not finite."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(800, width, generator=generator)
    powers = torch.ldexp(torch.ones(800, 1), torch.randint(-148, 126, (800, 1), generator=generator))
    ties = torch.arange(width).remainder(120).float()[None] / 16 + torch.tensor([[0.0], [448.0], [1.96875]])
    special = torch.tensor([0.0, -0.0, 448.0, 449.0, 3.4e38, 1e-45, torch.inf, -torch.inf, torch.nan])
    return torch.cat((random * powers, random, ties, special[:, None].expand(-1, width), special[:, None] + random[:9]))


def found_in(name: str, stored: torch.Tensor, rows: torch.Tensor) -> CodeDifference:
    row_format, rope_dim = FORMATS[name]
    read = row_format.decode(stored, torch.float32)
    return compare_codes(name.split(" ", 1)[0], stored, rows, read, rope_dim=rope_dim)


@pytest.mark.parametrize("name", FORMATS)
def test_encoders_follow_the_definition(name: str) -> None:
    row_format, _ = FORMATS[name]
    rows = rows_of_all_sizes(row_format.width)
    for encode in (row_format.encode, getattr(row_format, "encode_plain", row_format.encode)):
        assert found_in(name, encode(rows), rows) == CodeDifference()


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp8"])
def test_one_step_in_few_codes_is_counted_and_two_are_a_problem(name: str) -> None:
    row_format, _ = FORMATS[name]
    rows = torch.randn(50, row_format.width, generator=torch.Generator().manual_seed(1)).abs() + 1
    stored = row_format.encode(rows)
    stored[7, 2] += 1
    num_codes = rows.numel()
    assert found_in(name, stored, rows) == CodeDifference(share=1 / num_codes, worst_steps=1)
    stored[7, 2] += 1
    assert found_in(name, stored, rows).problem == f"1 of {num_codes} codes differ, by up to 2 steps"


def test_other_scales_are_named() -> None:
    rows = torch.full((3, 72), 1.9)
    stored = Mxfp8Rows(72, "floor").encode(rows)
    assert found_in("mxfp8", stored, rows).problem == (
        "9 of 9 scales differ, the first in row 0, group 0: 3.906e-03 instead of 7.812e-03"
    )


def test_what_is_read_otherwise_than_stored_is_named() -> None:
    row_format, _ = FORMATS["mxfp8"]
    rows = torch.randn(5, 72, generator=torch.Generator().manual_seed(2))
    stored = row_format.encode(rows)
    read = row_format.decode(stored, torch.float32)
    read[1, 3] *= 1.01
    found = compare_codes("mxfp8", stored, rows, read, rope_dim=0)
    assert found.problem == "1 of 360 numbers are read otherwise than they are stored"


def test_rows_of_another_size_are_named() -> None:
    rows = torch.ones(2, 72)
    found = compare_codes("mxfp8", Bf16Rows(72).encode(rows), rows, rows, rope_dim=0)
    assert found.problem == "144 bytes a row instead of 75 in mxfp8"
