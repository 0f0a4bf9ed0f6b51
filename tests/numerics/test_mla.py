"""Latent attention: both forms against the formulas, against each other, and next to poisoned memory.

Legend: T queries, H heads, L = R + P latent row, S places, Q = N + P query dim, N nope dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.mla import cpu, plain, reference
from longprefill.kernels.quant.formats import Bf16Rows, Fp8LatentRows, Fp32Rows

from .compiled import compiled_backends
from .dsa_cases import make_generator, paged
from .tolerances_dsa import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("mla"),
]
BLOCKED = BACKENDS[1:]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
RANK, ROPE, NOPE, VALUE = 24, 8, 12, 20
SCALE = 0.31


def choose(num_queries: int, start: int, places: int, generator: torch.Generator) -> torch.Tensor:
    """Random distinct visible positions, in random columns, the rest -1."""
    rows = []
    for t in range(num_queries):
        picked = torch.randperm(start + t + 1, generator=generator)[:places]
        row = torch.cat([picked, torch.full((places - len(picked),), -1)])
        rows.append(row[torch.randperm(places, generator=generator)])
    return torch.stack(rows).to(torch.int32) if rows else torch.zeros(0, places, dtype=torch.int32)


def make_rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, RANK + ROPE, generator=make_generator(seed))


def weights(num_heads: int, dtype: torch.dtype, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = make_generator(seed)
    w_uk_HNR = torch.randn(num_heads, NOPE, RANK, generator=generator, dtype=torch.float64) * RANK**-0.5
    w_uv_HVR = torch.randn(num_heads, VALUE, RANK, generator=generator, dtype=torch.float64) * RANK**-0.5
    return w_uk_HNR.to(dtype), w_uv_HVR.to(dtype)


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 900])
@pytest.mark.parametrize("num_queries", [1, 5, 70])
def test_sparse_against_the_formula(backend: Any, dtype: torch.dtype, start: int, num_queries: int) -> None:
    rows = paged(make_rows(start + num_queries), Bf16Rows(RANK + ROPE) if dtype == torch.bfloat16 else None)
    generator = make_generator(1)
    q_THL = torch.randn(num_queries, 3, RANK + ROPE, generator=generator).to(dtype)
    indices_TS = choose(num_queries, start, 16, generator)
    actual = backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    expected = reference.sparse(q_THL.double(), rows, indices_TS, scale=SCALE, latent_rank=RANK)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="mla.sparse")


@pytest.mark.parametrize("backend", BLOCKED)
@settings(max_examples=20)
@given(
    num_queries=st.integers(0, 40),
    start=st.integers(0, 200),
    places=st.integers(1, 30),
    heads=st.integers(1, 9),
    format_name=st.sampled_from(["fp32", "bf16", "fp8"]),
    gather_rows=st.sampled_from([1, 50, 10_000]),
    seed=st.integers(0, 1 << 30),
)
def test_sparse_of_any_shape_and_format(
    backend: Any, num_queries: int, start: int, places: int, heads: int, format_name: str, gather_rows: int, seed: int
) -> None:
    row_format = {"fp32": Fp32Rows(32), "bf16": Bf16Rows(32), "fp8": Fp8LatentRows(RANK, ROPE)}[format_name]
    rows = paged(make_rows(start + num_queries, seed), row_format)
    generator = make_generator(seed)
    q_THL = torch.randn(num_queries, heads, RANK + ROPE, generator=generator)
    indices_TS = choose(num_queries, start, places, generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "GATHER_BYTES", gather_rows * (RANK + ROPE) * 4)
        actual = backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    expected = reference.sparse(q_THL.double(), rows, indices_TS, scale=SCALE, latent_rank=RANK)
    assert_close(actual, expected, op="mla.sparse")


@pytest.mark.parametrize("decoded_bytes", [0, 1 << 30])
def test_sparse_of_a_quantized_cache_decoded_whole_or_by_row(
    decoded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "DECODED_BYTES", decoded_bytes)
    rows = paged(make_rows(100), Fp8LatentRows(RANK, ROPE))
    generator = make_generator(2)
    q_THL = torch.randn(40, 4, RANK + ROPE, generator=generator)
    indices_TS = choose(40, 60, 16, generator)
    actual = plain.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    expected = reference.sparse(q_THL.double(), rows, indices_TS, scale=SCALE, latent_rank=RANK)
    assert_close(actual, expected, op="mla.sparse")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_without_a_key_gives_zeros(backend: Any, dtype: torch.dtype) -> None:
    generator = make_generator(3)
    q_THL = torch.randn(6, 3, RANK + ROPE, generator=generator).to(dtype)
    indices_TS = choose(6, 50, 8, generator)
    indices_TS[[0, 4]] = -1
    rows = paged(make_rows(56))
    actual = backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    assert bool((actual[[0, 4]] == 0).all())
    assert bool((actual[[1, 2, 3, 5]] != 0).all())
    nothing = backend.sparse(q_THL, rows, torch.full_like(indices_TS, -1), scale=SCALE, latent_rank=RANK)
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_rows_reach_only_queries_that_select_them(backend: Any, dtype: torch.dtype) -> None:
    clean = make_rows(80)
    broken = clean.clone()
    broken[[0, 17]] = torch.nan  # row 0 is where a clamped -1 would look
    generator = make_generator(4)
    q_THL = torch.randn(8, 3, RANK + ROPE, generator=generator).to(dtype)
    indices_TS = choose(8, 70, 12, generator)
    indices_TS[(indices_TS == 0) | (indices_TS == 17)] = -1
    indices_TS[:, 3] = -1
    expected = backend.sparse(q_THL, paged(clean), indices_TS, scale=SCALE, latent_rank=RANK)
    actual = backend.sparse(q_THL, paged(broken), indices_TS, scale=SCALE, latent_rank=RANK)
    assert torch.equal(actual, expected)
    indices_TS[5, 3] = 17
    hit = backend.sparse(q_THL, paged(broken), indices_TS, scale=SCALE, latent_rank=RANK)
    assert bool(hit[5].isnan().all())
    assert torch.equal(hit[[0, 1, 2, 3, 4, 6, 7]], expected[[0, 1, 2, 3, 4, 6, 7]])


@pytest.mark.parametrize("backend", BLOCKED)
def test_order_of_the_places_does_not_matter(backend: Any) -> None:
    generator = make_generator(5)
    rows = paged(make_rows(300))
    q_THL = torch.randn(20, 3, RANK + ROPE, generator=generator)
    indices_TS = choose(20, 280, 32, generator)
    mixed_TS = indices_TS[:, torch.randperm(32, generator=generator)]
    first = backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    assert_close(backend.sparse(q_THL, rows, mixed_TS, scale=SCALE, latent_rank=RANK), first, op="mla.sparse")


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 600])
@pytest.mark.parametrize("num_queries", [1, 7, 130])
def test_dense_against_the_formula(backend: Any, dtype: torch.dtype, start: int, num_queries: int) -> None:
    rows = paged(make_rows(start + num_queries), Bf16Rows(RANK + ROPE) if dtype == torch.bfloat16 else None)
    q_THQ = torch.randn(num_queries, 3, NOPE + ROPE, generator=make_generator(6)).to(dtype)
    w_uk_HNR, w_uv_HVR = weights(3, dtype)
    actual = backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=SCALE)
    expected = reference.dense(q_THQ.double(), rows, w_uk_HNR.double(), w_uv_HVR.double(), start=start, scale=SCALE)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="mla.dense")


@pytest.mark.parametrize("backend", BLOCKED)
@settings(max_examples=25)
@given(
    num_queries=st.integers(0, 60),
    start=st.integers(0, 90),
    key_block=st.sampled_from([1, 7, 16, 512]),
    query_block=st.sampled_from([1, 5, 256]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
def test_dense_of_any_shape_and_block(
    backend: Any, num_queries: int, start: int, key_block: int, query_block: int, dtype: torch.dtype, seed: int
) -> None:
    rows = paged(make_rows(start + num_queries, seed), Bf16Rows(RANK + ROPE))
    q_THQ = torch.randn(num_queries, 2, NOPE + ROPE, generator=make_generator(seed)).to(dtype)
    w_uk_HNR, w_uv_HVR = weights(2, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "KEY_BLOCK", key_block)
        patch.setattr(plain, "QUERY_BLOCK", query_block)
        actual = backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=SCALE)
    expected = reference.dense(q_THQ.double(), rows, w_uk_HNR.double(), w_uv_HVR.double(), start=start, scale=SCALE)
    assert_close(actual, expected, op="mla.dense")


@pytest.mark.parametrize("backend", BLOCKED)
def test_dense_stays_finite_at_large_logits(backend: Any) -> None:
    rows = paged(make_rows(700) * 40)
    q_THQ = torch.randn(100, 3, NOPE + ROPE, generator=make_generator(7)) * 40
    w_uk_HNR, w_uv_HVR = weights(3, torch.float32)
    actual = backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=600, scale=1.0)
    expected = reference.dense(q_THQ.double(), rows, w_uk_HNR, w_uv_HVR, start=600, scale=1.0)
    # Logits of some thousands: their fp32 rounding, times the logit, is the error of a weight.
    assert torch.isfinite(actual).all()
    assert float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 70])
def test_no_queries(backend: Any, dtype: torch.dtype, start: int) -> None:
    rows, (w_uk_HNR, w_uv_HVR) = paged(make_rows(70)), weights(3, dtype)
    q_THQ, q_THL = torch.zeros(0, 3, NOPE + ROPE, dtype=dtype), torch.zeros(0, 3, RANK + ROPE, dtype=dtype)
    assert backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=SCALE).shape == (0, 3, VALUE)
    indices_TS = torch.zeros(0, 4, dtype=torch.int32)
    assert backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK).shape == (0, 3, RANK)


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_equals_sparse_over_everything_visible(backend: Any, dtype: torch.dtype) -> None:
    num_queries, start = 66, 70
    rows = paged(make_rows(start + num_queries), Bf16Rows(RANK + ROPE))
    q_THQ = torch.randn(num_queries, 3, NOPE + ROPE, generator=make_generator(8)).to(dtype)
    w_uk_HNR, w_uv_HVR = weights(3, dtype)
    absorbed_THR = torch.einsum("thn,hnr->thr", q_THQ[..., :NOPE].double(), w_uk_HNR.double())
    q_THL = torch.cat([absorbed_THR.to(dtype), q_THQ[..., NOPE:]], dim=-1)
    columns_S = torch.arange(start + num_queries, dtype=torch.int32)
    indices_TS = torch.where(columns_S <= start + torch.arange(num_queries)[:, None], columns_S, -1)
    latent_THR = backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    sparse_THV = torch.einsum("thr,hvr->thv", latent_THR.double(), w_uv_HVR.double())
    dense_THV = backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=SCALE)
    assert_close(dense_THV, sparse_THV, op="mla.dense")


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_lets_a_nan_row_reach_only_later_queries(backend: Any, dtype: torch.dtype) -> None:
    clean = make_rows(90)
    broken = clean.clone()
    broken[75] = torch.nan
    q_THQ = torch.randn(40, 3, NOPE + ROPE, generator=make_generator(10)).to(dtype)
    w_uk_HNR, w_uv_HVR = weights(3, dtype)
    expected = backend.dense(q_THQ, paged(clean), w_uk_HNR, w_uv_HVR, start=50, scale=SCALE)
    actual = backend.dense(q_THQ, paged(broken), w_uk_HNR, w_uv_HVR, start=50, scale=SCALE)
    assert bool(actual[25:].isnan().all())
    assert_close(actual[:25], expected[:25].double(), op="mla.dense")


@pytest.mark.parametrize("backend", BLOCKED)
def test_inputs_stay_as_they_are(backend: Any) -> None:
    rows = paged(make_rows(90))
    generator = make_generator(11)
    q_THL = torch.randn(20, 3, RANK + ROPE, generator=generator)
    q_THQ = torch.randn(20, 3, NOPE + ROPE, generator=generator)
    indices_TS = choose(20, 5, 16, generator)
    w_uk_HNR, w_uv_HVR = weights(3, torch.float32)
    tensors = (rows.pages_NPB, q_THL, q_THQ, indices_TS, w_uk_HNR, w_uv_HVR)
    before = [x.clone() for x in tensors]
    backend.sparse(q_THL, rows, indices_TS, scale=SCALE, latent_rank=RANK)
    backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=70, scale=SCALE)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("backend", BLOCKED)
def test_refusals(backend: Any) -> None:
    rows = paged(make_rows(10))
    q_THL, indices_TS = torch.zeros(2, 3, RANK + ROPE), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows 32 wide"):
        backend.sparse(q_THL[..., :8], rows, indices_TS, scale=1.0, latent_rank=4)
    with pytest.raises(ValueError, match="index 10 of 10 cached rows"):
        backend.sparse(q_THL, rows, indices_TS + 10, scale=1.0, latent_rank=RANK)
    w_uk_HNR, w_uv_HVR = weights(3, torch.float32)
    with pytest.raises(ValueError, match="10 cached rows, but the last query sees 11"):
        backend.dense(torch.zeros(2, 3, NOPE + ROPE), rows, w_uk_HNR, w_uv_HVR, start=9, scale=1.0)
    with pytest.raises(ValueError, match=r"give q \[T, H, N \+ P\]"):
        backend.dense(torch.zeros(2, 3, NOPE), rows, w_uk_HNR, w_uv_HVR, start=0, scale=1.0)


@pytest.mark.parametrize("backend", compiled_backends("mla"))
@pytest.mark.parametrize("row_format", [Bf16Rows(RANK + ROPE), Fp8LatentRows(RANK, ROPE)], ids=["bf16", "fp8"])
def test_dense_over_several_spans_and_turns_of_heads(
    backend: Any, row_format: Bf16Rows | Fp8LatentRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "STATE_BYTES", 1)  # one head a turn
    start, num_queries = 8100, 150  # the kernel packs 4,096 rows at a time
    rows = paged(make_rows(start + num_queries), row_format)
    q_THQ = torch.randn(num_queries, 3, NOPE + ROPE, generator=make_generator(11)).bfloat16()
    w_uk_HNR, w_uv_HVR = weights(3, torch.bfloat16)
    actual = backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=SCALE)
    expected = plain.dense(q_THQ.double(), rows, w_uk_HNR.double(), w_uv_HVR.double(), start=start, scale=SCALE)
    assert_close(actual, expected, op="mla.dense")


@pytest.mark.parametrize("backend", compiled_backends("mla"))
def test_dense_where_the_maximum_rises_with_every_block(backend: Any) -> None:
    rows_KL = make_rows(900) * 0.3
    rows_KL[:, 0] = 12.0 * (torch.arange(900) // 100)  # exact in bf16, and so are the logits that it adds
    rows = paged(rows_KL, Bf16Rows(RANK + ROPE))
    q_THQ = torch.randn(140, 2, NOPE + ROPE, generator=make_generator(12)).bfloat16()
    w_uk_HNR, w_uv_HVR = weights(2, torch.bfloat16)
    w_uk_HNR[..., 0] = 0
    w_uk_HNR[:, 0] = 0
    w_uk_HNR[:, 0, 0] = q_THQ[..., 0] = 1
    actual = backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=760, scale=1.0)
    expected = plain.dense(q_THQ.double(), rows, w_uk_HNR.double(), w_uv_HVR.double(), start=760, scale=1.0)
    assert_close(actual, expected, op="mla.dense")


@pytest.fixture(params=["absorbed", "expanded"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled backend takes this one whatever the shape."""
    monkeypatch.setattr(cpu, "is_expanding_faster", lambda *_: request.param == "expanded")
    return request.param


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "num_queries", "places"), [(0, 70, 16), (65, 5, 8), (700, 150, 40), (300, 2, 400)])
@pytest.mark.usefixtures("form")
def test_selected_against_the_formula(
    backend: Any, dtype: torch.dtype, start: int, num_queries: int, places: int
) -> None:
    rows = paged(make_rows(start + num_queries), Bf16Rows(RANK + ROPE) if dtype == torch.bfloat16 else None)
    generator = make_generator(13)
    q_THQ = torch.randn(num_queries, 3, NOPE + ROPE, generator=generator).to(dtype)
    indices_TS = choose(num_queries, start, places, generator)
    indices_TS[1] = -1
    w_uk_HNR, w_uv_HVR = weights(3, dtype)
    actual = backend.selected(q_THQ, rows, indices_TS, w_uk_HNR, w_uv_HVR, start=start, scale=SCALE)
    precise = (w_uk_HNR.double(), w_uv_HVR.double())
    expected = reference.selected(q_THQ.double(), rows, indices_TS, *precise, start=start, scale=SCALE)
    assert actual.dtype == dtype
    assert bool((actual[1] == 0).all())
    assert_close(actual, expected, op="mla.selected")


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("form")
def test_selected_lets_a_nan_row_reach_only_queries_that_select_it(backend: Any, dtype: torch.dtype) -> None:
    clean = make_rows(140)
    broken = clean.clone()
    broken[[0, 17]] = torch.nan
    generator = make_generator(14)
    q_THQ = torch.randn(40, 3, NOPE + ROPE, generator=generator).to(dtype)
    indices_TS = choose(40, 100, 12, generator)
    indices_TS[(indices_TS == 0) | (indices_TS == 17)] = -1
    indices_TS[5, 3] = 17
    w_uk_HNR, w_uv_HVR = weights(3, dtype)
    others = [query for query in range(40) if query != 5]
    found, expected = (
        backend.selected(q_THQ, paged(rows), indices_TS, w_uk_HNR, w_uv_HVR, start=100, scale=SCALE)
        for rows in (broken, clean)
    )
    assert bool(found[5].isnan().all())
    assert_close(found[others], expected[others].double(), op="mla.selected")


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [10, 12])
@pytest.mark.parametrize(("query", "index"), [(1, 10), (0, 9), (0, 11), (1, 12), (1, 1 << 30), (0, (1 << 32) + 3)])
@pytest.mark.usefixtures("form")
def test_selected_refuses_an_index_that_its_query_does_not_see(
    backend: Any, dtype: torch.dtype, num_rows: int, query: int, index: int
) -> None:
    expansions = weights(3, dtype)
    indices_TS = torch.tensor([[0, -1, 8], [1, -1, 9]])
    indices_TS[query, 1] = index
    q_THQ = torch.zeros(2, 3, NOPE + ROPE, dtype=dtype)
    rows = paged(make_rows(num_rows))
    message = f"query {query} at position {8 + query} selects row {index}: select rows 0 to {8 + query}, or -1"
    for number_type in (torch.int64, torch.int32) if index < 1 << 31 else (torch.int64,):
        with pytest.raises(ValueError, match=message):
            backend.selected(q_THQ, rows, indices_TS.to(number_type), *expansions, start=8, scale=SCALE)


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.usefixtures("form")
def test_selected_refuses_indices_of_other_queries(backend: Any) -> None:
    q_THQ, rows = torch.zeros(2, 3, NOPE + ROPE), paged(make_rows(10))
    for shape in ((3, 4), (2,), (1, 4), (2, 2, 2)):
        with pytest.raises(ValueError, match=r"give q \[T, heads, .*indices \[T, places\]"):
            backend.selected(
                q_THQ, rows, torch.zeros(shape, dtype=torch.int32), *weights(3, torch.float32), start=8, scale=SCALE
            )


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [-0.2, 0.0, torch.nan, torch.inf])
@pytest.mark.usefixtures("form")
def test_refuses_a_scale_that_is_not_positive(backend: Any, dtype: torch.dtype, scale: float) -> None:
    rows, expansions = paged(make_rows(10)), weights(3, dtype)
    q_THQ, q_THL = torch.zeros(2, 3, NOPE + ROPE, dtype=dtype), torch.zeros(2, 3, RANK + ROPE, dtype=dtype)
    indices_TS = torch.zeros(2, 4, dtype=torch.int32)
    for run in (
        lambda: backend.dense(q_THQ, rows, *expansions, start=8, scale=scale),
        lambda: backend.selected(q_THQ, rows, indices_TS, *expansions, start=8, scale=scale),
        lambda: backend.sparse(q_THL, rows, indices_TS, scale=scale, latent_rank=RANK),
    ):
        with pytest.raises(ValueError, match=f"scale={scale}: .* above 0"):
            run()


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.usefixtures("form")
def test_expansions_may_be_parts_of_one_weight(backend: Any) -> None:
    w_uk_HNR, w_uv_HVR = weights(3, torch.bfloat16)
    both_HFR = torch.cat([w_uk_HNR, w_uv_HVR], dim=1)
    parts = both_HFR[:, :NOPE], both_HFR[:, NOPE:]
    columns = w_uk_HNR.mT.contiguous().mT, w_uv_HVR.mT.contiguous().mT
    rows = paged(make_rows(200), Bf16Rows(RANK + ROPE))
    generator = make_generator(15)
    q_THQ = torch.randn(60, 3, NOPE + ROPE, generator=generator).bfloat16()
    indices_TS = choose(60, 140, 16, generator)
    whole = [
        backend.dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=140, scale=SCALE),
        backend.selected(q_THQ, rows, indices_TS, w_uk_HNR, w_uv_HVR, start=140, scale=SCALE),
    ]
    for expansions in (parts, columns):
        found = [
            backend.dense(q_THQ, rows, *expansions, start=140, scale=SCALE),
            backend.selected(q_THQ, rows, indices_TS, *expansions, start=140, scale=SCALE),
        ]
        for actual, expected in zip(found, whole, strict=True):
            assert_close(actual, expected.double(), op="mla.dense")
