"""How close is close for the attention side: RMS ratios by operation and dtype, by the rule of `tolerances.py`."""

from __future__ import annotations

import torch

from .tolerances import rms_ratio

TOLERANCES: dict[tuple[str, torch.dtype], float] = {
    ("indexer.scores", torch.float64): 1e-13,
    ("indexer.scores", torch.float32): 1e-6,
    ("kpool", torch.float32): 1e-6,
    ("kpool", torch.float64): 1e-14,
    ("mla.selected", torch.float64): 1e-12,
    ("mla.selected", torch.float32): 1e-6,
    ("mla.selected", torch.bfloat16): 6e-3,
    ("mla.sparse", torch.float64): 1e-14,
    ("mla.sparse", torch.float32): 1e-6,
    ("mla.sparse", torch.bfloat16): 4e-3,
    ("mla.dense", torch.float64): 1e-13,
    ("mla.dense", torch.float32): 2e-6,
    # Keys, values, weights and every block's output are rounded to bf16.
    ("mla.dense", torch.bfloat16): 8e-3,
    ("moe", torch.float64): 1e-13,
    ("moe", torch.float32): 2e-6,
    ("moe", torch.bfloat16): 8e-3,
    # A whole attention module against transformers: some twenty fp32 operations on each side.
    ("layer", torch.float32): 1e-5,
}

NEAR_TIE = 1e-5
"""How far from the last chosen score a differing choice may lie, relative to the query's largest score."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, op: str) -> None:
    """Fails unless shapes agree, all is finite and the RMS ratio is within the entry for (op, actual's dtype)."""
    assert actual.shape == expected.shape, f"{op}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{op}: {int((~torch.isfinite(actual)).sum())} values are not finite"
    ratio, allowed = rms_ratio(actual, expected), TOLERANCES[op, actual.dtype]
    assert ratio <= allowed, f"{op}: RMS ratio {ratio:.2e}, allowed {allowed:.0e} for {actual.dtype}"


def assert_selection(chosen_TS: torch.Tensor, scores_TL: torch.Tensor, *, visible_T: list[int]) -> None:
    """Fails unless every row holds the min(places, visible) best positions of the given scores, near ties aside.

    Positions are unique, ascending, visible, and -1 only behind them. `scores_TL` are the true scores, NaN as -inf.
    """
    assert chosen_TS.dtype == torch.int32
    for row_S, scores_L, visible in zip(chosen_TS.tolist(), scores_TL.double(), visible_T, strict=True):
        count = min(len(row_S), visible)
        positions = row_S[:count]
        assert row_S[count:] == [-1] * (len(row_S) - count), f"{visible} visible: {row_S}"
        assert positions == sorted(set(positions)), f"not ascending and unique: {positions}"
        assert all(0 <= s < visible for s in positions), f"{visible} visible: {positions}"
        if count == visible:
            continue
        scores_L = scores_L[:visible]
        margin = NEAR_TIE * float(scores_L[scores_L.isfinite()].abs().amax())
        worst = float(scores_L.topk(count).values[-1])
        is_chosen_L = torch.zeros(visible, dtype=torch.bool)
        is_chosen_L[positions] = True
        assert float(scores_L[is_chosen_L].min()) >= worst - margin, "a chosen score is below the best ones"
        assert float(scores_L[~is_chosen_L].max()) <= worst + margin, "a better score was passed over"
