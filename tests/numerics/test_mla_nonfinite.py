"""Latent attention of numbers that are not finite: every form of every backend gives what the formula gives, NaN where
it gives NaN, whatever the blocks, cuts and shapes; and what a query does not see never reaches it.

Legend: T queries, H heads, L = R + P latent row, S places, Q = N + P query dim, N nope dim, V value dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.mla import cpu, plain, reference
from longprefill.kernels.quant.formats import Bf16Rows

from .compiled import compiled_backends
from .dsa_cases import make_generator, paged
from .test_mla import NOPE, RANK, ROPE, SCALE, choose, make_rows, weights
from .tolerances_dsa import assert_close

BACKENDS = [
    pytest.param(plain, id="plain"),
    *compiled_backends("mla"),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
HEADS = 2
INF, NAN = torch.inf, torch.nan
Attend = Callable[..., torch.Tensor]


def visible(num_queries: int, start: int) -> torch.Tensor:
    """Indices of everything that each query sees."""
    columns_S = torch.arange(start + num_queries, dtype=torch.int32)
    return torch.where(columns_S <= start + torch.arange(num_queries)[:, None], columns_S, -1)


@pytest.fixture(params=["dense", "absorbed", "expanded"])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """Attention over everything visible: densely, or as a selection in one of the two forms."""
    monkeypatch.setattr(cpu, "is_expanding_faster", lambda *_: request.param == "expanded")

    def run(backend: Any, q_THQ: torch.Tensor, rows_TL: torch.Tensor, *, start: int) -> torch.Tensor:
        rows, expansions = paged(rows_TL, Bf16Rows(RANK + ROPE)), weights(HEADS, q_THQ.dtype)
        if request.param == "dense":
            return backend.dense(q_THQ, rows, *expansions, start=start, scale=SCALE)
        return backend.selected(q_THQ, rows, visible(len(q_THQ), start), *expansions, start=start, scale=SCALE)

    return run


def make_queries(num_queries: int, seed: int = 21) -> torch.Tensor:
    """Numbers that every dtype of the tests holds."""
    return torch.randn(num_queries, HEADS, NOPE + ROPE, generator=make_generator(seed)).bfloat16().float()


def by_formula(q_THQ: torch.Tensor, rows_TL: torch.Tensor, dtype: torch.dtype, *, start: int) -> torch.Tensor:
    rows, (w_uk_HNR, w_uv_HVR) = paged(rows_TL, Bf16Rows(RANK + ROPE)), weights(HEADS, dtype)
    return reference.dense(q_THQ.double(), rows, w_uk_HNR.double(), w_uv_HVR.double(), start=start, scale=SCALE)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, op: str = "mla.dense") -> None:
    """NaN at the same places, and the other numbers close."""
    assert not bool(expected.isinf().any())
    assert torch.equal(actual.isnan(), expected.isnan()), (
        f"{int(actual.isnan().sum())} numbers of {actual.numel()} are NaN, expected {int(expected.isnan().sum())}"
    )
    assert_close(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), op=op)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [INF, -INF])
@pytest.mark.parametrize("row", [5, 130])
def test_an_infinite_latent_makes_nan_of_every_query_that_sees_it(
    backend: Any, dtype: torch.dtype, number: float, row: int, attend: Attend
) -> None:
    rows_TL = make_rows(160)
    rows_TL[row, 3] = number
    q_THQ = make_queries(60)
    # The first head of every second query has a logit of -inf there, so a weight of 0.
    sign_N = weights(HEADS, dtype)[0][0, :, 3].float().sign() * (1 if number > 0 else -1)
    q_THQ[::2, 0, :NOPE] = -sign_N * q_THQ[::2, 0, :NOPE].abs()
    expected = by_formula(q_THQ, rows_TL, dtype, start=100)
    assert bool(expected[max(0, row - 100) :].isnan().all())
    assert_same(attend(backend, q_THQ.to(dtype), rows_TL, start=100), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [-1, 1, 0])
@pytest.mark.parametrize(("num_infinite", "start", "num_queries"), [(40, 60, 5), (520, 600, 70), (600, 600, 1)])
def test_infinite_logits_of_the_first_rows(
    backend: Any, dtype: torch.dtype, sign: int, num_infinite: int, start: int, num_queries: int, attend: Attend
) -> None:
    """-inf for sign -1, as a mask has it; +inf and so NaN for sign 1; NaN for 0; values stay finite."""
    rows_TL = make_rows(start + num_queries)
    rows_TL[:num_infinite, RANK] = INF
    q_THQ = make_queries(num_queries)
    q_THQ[..., NOPE] = sign
    expected = by_formula(q_THQ, rows_TL, dtype, start=start)
    assert bool(expected.isnan().all()) == (sign >= 0)
    assert_same(attend(backend, q_THQ.to(dtype), rows_TL, start=start), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 30, 700])
def test_only_logits_of_minus_infinity_give_nan(backend: Any, dtype: torch.dtype, start: int, attend: Attend) -> None:
    """Up to row start + 29; queries from there on have finite logits too."""
    rows_TL = make_rows(start + 60)
    rows_TL[: start + 30, RANK] = INF
    q_THQ = make_queries(60)
    q_THQ[..., NOPE] = -1
    expected = by_formula(q_THQ, rows_TL, dtype, start=start)
    assert bool(expected[:30].isnan().all())
    assert bool(expected[30:].isfinite().all())
    assert_same(attend(backend, q_THQ.to(dtype), rows_TL, start=start), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["absorbed", "expanded"])
def test_no_key_gives_zeros_beside_queries_that_see_only_minus_infinity(
    backend: Any, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "is_expanding_faster", lambda *_: name == "expanded")
    rows_TL = make_rows(90)
    rows_TL[:40, RANK] = INF
    rows_TL[70, 3] = INF  # weight 0 would not silence it
    q_THQ = make_queries(30)
    q_THQ[..., NOPE] = -1
    indices_TS = torch.arange(60, dtype=torch.int32).expand(30, -1).clone()
    indices_TS[[2, 20]] = -1
    indices_TS[5, 7:], indices_TS[25, 7:] = -1, -1
    rows, expansions = paged(rows_TL, Bf16Rows(RANK + ROPE)), weights(HEADS, dtype)
    precise = (q_THQ.double(), rows, indices_TS, *(w.double() for w in expansions))
    expected = reference.selected(*precise, start=60, scale=SCALE)
    actual = backend.selected(q_THQ.to(dtype), rows, indices_TS, *expansions, start=60, scale=SCALE)
    assert bool((actual[[2, 20]] == 0).all())
    assert bool(actual[[5, 25]].isnan().all())
    assert_same(actual, expected, op="mla.selected")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [INF, -INF, NAN])
def test_what_is_not_seen_does_not_leak(backend: Any, dtype: torch.dtype, number: float, attend: Attend) -> None:
    clean_TL, q_THQ = make_rows(160), make_queries(60)
    broken_TL = clean_TL.clone()
    broken_TL[130] = number
    actual = attend(backend, q_THQ.to(dtype), broken_TL, start=100)
    expected = attend(backend, q_THQ.to(dtype), clean_TL, start=100)
    assert_close(actual[:30], expected[:30].double(), op="mla.dense")
    assert bool(actual[30:].isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [3, RANK])
def test_cuts_do_not_matter(backend: Any, dtype: torch.dtype, column: int, attend: Attend) -> None:
    rows_TL, q_THQ = make_rows(160), make_queries(60).to(dtype)
    rows_TL[5, column] = rows_TL[130, column] = INF
    q_THQ[:, 0, NOPE] = -1  # the first head sees -inf, the second -inf or +inf
    whole = attend(backend, q_THQ, rows_TL, start=100)
    for cuts in ((0, 1, 60), (0, 24, 31, 60), (0, 30, 32, 59, 60)):
        parts = [
            attend(backend, q_THQ[first:last], rows_TL[: 100 + last], start=100 + first)
            for first, last in itertools.pairwise(cuts)
        ]
        assert_same(torch.cat(parts), whole.double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [INF, -INF, NAN])
def test_a_broken_query_reaches_no_other(backend: Any, dtype: torch.dtype, number: float, attend: Attend) -> None:
    for num_queries, start in ((2, 1), (9, 40), (60, 700)):
        rows_TL, q_THQ = make_rows(start + num_queries), make_queries(num_queries)
        expected = by_formula(q_THQ, rows_TL, dtype, start=start)
        q_THQ[1, 0] = number
        actual = attend(backend, q_THQ.to(dtype), rows_TL, start=start)
        assert bool(actual[1, 0].isnan().all())
        expected[1, 0] = NAN
        assert_same(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [1, 3, 16, 40, 150])
@pytest.mark.parametrize("number", [INF, NAN])
def test_sparse_with_broken_rows_and_places_without_a_key(
    backend: Any, dtype: torch.dtype, places: int, number: float
) -> None:
    generator = make_generator(22)
    rows_TL = make_rows(300)
    rows_TL[::20, RANK] = number
    q_THL = torch.randn(40, HEADS, RANK + ROPE, generator=generator).bfloat16().float()
    q_THL[:, 0, RANK] = -q_THL[:, 0, RANK].abs()
    indices_TS = choose(40, 260, places, generator)
    indices_TS[::2, ::3] = -1
    rows = paged(rows_TL, Bf16Rows(RANK + ROPE))
    actual = backend.sparse(q_THL.to(dtype), rows, indices_TS, scale=SCALE, latent_rank=RANK)
    expected = reference.sparse(q_THL.double(), rows, indices_TS, scale=SCALE, latent_rank=RANK)
    assert_same(actual, expected, op="mla.sparse")


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(
    num_queries=st.integers(2, 60),
    start=st.integers(0, 150),
    places=st.integers(1, 40),
    num_broken=st.integers(1, 6),
    number=st.sampled_from([INF, -INF, NAN]),
    column=st.sampled_from([0, 3, RANK, RANK + 1]),
    is_expanding=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
def test_selected_of_any_broken_rows(
    backend: Any, num_queries: int, start: int, places: int, num_broken: int, number: float, column: int,
    is_expanding: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    generator = make_generator(seed)
    rows_TL, q_THQ = make_rows(start + num_queries, seed), make_queries(num_queries, seed)
    rows_TL[torch.randint(start + num_queries, (num_broken,), generator=generator), column] = number
    indices_TS = choose(num_queries, start, places, generator)
    rows, expansions = paged(rows_TL, Bf16Rows(RANK + ROPE)), weights(HEADS, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "is_expanding_faster", lambda *_: is_expanding)
        actual = backend.selected(q_THQ.to(dtype), rows, indices_TS, *expansions, start=start, scale=SCALE)
    precise = (q_THQ.double(), rows, indices_TS, *(w.double() for w in expansions))
    assert_same(actual, reference.selected(*precise, start=start, scale=SCALE), op="mla.selected")
