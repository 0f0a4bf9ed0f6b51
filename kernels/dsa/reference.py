"""Lightning indexer by its formulas: every score at once, a stable sort. Runs in fp64 when the queries are fp64.

Legend: T queries, I indexer heads, X indexer dim, L keys, S positions, Q tokens a pool, N pools.
"""

from __future__ import annotations

import torch

from longprefill.kernels.paged import PagedRows


def select(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int) -> torch.Tensor:
    """int32 [T, topk]: the min(topk, start + t + 1) best positions of query t, ascending, then -1."""
    scores_TL = _all_scores(q_TIX, w_TI, keys)
    chosen_TS = scores_TL.new_full((len(q_TIX), topk), -1, dtype=torch.int32)
    for t, scores_L in enumerate(scores_TL):
        best = _best(scores_L[: start + t + 1], topk)
        chosen_TS[t, : len(best)] = best
    return chosen_TS


def scores(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, positions_TS: torch.Tensor) -> torch.Tensor:
    """[T, S] scores of given positions; -1 gives -inf."""
    if keys.num_rows == 0:
        return q_TIX.new_full(positions_TS.shape, -torch.inf, dtype=_precision(q_TIX))
    picked_TS = _all_scores(q_TIX, w_TI, keys).gather(1, positions_TS.long().clamp(min=0))
    return picked_TS.masked_fill(positions_TS < 0, -torch.inf)


def pool_keys(k_TX: torch.Tensor, gate_TX: torch.Tensor, pool_bias_QX: torch.Tensor) -> torch.Tensor:
    """[T/Q, X]: sum over a pool's rows of k times a per-channel softmax of gate + bias."""
    pool, width = pool_bias_QX.shape
    precision = _precision(k_TX)
    k_NQX = k_TX.to(precision).reshape(-1, pool, width)
    logits_NQX = gate_TX.to(precision).reshape(-1, pool, width) + pool_bias_QX.to(precision)
    return (logits_NQX.softmax(dim=1) * k_NQX).sum(dim=1)


def select_pooled(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, pooled: PagedRows, *, start: int, topk: int, pool: int
) -> torch.Tensor:
    """int32 [T, topk + pool - 1]: the tokens of the best topk // pool complete pools and of the incomplete tail."""
    scores_TL = _all_scores(q_TIX, w_TI, pooled)
    chosen_TS = scores_TL.new_full((len(q_TIX), topk + pool - 1), -1, dtype=torch.int32)
    for t, scores_L in enumerate(scores_TL):
        visible = start + t + 1
        best = _best(scores_L[: visible // pool], topk // pool)
        tokens = [n * pool + offset for n in best.tolist() for offset in range(pool)]
        tokens += range(visible // pool * pool, visible)
        chosen_TS[t, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return chosen_TS


def _precision(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _all_scores(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows) -> torch.Tensor:
    """[T, L], NaN turned into -inf and -0 into 0. No matrix product: equal keys get equal scores in every column."""
    precision = _precision(q_TIX)
    k_LX = keys.read(0, keys.num_rows, precision)
    scores_TL = torch.zeros(len(q_TIX), keys.num_rows, dtype=precision, device=q_TIX.device)
    for scores_L, q_IX, w_I in zip(scores_TL, q_TIX.to(precision), w_TI.to(precision), strict=True):
        for q_X, weight in zip(q_IX, w_I, strict=True):
            scores_L += weight * (k_LX * q_X).sum(dim=1).relu()
    return torch.where(scores_TL.isnan(), -torch.inf, scores_TL) + 0.0


def _best(scores_L: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending positions of the `count` best: score descending, then index ascending."""
    order = scores_L.sort(descending=True, stable=True).indices[:count]
    return order.sort().values.to(torch.int32)
