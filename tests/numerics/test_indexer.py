"""Index selection: exact where scores are exact, tie-tolerant elsewhere, and the same for every cut.

Legend: T queries, I indexer heads, X indexer dim, L keys, S places.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.dsa import plain, reference
from longprefill.kernels.quant.formats import Bf16Rows, Fp32Rows, Mxfp8Rows

from .compiled import compiled_backends
from .dsa_cases import make_generator, paged, true_scores
from .tolerances_dsa import assert_close, assert_selection

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("dsa"),
]
BLOCKED = BACKENDS[1:]
"""The reference is too slow for thousands of keys."""
TOPK = 8


def whole_numbers(num_queries: int, num_keys: int, *, heads: int = 16, width: int = 16, seed: int = 0) -> Any:
    """q, w, k of small whole numbers: every score is exact in fp32, and thousands tie."""
    generator = make_generator(seed)
    q_TIX = torch.randint(-2, 3, (num_queries, heads, width), generator=generator).float()
    w_TI = torch.randint(-3, 4, (num_queries, heads), generator=generator).float()
    k_LX = torch.randint(-1, 2, (num_keys, width), generator=generator).float()
    return q_TIX, w_TI, k_LX


def gaussian(num_queries: int, num_keys: int, *, heads: int = 16, width: int = 32, seed: int = 0) -> Any:
    generator = make_generator(seed)
    q_TIX = torch.randn(num_queries, heads, width, generator=generator)
    w_TI = torch.randn(num_queries, heads, generator=generator)
    return q_TIX, w_TI, torch.randn(num_keys, width, generator=generator)


def brute_force(scores_TL: torch.Tensor, start: int, topk: int) -> torch.Tensor:
    """The contract in Python: sort by (-score, index), take the first, write them ascending."""
    rows = []
    for t, row in enumerate(scores_TL.tolist()):
        order = sorted(range(start + t + 1), key=lambda s: (-row[s], s))[:topk]
        rows.append(sorted(order) + [-1] * (topk - len(order)))
    return torch.tensor(rows, dtype=torch.int32).reshape(len(scores_TL), topk)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 700])
@pytest.mark.parametrize("num_queries", [1, TOPK - 1, TOPK, TOPK + 1, 65])
def test_exact_scores_give_the_exact_set(backend: Any, start: int, num_queries: int) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(num_queries, start + num_queries, seed=start)
    keys = paged(k_LX)
    actual = backend.select(q_TIX, w_TI, keys, start=start, topk=TOPK)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), start, TOPK))


@pytest.mark.parametrize("backend", BLOCKED)
@settings(max_examples=25)
@given(
    num_queries=st.integers(0, 40),
    start=st.integers(0, 3000),
    topk=st.integers(1, 700),
    heads=st.integers(1, 17),
    width=st.sampled_from([4, 8, 24]),
    seed=st.integers(0, 1 << 30),
)
def test_exact_scores_give_the_exact_set_for_any_shape(
    backend: Any, num_queries: int, start: int, topk: int, heads: int, width: int, seed: int
) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(num_queries, start + num_queries, heads=heads, width=width, seed=seed)
    keys = paged(k_LX)
    actual = backend.select(q_TIX, w_TI, keys, start=start, topk=topk)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), start, topk))


@pytest.mark.parametrize("backend", BLOCKED)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 300), max_size=4), seed=st.integers(0, 1 << 30))
def test_any_cut_of_the_queries_gives_the_same_sets(backend: Any, cuts: list[int], seed: int) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(300, 1500, seed=seed)
    keys = paged(k_LX)
    bounds = [0, *sorted(cuts), 300]
    parts = [backend.select(q_TIX[a:b], w_TI[a:b], keys, start=1200 + a, topk=64) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), backend.select(q_TIX, w_TI, keys, start=1200, topk=64))


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize(
    "row_format", [Fp32Rows(32), Bf16Rows(32), Mxfp8Rows(32), Mxfp8Rows(32, "floor")], ids=lambda f: f.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_reads_the_numbers_that_the_cache_holds(backend: Any, row_format: Any, dtype: torch.dtype) -> None:
    q_TIX, w_TI, k_LX = gaussian(150, 3000)
    q_TIX, w_TI = q_TIX.to(dtype), w_TI.to(dtype)
    keys = paged(k_LX, row_format)
    chosen = backend.select(q_TIX, w_TI, keys, start=2850, topk=48)
    assert_selection(chosen, true_scores(q_TIX, w_TI, keys), visible_T=list(range(2851, 3001)))


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_many_panels(backend: Any, order: str) -> None:
    q_TIX, w_TI, k_LX = gaussian(20, 40_000, heads=16, width=8)
    if order != "random":
        trend_L = torch.linspace(0.1, 1, 40_000)
        q_TIX, w_TI = q_TIX.abs(), w_TI.abs()
        k_LX = k_LX.abs() * (trend_L if order == "rising" else trend_L.flip(0))[:, None]
    keys = paged(k_LX)
    chosen = backend.select(q_TIX, w_TI, keys, start=39_980, topk=40)
    assert_selection(chosen, true_scores(q_TIX, w_TI, keys), visible_T=list(range(39_981, 40_001)))


def test_more_places_than_the_widest_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_PANEL", 512)
    q_TIX, w_TI, k_LX = whole_numbers(9, 3009)
    keys = paged(k_LX)
    actual = plain.select(q_TIX, w_TI, keys, start=3000, topk=1500)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), 3000, 1500))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp64_queries_are_scored_in_fp64(backend: Any) -> None:
    # Key 1 leads by 1e-9: fp32 sees a tie, which goes to key 0.
    q_TIX, w_TI = torch.tensor([[[1.0, 1e-9]]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    keys = paged(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert backend.select(q_TIX, w_TI, keys, start=1, topk=1).tolist() == [[1]]
    assert backend.select(q_TIX.float(), w_TI.float(), keys, start=1, topk=1).tolist() == [[0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["equal scores", "zero weights", "off heads"])
def test_ties_go_to_the_lowest_positions(backend: Any, kind: str) -> None:
    q_TIX, w_TI, k_LX = gaussian(70, 1000)
    if kind == "equal scores":
        k_LX = k_LX[:1].expand(1000, -1)
    elif kind == "zero weights":
        w_TI = torch.zeros_like(w_TI)
    else:
        q_TIX, k_LX = q_TIX.abs(), -k_LX.abs()
    chosen = backend.select(q_TIX, w_TI, paged(k_LX), start=930, topk=24)
    assert torch.equal(chosen, torch.arange(24, dtype=torch.int32).expand(70, 24))


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_zero_ties_with_zero(backend: Any) -> None:
    q_TIX, k_LX = torch.ones(1, 16, 8), -torch.ones(600, 8)
    k_LX[1::2] = 0.0
    # Weights of both signs times relu's 0: scores are 0 and -0 in turn.
    w_TI = torch.full((1, 16), -1.0)
    assert backend.select(q_TIX, w_TI, paged(k_LX), start=599, topk=5).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("backend", BLOCKED)
def test_equal_keys_far_apart_are_taken_lowest_first(backend: Any) -> None:
    q_TIX, w_TI, k_LX = gaussian(40, 5000)
    k_LX[torch.arange(13, 5000, 31)] = k_LX[13].clone()
    keys = paged(k_LX)
    chosen = backend.select(q_TIX, w_TI, keys, start=4960, topk=100)
    for row in chosen.tolist():
        copies = [s for s in row if s % 31 == 13]
        assert copies == [13 + 31 * n for n in range(len(copies))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_keys_come_last_and_spoil_nobody_else(backend: Any) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(5, 705, seed=3)
    w_TI = w_TI.abs() + 1  # no zero weight
    spoiled = [0, 1, 2, 300, 650]
    broken_LX = k_LX.clone()
    broken_LX[spoiled] = torch.nan
    keys = paged(broken_LX)
    actual = backend.select(q_TIX, w_TI, keys, start=700, topk=50)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), 700, 50))
    assert not set(spoiled) & set(actual.flatten().tolist())
    everything = backend.select(q_TIX, w_TI, keys, start=700, topk=699)
    # Two of 701 visible keys stay out: the last of the NaN ones, which tie at -inf.
    assert set(range(701)) - set(everything[0].tolist()) == {300, 650}


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_query_takes_the_lowest_positions(backend: Any) -> None:
    q_TIX, w_TI, k_LX = gaussian(3, 603)
    q_TIX[1, 4, 2] = torch.nan
    chosen = backend.select(q_TIX, w_TI, paged(k_LX), start=600, topk=6)
    assert chosen[1].tolist() == [0, 1, 2, 3, 4, 5]
    keys = paged(k_LX)
    assert torch.equal(chosen[[0, 2]], brute_force(true_scores(q_TIX, w_TI, keys), 600, 6)[[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_keys(backend: Any) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(2, 602, seed=1)
    q_TIX, w_TI = q_TIX.abs() + 1, w_TI.abs() + 1
    k_LX[[100, 500]] = torch.inf
    k_LX[[7, 8]] = -torch.inf
    keys = paged(k_LX)
    actual = backend.select(q_TIX, w_TI, keys, start=600, topk=9)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), 600, 9))
    assert {100, 500} <= set(actual[0].tolist())


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_gates_only(backend: Any) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(6, 606, seed=2)
    w_TI = -w_TI.abs() - 1
    keys = paged(k_LX)
    actual = backend.select(q_TIX, w_TI, keys, start=600, topk=16)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), 600, 16))


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("row_format", [Bf16Rows(16), Mxfp8Rows(16)], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_keys_that_are_not_finite_in_narrow_formats(
    backend: Any, row_format: Any, dtype: torch.dtype, broken: float
) -> None:
    q_TIX, w_TI, k_LX = whole_numbers(5, 705, seed=4)
    q_TIX[0] = q_TIX[0].abs() + 1  # inf for all heads of this query, not only NaN from inf - inf
    k_LX[[3, 90, 640], 5] = broken
    keys = paged(k_LX, row_format)
    actual = backend.select(q_TIX.to(dtype), w_TI, keys, start=700, topk=50)
    assert torch.equal(actual, brute_force(true_scores(q_TIX, w_TI, keys), 700, 50))


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("row_format", [Bf16Rows(64), Mxfp8Rows(64)], ids=lambda f: f.name)
def test_fp32_queries_keep_their_precision_in_narrow_formats(backend: Any, row_format: Any) -> None:
    generator = make_generator(11)
    q_TIX, w_TI = torch.randn(6, 4, 64, generator=generator), torch.ones(6, 4)
    # All keys score nearly alike: bf16 queries would choose by their rounding.
    k_LX = torch.ones(4000, 64) + torch.randint(0, 2, (4000, 64), generator=generator) / 64
    keys = paged(k_LX, row_format)
    chosen = backend.select(q_TIX, w_TI, keys, start=3994, topk=200)
    assert_selection(chosen, true_scores(q_TIX, w_TI, keys), visible_T=list(range(3995, 4001)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores(backend: Any, dtype: torch.dtype) -> None:
    q_TIX, w_TI, k_LX = gaussian(30, 500)
    keys = paged(k_LX)
    positions_TS = torch.randint(-1, 500, (30, 20), generator=make_generator(5), dtype=torch.int32)
    actual = backend.scores(q_TIX.to(dtype), w_TI.to(dtype), keys, positions_TS)
    assert actual.dtype == dtype
    is_none_TS = positions_TS < 0
    assert bool(actual[is_none_TS].isneginf().all())
    expected = true_scores(q_TIX, w_TI, keys).gather(1, positions_TS.long().clamp(min=0))
    assert_close(actual[~is_none_TS], expected[~is_none_TS], op="indexer.scores")


@pytest.mark.parametrize("backend", BLOCKED)
def test_scores_of_a_nan_key_are_minus_infinity(backend: Any) -> None:
    q_TIX, w_TI, k_LX = gaussian(2, 10)
    k_LX[3] = torch.nan
    actual = backend.scores(q_TIX, w_TI, paged(k_LX), torch.tensor([[2, 3], [3, 4]]))
    assert actual.isneginf().tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("backend", BLOCKED)
def test_inputs_stay_as_they_are(backend: Any) -> None:
    q_TIX, w_TI, k_LX = gaussian(40, 900)
    keys = paged(k_LX)
    before = [x.clone() for x in (q_TIX, w_TI, keys.pages_NPB)]
    backend.select(q_TIX, w_TI, keys, start=860, topk=16)
    backend.scores(q_TIX, w_TI, keys, torch.zeros(40, 2, dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(before, (q_TIX, w_TI, keys.pages_NPB), strict=True))


@pytest.mark.parametrize("backend", BLOCKED)
def test_refusals(backend: Any) -> None:
    q_TIX, w_TI, k_LX = gaussian(4, 10)
    keys = paged(k_LX)
    with pytest.raises(ValueError, match="10 cached keys, but the last query sees 11"):
        backend.select(q_TIX, w_TI, keys, start=7, topk=4)
    with pytest.raises(ValueError, match="topk=0"):
        backend.select(q_TIX, w_TI, keys, start=0, topk=0)
    with pytest.raises(ValueError, match="keys 32 wide"):
        backend.select(q_TIX[..., :8], w_TI, keys, start=0, topk=4)
    with pytest.raises(ValueError, match="position 10 of 10"):
        backend.scores(q_TIX, w_TI, keys, torch.full((4, 1), 10))
