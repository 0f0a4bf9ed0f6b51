"""Attention Residuals: one phase = two phases = fla's reference, values never normalised.

Legend: T tokens, D hidden, B sources, Q queries.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.residual import plain, reference

from .compiled import compiled_backends
from .test_kda import load_fla
from .tolerances import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("residual"),
]
EPS = 1e-6


def sources(num_sources: int, num_tokens: int = 37, num_hidden: int = 24) -> list[torch.Tensor]:
    """Sources of very different sizes: a normalised value would show."""
    generator = torch.Generator().manual_seed(num_sources)
    return [3.0**i * torch.randn(num_tokens, num_hidden, generator=generator) for i in range(num_sources)]


def queries(num_queries: int, num_hidden: int = 24) -> torch.Tensor:
    return torch.randn(num_queries, num_hidden, generator=torch.Generator().manual_seed(99))


def doubled(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.double() for value in values]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_sources", [1, 2, 9])
def test_fla_reference_agrees(backend: Any, num_sources: int) -> None:
    fla = load_fla("ops/attnres/naive.py")
    values, query_D = sources(num_sources), queries(1)[0]
    norm_D = torch.linspace(0.5, 2.0, 24)
    expected = fla.naive_attnres(query_D, values, norm_D, rms_eps=EPS)
    assert_close(backend.mix(values, query_D * norm_D, eps=EPS), expected, op="attn_res")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_sources", [1, 2, 9])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_one_phase_matches_fp64(backend: Any, num_sources: int, num_tokens: int) -> None:
    values, query_D = sources(num_sources, num_tokens), queries(1)[0]
    expected = reference.mix(doubled(values), query_D.double(), eps=EPS)
    assert_close(backend.mix(values, query_D, eps=EPS), expected, op="attn_res")


@pytest.mark.parametrize("backend", BACKENDS)
@given(num_blocks=st.integers(1, 8), num_queries=st.integers(1, 6), with_partial=st.booleans())
@settings(max_examples=20)
def test_two_phases_equal_one(backend: Any, num_blocks: int, num_queries: int, with_partial: bool) -> None:
    values, queries_QD = sources(num_blocks + 1), queries(num_queries)
    blocks, partial = values[:-1], values[-1]
    phase1 = backend.prepare(blocks, queries_QD, eps=EPS)
    assert phase1.weighted_QTD.shape == (num_queries, 37, 24)
    for query, query_D in enumerate(queries_QD):
        actual = backend.update(partial if with_partial else None, phase1, query, query_D, eps=EPS)
        all_sources = values if with_partial else blocks
        expected = reference.mix(doubled(all_sources), query_D.double(), eps=EPS)
        assert_close(actual, expected, op="attn_res")


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_hundreds_do_not_overflow(backend: Any) -> None:
    values, query_D = sources(5), 500 * queries(1)[0]
    expected = reference.mix(doubled(values), query_D.double(), eps=EPS)
    phase1 = backend.prepare(values[:4], query_D.unsqueeze(0), eps=EPS)
    # A softmax this sharp turns the logits' own rounding (1e-4 of 1e3) into weights where two sources tie.
    for actual in (backend.mix(values, query_D, eps=EPS), backend.update(values[4], phase1, 0, query_D, eps=EPS)):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_source_is_legal(backend: Any) -> None:
    values = [torch.zeros(3, 24), torch.ones(3, 24)]
    mixed = backend.mix(values, torch.zeros(24), eps=EPS)
    assert torch.equal(mixed, torch.full((3, 24), 0.5))


def test_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values, queries_QD = sources(4), queries(3)
    whole = plain.prepare(values, queries_QD, eps=EPS)
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 24 * 7 * 5)
    by_rows = plain.prepare(values, queries_QD, eps=EPS)
    for part, expected in zip(by_rows, whole, strict=True):
        assert_close(part, expected.double(), op="attn_res")
    expected = reference.mix(doubled(values), queries_QD[0].double(), eps=EPS)
    assert_close(plain.mix(values, queries_QD[0], eps=EPS), expected, op="attn_res")
    phase1 = plain.prepare(values[:3], queries_QD, eps=EPS)
    assert_close(plain.update(values[3], phase1, 0, queries_QD[0], eps=EPS), expected, op="attn_res")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_sources_are_mixed_in_fp32(backend: Any) -> None:
    values = [value.bfloat16() for value in sources(4)]
    query_D = queries(1)[0]
    expected = reference.mix(doubled(values), query_D.double(), eps=EPS)
    phase1 = backend.prepare(values[:3], query_D.unsqueeze(0), eps=EPS)
    assert phase1.weighted_QTD.dtype == torch.float32
    for actual in (backend.mix(values, query_D, eps=EPS), backend.update(values[3], phase1, 0, query_D, eps=EPS)):
        assert actual.dtype == torch.bfloat16
        assert_close(actual, expected, op="attn_res")
    assert backend.update(None, phase1, 0, query_D, eps=EPS).dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_mix_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="0 sources"):
        backend.mix([], queries(1)[0], eps=EPS)
    with pytest.raises(ValueError, match="0 sources"):
        backend.prepare([], queries(1), eps=EPS)
