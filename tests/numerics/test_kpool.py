"""Pooled index keys: against transformers' glm5_next indexer and against brute force.

Legend: T queries, I indexer heads, X indexer dim, D hidden, N pools, L tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from longprefill.kernels.dsa import plain, reference

from .compiled import compiled_backends
from .dsa_cases import make_generator, paged, randomize, true_scores
from .tolerances_dsa import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("dsa"),
]


def brute_force(scores_TN: torch.Tensor, start: int, topk: int, pool: int) -> torch.Tensor:
    rows = []
    for t, row in enumerate(scores_TN.tolist()):
        visible = start + t + 1
        best = sorted(range(visible // pool), key=lambda n: (-row[n], n))[: topk // pool]
        tokens = [n * pool + offset for n in sorted(best) for offset in range(pool)]
        tokens += range(visible // pool * pool, visible)
        rows.append(tokens + [-1] * (topk + pool - 1 - len(tokens)))
    return torch.tensor(rows, dtype=torch.int32).reshape(len(scores_TN), topk + pool - 1)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(
    num_queries=st.integers(0, 30),
    start=st.integers(0, 2500),
    topk=st.integers(1, 300),
    pool=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
def test_any_shape_against_brute_force(
    backend: Any, num_queries: int, start: int, topk: int, pool: int, seed: int
) -> None:
    generator = make_generator(seed)
    q_TIX = torch.randint(-2, 3, (num_queries, 16, 8), generator=generator).float()
    w_TI = torch.randint(-3, 4, (num_queries, 16), generator=generator).float()
    pooled = paged(torch.randint(-1, 2, ((start + num_queries) // pool, 8), generator=generator).float())
    expected = brute_force(true_scores(q_TIX, w_TI, pooled), start, topk, pool)
    actual = backend.select_pooled(q_TIX, w_TI, pooled, start=start, topk=topk, pool=pool)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pool_of_one_is_plain_selection(backend: Any) -> None:
    generator = make_generator(1)
    q_TIX, w_TI = torch.randn(20, 16, 8, generator=generator), torch.randn(20, 16, generator=generator)
    keys = paged(torch.randn(800, 8, generator=generator))
    pooled = backend.select_pooled(q_TIX, w_TI, keys, start=780, topk=24, pool=1)
    assert torch.equal(pooled, backend.select(q_TIX, w_TI, keys, start=780, topk=24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pool_keys(dtype: torch.dtype) -> None:
    generator = make_generator(2)
    k_TX, gate_TX = (torch.randn(40, 6, generator=generator, dtype=dtype) for _ in range(2))
    bias_QX = torch.randn(5, 6, generator=generator)
    expected = reference.pool_keys(k_TX.double(), gate_TX.double(), bias_QX)
    for pool in range(8):  # the formula, written out
        rows = slice(5 * pool, 5 * pool + 5)
        weights = torch.exp(gate_TX[rows].double() + bias_QX)
        by_hand = (weights / weights.sum(0) * k_TX[rows].double()).sum(0)
        torch.testing.assert_close(expected[pool], by_hand, rtol=1e-12, atol=1e-12)
    before = k_TX.clone()
    assert_close(plain.pool_keys(k_TX, gate_TX, bias_QX.to(dtype)), expected, op="kpool")
    assert torch.equal(k_TX, before)


def test_pool_keys_of_half_precision_rows_are_fp32() -> None:
    generator = make_generator(3)
    k_TX, gate_TX = (torch.randn(8, 6, generator=generator).bfloat16() for _ in range(2))
    bias_QX = torch.randn(4, 6, generator=generator)
    for backend in (plain, reference):
        pooled = backend.pool_keys(k_TX, gate_TX, bias_QX)
        assert pooled.dtype == torch.float32
        assert_close(pooled, reference.pool_keys(k_TX.double(), gate_TX.double(), bias_QX), op="kpool")


@pytest.mark.parametrize(
    ("num_tokens", "cut"), [(n, cut) for n in (1, 3, 4, 5, 30, 131) for cut in (0, 1, 27, 64) if cut < n]
)
def test_against_transformers(num_tokens: int, cut: int) -> None:
    config = Glm5NextTextConfig(
        hidden_size=48, q_lora_rank=24, index_n_heads=16, index_head_dim=16, index_topk=16, index_kpool=4,
        index_kpool_always_select_tail=True, qk_rope_head_dim=0,
    )  # fmt: skip
    indexer = Glm5NextTextIndexer(config, 0)
    randomize(indexer, seed=7)
    generator = make_generator(8)
    hidden_TD = torch.randn(num_tokens, 48, generator=generator)
    residual_TD = torch.randn(num_tokens, 24, generator=generator)
    with torch.no_grad():
        expected = indexer(hidden_TD[None], residual_TD[None], torch.ones(1, num_tokens, dtype=torch.bool), None)[0]
        q_TIX = indexer.wq_b(residual_TD).view(num_tokens, 16, 16)
        w_TI = indexer.weights_proj(hidden_TD) * (16 * 16) ** -0.5
        k_TX = indexer.k_norm(indexer.wk(hidden_TD))
        gate_TX = hidden_TD @ indexer.index_kpool_compress_gate.T
        complete = num_tokens // 4 * 4
        pooled_NX = plain.pool_keys(k_TX[:complete], gate_TX[:complete], indexer.index_kpool_compress_ape)
    actual = plain.select_pooled(q_TIX[cut:], w_TI[cut:], paged(pooled_NX), start=cut, topk=16, pool=4)
    assert actual.shape == expected[cut:].shape
    for ours, theirs in zip(actual.tolist(), expected[cut:].tolist(), strict=True):
        chosen = [s for s in ours if s >= 0]
        assert chosen == sorted(s for s in theirs if s >= 0)
        assert ours == chosen + [-1] * (len(ours) - len(chosen))


def test_refusals() -> None:
    rows = torch.zeros(7, 6)
    with pytest.raises(ValueError, match="multiple of 4 rows"):
        plain.pool_keys(rows, rows, torch.zeros(4, 6))
    with pytest.raises(ValueError, match="pool=0"):
        plain.select_pooled(torch.zeros(1, 2, 6), torch.zeros(1, 2), paged(rows), start=0, topk=4, pool=0)
    with pytest.raises(ValueError, match="7 cached keys, but the last query sees 8"):
        plain.select_pooled(torch.zeros(1, 2, 6), torch.zeros(1, 2), paged(rows), start=31, topk=4, pool=4)
