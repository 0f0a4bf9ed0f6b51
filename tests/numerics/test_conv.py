"""Causal convolution: the definition by single products, any cut with its halo, short and empty segments.

Legend: T tokens, N segments, C channels, W conv width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.conv import plain, reference

from .compiled import compiled_backends
from .tolerances import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("conv"),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_definition(x_TC: torch.Tensor, weight_CW: torch.Tensor, history_WC: torch.Tensor) -> torch.Tensor:
    """One segment in fp64, product by product."""
    rows = [*history_WC.double(), *x_TC.double()]
    width = weight_CW.shape[1]
    zero = torch.zeros(x_TC.shape[1], dtype=torch.float64)
    sums = [sum((weight_CW[:, j].double() * rows[t + j] for j in range(width)), zero) for t in range(x_TC.shape[0])]
    return torch.stack([y * torch.sigmoid(y) for y in sums]) if sums else x_TC.double()


def halos(x_TC: torch.Tensor, cuts: tuple[int, ...], history_WC: torch.Tensor) -> torch.Tensor:
    """The last W - 1 rows before each fragment of one job, which may lie in several earlier fragments."""
    rows = torch.cat([history_WC, x_TC])
    return torch.stack([rows[cut : cut + history_WC.shape[0]] for cut in cuts[:-1]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 1, 1, 3, 6, 10, 60), (0, 57)])
def test_matches_the_definition(backend: Any, width: int, offsets: tuple[int, ...]) -> None:
    x_TC, weight_CW = normal(offsets[-1], 11), normal(11, width, seed=1)
    history_NWC = normal(len(offsets) - 1, width - 1, 11, seed=2)
    segments = [by_definition(x_TC[a:b], weight_CW, history_NWC[n]) for n, (a, b) in enumerate(pairwise(offsets))]
    expected = torch.cat([x_TC[:0].double(), *segments])
    actual = backend.causal_conv_silu(x_TC, weight_CW, offsets=offsets, history_NWC=history_NWC)
    assert_close(actual, expected, op="conv")


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=8).map(lambda inner: (0, *sorted(inner), 40)), width=st.integers(1, 5)
)
@settings(max_examples=30)
def test_any_cut_with_its_halo_equals_the_whole(backend: Any, cuts: tuple[int, ...], width: int) -> None:
    x_TC, weight_CW, history_WC = normal(40, 6), normal(6, width, seed=1), normal(width - 1, 6, seed=2)
    whole = backend.causal_conv_silu(x_TC, weight_CW, offsets=(0, 40), history_NWC=history_WC.unsqueeze(0))
    halo_NWC = halos(x_TC, cuts, history_WC)
    cut = backend.causal_conv_silu(x_TC, weight_CW, offsets=cuts, history_NWC=halo_NWC)
    assert_close(cut, whole, op="conv")


@pytest.mark.parametrize("block", [1, 8, 40])
def test_row_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TC, weight_CW, history_NWC = normal(50, 8), normal(8, 4, seed=1), normal(2, 3, 8, seed=2)
    arguments = {"offsets": (0, 2, 50), "history_NWC": history_NWC}
    expected = reference.causal_conv_silu(x_TC.double(), weight_CW, **arguments)
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 8 * block)
    assert_close(plain.causal_conv_silu(x_TC, weight_CW, **arguments), expected, op="conv")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_rows_are_summed_in_fp32(backend: Any) -> None:
    x_TC, weight_CW = normal(30, 8).bfloat16(), normal(8, 4, seed=1).bfloat16()
    history_NWC = normal(1, 3, 8, seed=2).bfloat16()
    arguments = {"offsets": (0, 30), "history_NWC": history_NWC}
    actual = backend.causal_conv_silu(x_TC, weight_CW, **arguments)
    expected = reference.causal_conv_silu(x_TC.double(), weight_CW.double(), **arguments)
    assert actual.dtype == torch.bfloat16
    assert_close(actual, expected, op="conv")
    fp32 = backend.causal_conv_silu(x_TC.float(), weight_CW, **arguments)
    assert torch.equal(actual, fp32.bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_strided_views_and_stay_as_they_are(backend: Any) -> None:
    wide = torch.full((30, 20), torch.nan)
    wide[:, 4:12] = normal(30, 8)
    weight_CW, history_NWC = normal(8, 4, seed=1), normal(1, 3, 8, seed=2)
    view, before = wide[:, 4:12], wide[:, 4:12].clone()
    out = backend.causal_conv_silu(view, weight_CW, offsets=(0, 30), history_NWC=history_NWC)
    assert torch.equal(out, backend.causal_conv_silu(before, weight_CW, offsets=(0, 30), history_NWC=history_NWC))
    assert torch.equal(view, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_offsets_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="offsets="):
        backend.causal_conv_silu(normal(9, 2), normal(2, 4), offsets=(0, 8), history_NWC=normal(1, 3, 2))
