"""The tests can fail: the mistakes that other systems shipped, each caught by the comparison that the tests use.

Legend: T queries, I indexer heads, X indexer dim, D hidden, S places, L keys, W numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longprefill.kernels.dsa import plain as plain_indexer
from longprefill.kernels.mla import plain as plain_mla
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Mxfp8Rows

from .dsa_cases import DsaLayer, make_generator, paged, true_scores
from .dsa_modules import TOPK, Oracle, compare, dsa_oracle
from .test_quant import encode_mx_by_hand
from .tolerances_dsa import assert_selection

CUTS = (70, 100)
"""Prefilled in three fragments, so that a wrong start shows; nearly every query sees more than topk keys."""


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return dsa_oracle(11)


def mutated(layer: DsaLayer, **changes: Any) -> DsaLayer:
    return DsaLayer(**{**vars(layer), **changes})


def select_without_relu(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int
) -> torch.Tensor:
    """Without the ReLU the heads fold into one query."""
    folded_TX = torch.einsum("ti,tix->tx", w_TI, q_TIX)
    scores_TL = folded_TX @ keys.read(0, keys.num_rows, torch.float32).T
    return from_scores(scores_TL, start, topk)


def select_without_prefix(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int
) -> torch.Tensor:
    """The fragment's first query takes itself for position 0."""
    return plain_indexer.select(q_TIX, w_TI, keys, start=0, topk=topk)


def select_without_self(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int
) -> torch.Tensor:
    """The key range ends at the query's position instead of behind it."""
    return from_scores(true_scores(q_TIX, w_TI, keys), start - 1, topk)


def select_with_future(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int
) -> torch.Tensor:
    """The key range ends one key too late."""
    return from_scores(true_scores(q_TIX, w_TI, keys), start + 1, topk)


def from_scores(scores_TL: torch.Tensor, start: int, topk: int) -> torch.Tensor:
    chosen_TS = torch.full((len(scores_TL), topk), -1, dtype=torch.int32)
    for t, scores_L in enumerate(scores_TL):
        visible_L = scores_L[: max(0, start + t + 1)]
        best = visible_L.sort(descending=True, stable=True).indices[:topk].sort().values
        chosen_TS[t, : len(best)] = best
    return chosen_TS


def duplicate_first(
    q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, scale: float, latent_rank: int
) -> torch.Tensor:
    """-1 clamped to 0 without a mask: key 0 counts once more for every empty place."""
    return plain_mla.sparse(q_THL, rows, indices_TS.clamp(min=0), scale=scale, latent_rank=latent_rank)


MUTATIONS: dict[str, Callable[[DsaLayer], DsaLayer]] = {
    "missing ReLU": lambda layer: mutated(layer, indexer=SimpleNamespace(select=select_without_relu)),
    "prefix omitted": lambda layer: mutated(layer, indexer=SimpleNamespace(select=select_without_prefix)),
    "start one too small": lambda layer: mutated(layer, index_start_shift=-1),
    "self excluded": lambda layer: mutated(layer, indexer=SimpleNamespace(select=select_without_self)),
    "future included": lambda layer: mutated(layer, indexer=SimpleNamespace(select=select_with_future)),
    "missing k_norm bias": lambda layer: mutated(layer, has_key_bias=False),
    "interleaved pairs in the indexer": lambda layer: mutated(layer, index_pairing="interleaved"),
    "half-split pairs in the attention": lambda layer: mutated(layer, latent_pairing="half"),
    "scale of the absorbed width": lambda layer: mutated(layer, scale=48**-0.5),
    "scale without yarn's square": lambda layer: mutated(layer, scale=24**-0.5),
    "-1 read as key 0": lambda layer: mutated(layer, attention=SimpleNamespace(sparse=duplicate_first)),
}


def test_without_a_mutation_the_comparison_is_green(oracle: Oracle) -> None:
    compare(oracle, mutated(oracle.layer), CUTS)
    same = SimpleNamespace(select=lambda q, w, keys, *, start, topk: from_scores(true_scores(q, w, keys), start, topk))
    compare(oracle, mutated(oracle.layer, indexer=same), CUTS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_the_comparison_red(oracle: Oracle, name: str) -> None:
    with pytest.raises(AssertionError, match=r"other keys were chosen|RMS ratio"):
        compare(oracle, MUTATIONS[name](oracle.layer), CUTS)


@pytest.mark.parametrize("name", ["missing ReLU", "interleaved pairs in the indexer", "missing k_norm bias"])
def test_short_prompts_hide_a_wrong_indexer(oracle: Oracle, name: str) -> None:
    """Why the tests use a small topk: up to topk keys, every selection is right."""
    layer = MUTATIONS[name](oracle.layer)
    wrong_TD, _ = layer.run(oracle.hidden_TD[:TOPK], ())
    right_TD, _ = oracle.layer.run(oracle.hidden_TD[:TOPK], ())
    assert torch.equal(wrong_TD, right_TD)


def test_floor_instead_of_round_up_changes_bytes_and_selection() -> None:
    generator = make_generator(12)
    rows_TW = torch.randn(400, 32, generator=generator)
    right, wrong = Mxfp8Rows(32, "up"), Mxfp8Rows(32, "floor")
    by_hand = [encode_mx_by_hand(row, "up") for row in rows_TW[:40].tolist()]
    assert [bytes(row) for row in right.encode(rows_TW[:40]).tolist()] == by_hand
    assert [bytes(row) for row in wrong.encode(rows_TW[:40]).tolist()] != by_hand
    q_TIX, w_TI = torch.randn(30, 16, 32, generator=generator), torch.randn(30, 16, generator=generator)
    scores_TL = true_scores(q_TIX, w_TI, paged(rows_TW, right))
    visible_T = list(range(371, 401))
    chosen = plain_indexer.select(q_TIX, w_TI, paged(rows_TW, right), start=370, topk=16)
    assert_selection(chosen, scores_TL, visible_T=visible_T)
    chosen = plain_indexer.select(q_TIX, w_TI, paged(rows_TW, wrong), start=370, topk=16)
    with pytest.raises(AssertionError, match=r"score is below|better score"):
        assert_selection(chosen, scores_TL, visible_T=visible_T)
