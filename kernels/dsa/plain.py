"""Lightning indexer in blocked torch operators: the CPU default, and right on any device.

Legend: T queries, Q queries of a block, I indexer heads, X indexer dim, L keys of a panel, K keys of a block, S chosen
places or given positions, C candidates, W output columns, N pools, U tokens a pool.

Key panels are the outer loop, so every key is decoded once a call; queries keep a running list of their best `places`
keys, in ascending position. Only what beats a list's worst score strictly can enter it: on a tie the listed key has the
lower index and stays. README.md derives this and shows where the time goes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from longprefill.kernels.paged import PagedRows

PRODUCT_ROWS = 512
"""Rows (queries times heads) of one matrix product, and KEY_BLOCK its columns: the fp32 products take 1 MB and stay in
a core's level-2 cache for the ReLU and the head sum that follow; at [2048, 4096] they do not, and all takes
half as long again."""
KEY_BLOCK = 512
"""Keys of one product. Blocks are always full (zeros behind the last key), so equal keys get equal scores wherever they
lie: a narrower product may add up in another order."""
FIRST_PANEL = 512
"""Keys of the first panel, at least; each further panel doubles what is scored, so a list's threshold rests on at least
half of the keys and about `places` candidates pass a doubling of random scores."""
MAX_PANEL = 16384
"""Widest panel: 2 MB of scores for 32 queries, 8 MB of keys at X = 128; half as wide, merges cost half as much more."""
GATHER_BYTES = 32 << 20
"""Bound of the gathered keys and their products in `scores`."""


def select(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int) -> torch.Tensor:
    """Positions of the best keys of each query (spec: DeepSeek-V3.2, lightning indexer).

    Args:
        q_TIX: index queries, of positions start, start + 1, ...; any float dtype, scored in fp32 (fp64 from fp64).
        w_TI: head weights, any sign.
        keys: index keys of the job; rows [0, start + T) are read.
        start: position of the first query.
        topk: places a query has.

    Returns:
        int32 [T, topk]: the min(topk, start + t + 1) best of [0, start + t] in the order (score descending, index
        ascending), NaN as -inf, written in ascending position, then -1.

    Raises:
        ValueError: shapes that do not fit each other, topk < 1, or fewer cached keys than the last query sees.
    """
    check_queries(q_TIX, w_TI, keys, needed=start + len(q_TIX))
    if topk < 1:
        raise ValueError(f"topk={topk}: an indexer keeps at least one position")
    first = torch.arange(start + 1, start + len(q_TIX) + 1, device=q_TIX.device)
    return _select_visible(q_TIX, w_TI, keys, visible_T=first, places=topk)


def scores(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, positions_TS: torch.Tensor) -> torch.Tensor:
    """[T, S] fp32 (fp64 from fp64) scores of given positions; -1 gives -inf, NaN gives -inf.

    Raises:
        ValueError: shapes that do not fit each other, or a position outside the cache.
    """
    check_queries(q_TIX, w_TI, keys, needed=0)
    precision = _precision(q_TIX)
    scores_TS = torch.full(positions_TS.shape, -torch.inf, dtype=precision, device=q_TIX.device)
    if positions_TS.numel() == 0 or keys.num_rows == 0:
        return scores_TS
    if int(positions_TS.max()) >= keys.num_rows:
        raise ValueError(
            f"position {int(positions_TS.max())} of {keys.num_rows} cached keys: give positions below that"
        )
    num_heads, width = q_TIX.shape[1:]
    row_bytes = positions_TS.shape[1] * (num_heads + 2 * width) * precision.itemsize
    block = max(1, GATHER_BYTES // row_bytes)
    for begin in range(0, len(q_TIX), block):
        rows = slice(begin, begin + block)
        k_QSX = keys.gather(positions_TS[rows].long().clamp(min=0), precision)
        products_QIS = torch.bmm(q_TIX[rows].to(precision), k_QSX.mT).relu_()
        scores_TS[rows] = torch.bmm(w_TI[rows, None].to(precision), products_QIS)[:, 0]
    return scores_TS.masked_fill_(scores_TS.isnan() | (positions_TS < 0), -torch.inf).add_(0.0)


def pool_keys(k_TX: torch.Tensor, gate_TX: torch.Tensor, pool_bias_UX: torch.Tensor) -> torch.Tensor:
    """[T/U, X] fp32 pooled keys (glm5_next k-pool): rows nU..nU+U-1 weighted, channel by channel, with
    softmax(gate + bias) over the pool.

    Raises:
        ValueError: T is no multiple of the pool, or the widths differ.
    """
    pool, width = pool_bias_UX.shape
    if k_TX.shape != gate_TX.shape or k_TX.shape[1] != width or len(k_TX) % pool:
        raise ValueError(
            f"k-pool of k {tuple(k_TX.shape)}, gate {tuple(gate_TX.shape)}, bias {tuple(pool_bias_UX.shape)}: "
            f"k and gate must be equal in shape, {width} wide, with a multiple of {pool} rows"
        )
    precision = _precision(k_TX)
    logits_NUX = gate_TX.to(precision).reshape(-1, pool, width) + pool_bias_UX.to(precision)
    return logits_NUX.softmax(dim=1).mul_(k_TX.to(precision).reshape(-1, pool, width)).sum(dim=1)


def select_pooled(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, pooled: PagedRows, *, start: int, topk: int, pool: int
) -> torch.Tensor:
    """Tokens of the best pools and of the incomplete tail (glm5_next; pools start at multiples of `pool`).

    Returns:
        int32 [T, topk + pool - 1]: tokens of the best min(topk // pool, visible // pool) pools whose last token is
        visible, then the visible % pool tokens of the incomplete pool, all ascending, then -1.

    Raises:
        ValueError: as `select`, or pool < 1.
    """
    if pool < 1 or topk < 1:
        raise ValueError(f"topk={topk}, pool={pool}: both are at least 1")
    num_queries = len(q_TIX)
    check_queries(q_TIX, w_TI, pooled, needed=(start + num_queries) // pool)
    visible_T = torch.arange(start + 1, start + num_queries + 1, device=q_TIX.device)
    places = topk // pool
    pools_TS = visible_T.new_empty(num_queries, 0)
    if places:
        pools_TS = _select_visible(q_TIX, w_TI, pooled, visible_T=visible_T // pool, places=places)
    return tokens_of_pools(pools_TS, visible_T, topk=topk, pool=pool)


def tokens_of_pools(chosen_TS: torch.Tensor, visible_T: torch.Tensor, *, topk: int, pool: int) -> torch.Tensor:
    """int32 [T, topk + pool - 1]: the tokens of the chosen pools (S = topk // pool of them, ascending, then -1), then
    those of each query's incomplete pool, then -1. `visible_T` counts the tokens that a query sees."""
    num_queries, places = chosen_TS.shape
    # int32 throughout: at 1024 queries and 2048 places each of these tables is 8 MiB, and several live at once
    chosen_TS, visible_T1 = chosen_TS.to(torch.int32), visible_T[:, None].to(torch.int32)
    complete_T1 = visible_T1 // pool
    columns_W = torch.arange(topk + pool - 1, dtype=torch.int32, device=chosen_TS.device)
    offset_TW = columns_W - complete_T1.clamp(max=places) * pool
    tail_TW = complete_T1 * pool + offset_TW
    tokens_TW = torch.where((offset_TW >= 0) & (tail_TW < visible_T1), tail_TW, -1)
    if places:
        members_TSU = chosen_TS[..., None] * pool + torch.arange(pool, dtype=torch.int32, device=chosen_TS.device)
        width = places * pool
        is_pool_TW = offset_TW[:, :width] < 0
        tokens_TW[:, :width] = torch.where(is_pool_TW, members_TSU.view(num_queries, width), tokens_TW[:, :width])
    return tokens_TW


class _Best(NamedTuple):
    """The running lists of all scored queries, ascending by position."""

    scores_TS: torch.Tensor
    positions_TS: torch.Tensor


def _select_visible(
    q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, visible_T: torch.Tensor, places: int
) -> torch.Tensor:
    """int32 [T, places] for queries that see keys [0, visible); `visible_T` never falls."""
    columns_S = torch.arange(places, dtype=torch.int32, device=q_TIX.device)
    chosen_TS = torch.where(columns_S < visible_T[:, None], columns_S, -1).to(torch.int32)
    # Queries that see no more than they may keep take everything: no score decides anything for them.
    skipped = int((visible_T <= places).sum())
    if skipped == len(q_TIX):
        return chosen_TS
    precision = _precision(q_TIX)
    q_TIX, w_TI, visible_T = q_TIX[skipped:].to(precision), w_TI[skipped:].to(precision), visible_T[skipped:]
    limits = visible_T.tolist()
    shape = (len(q_TIX), places)
    best = _Best(q_TIX.new_empty(shape), chosen_TS[skipped:])
    num_queries = max(1, PRODUCT_ROWS // q_TIX.shape[1])
    begin, width = 0, _whole_blocks(max(FIRST_PANEL, places))
    widest = max(MAX_PANEL, width)
    buffers = _Buffers.allocate(q_TIX, num_queries, min(widest, limits[-1]))
    while begin < limits[-1]:
        end = min(begin + width, limits[-1])
        k_NXK = _decode_panel(keys, begin, end, precision)
        for first in range(0, len(q_TIX), num_queries):
            last = min(first + num_queries, len(q_TIX))
            if limits[last - 1] <= begin:
                continue
            rows = slice(first, last)
            seen = min(end, limits[last - 1]) - begin
            scores_QL = buffers.score(q_TIX[rows], w_TI[rows], k_NXK[: -(-seen // KEY_BLOCK)])
            if limits[first] < begin + scores_QL.shape[1]:
                _hide_future(scores_QL, visible_T[rows], begin)
            if begin == 0:
                _start_lists(best, rows, scores_QL)
            else:
                _merge(best, rows, scores_QL, begin)
        begin = end
        width = min(begin, widest)
    return chosen_TS


class _Buffers(NamedTuple):
    """Memory of one call's products and scores, used again by every block."""

    products: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def allocate(cls, q_TIX: torch.Tensor, num_queries: int, panel: int) -> _Buffers:
        rows = num_queries * q_TIX.shape[1]
        return cls(q_TIX.new_empty(rows * KEY_BLOCK), q_TIX.new_empty(num_queries * _whole_blocks(panel)))

    def score(self, q_QIX: torch.Tensor, w_QI: torch.Tensor, k_NXK: torch.Tensor) -> torch.Tensor:
        """[Q, N K] scores of all keys of the blocks, filling keys too."""
        num_queries, num_heads, width = q_QIX.shape
        num_blocks = len(k_NXK)
        q_RX = q_QIX.reshape(-1, width)
        products_RK = self.products[: len(q_RX) * KEY_BLOCK].view(len(q_RX), KEY_BLOCK)
        scores_Q1L = self.scores[: num_queries * num_blocks * KEY_BLOCK].view(num_queries, 1, num_blocks * KEY_BLOCK)
        products_QIK = products_RK.view(num_queries, num_heads, KEY_BLOCK)
        for number, k_XK in enumerate(k_NXK):
            torch.mm(q_RX, k_XK, out=products_RK)
            products_RK.relu_()
            columns = slice(number * KEY_BLOCK, (number + 1) * KEY_BLOCK)
            scores_Q1L[:, :, columns] = torch.bmm(w_QI[:, None], products_QIK)
        return scores_Q1L[:, 0]


def _decode_panel(keys: PagedRows, begin: int, end: int, precision: torch.dtype) -> torch.Tensor:
    """[N, X, K] keys in blocks, transposed (the faster operand) and filled up with zeros."""
    k_LX = keys.read(begin, end, precision)
    k_NKX = k_LX.new_zeros(_whole_blocks(end - begin), k_LX.shape[1])
    k_NKX[: end - begin] = k_LX
    return k_NKX.view(-1, KEY_BLOCK, k_LX.shape[1]).mT.contiguous()


def _hide_future(scores_QL: torch.Tensor, visible_Q: torch.Tensor, begin: int) -> None:
    positions_L = torch.arange(begin, begin + scores_QL.shape[1], device=scores_QL.device)
    scores_QL.masked_fill_(positions_L >= visible_Q[:, None], -torch.inf)


def _start_lists(best: _Best, rows: slice, scores_QL: torch.Tensor) -> None:
    """The first panel holds at least as many visible keys as there are places, so every list is full from here on."""
    scores_QL = torch.where(scores_QL.isnan(), -torch.inf, scores_QL)
    positions_L = torch.arange(scores_QL.shape[1], dtype=torch.int32, device=scores_QL.device)
    _keep_best(best, rows, scores_QL, positions_L.expand(scores_QL.shape))


def _merge(best: _Best, rows: slice, scores_QL: torch.Tensor, begin: int) -> None:
    """Lets the panel's keys that beat a list's worst score compete with the list."""
    is_candidate_QL = scores_QL > best.scores_TS[rows].amin(1, keepdim=True)  # False for NaN and for hidden keys
    query_C, column_C = _find(is_candidate_QL)
    if len(query_C) == 0:
        return
    counts_Q = torch.bincount(query_C, minlength=len(scores_QL))
    offsets_Q = counts_Q.cumsum(0) - counts_Q
    place_C = torch.arange(len(query_C), device=query_C.device) - offsets_Q[query_C]
    shape = (len(scores_QL), int(counts_Q.max()))
    new_scores_QC = scores_QL.new_full(shape, -torch.inf)
    new_positions_QC = torch.zeros(shape, dtype=torch.int32, device=scores_QL.device)
    new_scores_QC[query_C, place_C] = scores_QL[query_C, column_C]
    new_positions_QC[query_C, place_C] = (column_C + begin).to(torch.int32)
    _keep_best(
        best,
        rows,
        torch.cat([best.scores_TS[rows], new_scores_QC], dim=1),
        torch.cat([best.positions_TS[rows], new_positions_QC], dim=1),
    )


def _find(is_candidate_QL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the True entries, row by row. Few are True: eight are looked at together first."""
    words_QL = is_candidate_QL.view(torch.int64)
    query_M, word_M = words_QL.nonzero(as_tuple=True)
    found_C, byte_C = words_QL[query_M, word_M, None].view(torch.bool).nonzero(as_tuple=True)
    return query_M[found_C], word_M[found_C] * 8 + byte_C


def _keep_best(best: _Best, rows: slice, scores_QC: torch.Tensor, positions_QC: torch.Tensor) -> None:
    """Writes the best `places` of each row, which lie in ascending position and stay so.

    Unused candidates (-inf, at a row's end) never get in: a full list stands before them and wins every tie.
    """
    places = best.scores_TS.shape[1]
    worst_Q1 = scores_QC.topk(places, dim=1, sorted=False).values.amin(1, keepdim=True)
    is_kept_QC = scores_QC >= worst_Q1
    if int(is_kept_QC.sum()) != len(scores_QC) * places:
        is_better_QC = scores_QC > worst_Q1
        ties_QC = (is_kept_QC & ~is_better_QC).to(torch.int32)
        free_Q1 = places - is_better_QC.sum(1, keepdim=True)
        is_kept_QC = is_better_QC | ((ties_QC > 0) & (ties_QC.cumsum(1) <= free_Q1))
    kept = is_kept_QC.view(-1).nonzero()[:, 0]
    best.scores_TS[rows] = scores_QC.view(-1)[kept].view(-1, places)
    best.positions_TS[rows] = positions_QC.reshape(-1)[kept].view(-1, places)


def check_queries(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, needed: int) -> None:
    """ValueError unless queries, head weights and keys fit each other and `needed` keys are cached."""
    if q_TIX.ndim != 3 or w_TI.shape != q_TIX.shape[:2] or q_TIX.shape[2] != keys.format.width:
        raise ValueError(
            f"index queries {tuple(q_TIX.shape)}, weights {tuple(w_TI.shape)}, keys {keys.format.width} wide: "
            "give q [T, heads, width], w [T, heads] and keys of that width"
        )
    if keys.num_rows < needed:
        raise ValueError(f"{keys.num_rows} cached keys, but the last query sees {needed}: write the keys first")


def _whole_blocks(num_keys: int) -> int:
    return -(-num_keys // KEY_BLOCK) * KEY_BLOCK


def _precision(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
