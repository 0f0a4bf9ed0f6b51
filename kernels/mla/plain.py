"""Latent attention in blocked torch operators: the CPU default, and right on any device.

Legend: T queries, B queries of a block, H heads, L = R + P latent row (c | k_R), R latent rank, P rope dim, S places,
Q = nope + P query dim, N nope dim, V value dim, K keys of a block.

Both forms accumulate and take the softmax in fp32 (fp64 from fp64). README.md has the derivation and the measurements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Bf16Rows, Fp32Rows

GATHER_BYTES = 4 << 20
"""Gathered rows of one query block of `sparse`: about a core's level-2 cache, and enough queries to hide call costs."""
DECODED_BYTES = 256 << 20
"""Largest cache that `sparse` decodes whole, when its queries read every row twice or more on average."""
KEY_BLOCK = 512
"""Keys that `dense` expands at a time; QUERY_BLOCK x KEY_BLOCK logits of 8 heads are 4 MB and run at sgemm's speed."""
QUERY_BLOCK = 256


def sparse(
    q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, scale: float, latent_rank: int
) -> torch.Tensor:
    """Absorbed attention over selected rows (spec: FlashMLA sparse prefill, DeepSeek-V3.2).

    Args:
        q_THL: absorbed queries [T, H, R + P].
        rows: latent rows of the job, R + P wide.
        indices_TS: int positions without duplicates; -1 is no key, anywhere in the row.
        scale: factor of the logits, always (nope + P) ** -0.5 times yarn's square, never (R + P) ** -0.5.
        latent_rank: R.

    Returns:
        [T, H, R] in q's dtype. A query without a key gives zeros. What lies in a row that a query did not select never
        reaches it, NaN included.

    Raises:
        ValueError: shapes that do not fit each other, a scale that is not above 0, or an index outside the cache.
    """
    check_sparse(q_THL, rows, indices_TS, latent_rank=latent_rank, scale=scale)
    num_queries, num_heads, width = q_THL.shape
    out_THR = q_THL.new_zeros(num_queries, num_heads, latent_rank)
    if indices_TS.numel() == 0:
        return out_THR
    block = max(1, GATHER_BYTES // (indices_TS.shape[1] * width * q_THL.dtype.itemsize))
    gather = _Gather.plan(rows, q_THL.dtype, num_reads=indices_TS.numel())
    buffer = q_THL.new_empty(min(block, num_queries) * indices_TS.shape[1], width)
    for begin in range(0, num_queries, block):
        indices_BS = indices_TS[begin : begin + block].long()
        is_key_BS = indices_BS >= 0
        used = int(is_key_BS.any(0).nonzero().amax()) + 1 if bool(is_key_BS.any()) else 0
        if used == 0:
            continue
        indices_BS, is_key_BS = indices_BS[:, :used], is_key_BS[:, :used]
        all_keys = bool(is_key_BS.all())
        rows_BSL = gather.read(indices_BS if all_keys else indices_BS.clamp(min=0), buffer)
        if not all_keys:
            rows_BSL.masked_fill_(~is_key_BS[..., None], 0)  # a weight of 0 would not silence a NaN
        q_BHL = q_THL[begin : begin + block]
        out_BHL = functional.scaled_dot_product_attention(
            q_BHL[:, None],
            rows_BSL[:, None],
            rows_BSL[
                :, None
            ],  # the rope columns are dropped afterwards: one contiguous operand beats a strided narrower one
            attn_mask=None if all_keys else is_key_BS[:, None, None],
            scale=scale,
        )[:, 0]
        if not all_keys:
            out_BHL = out_BHL.masked_fill(~is_key_BS.any(1)[:, None, None], 0)
        # Of numbers that are not finite torch's kernels make NaN or 0, by shape.
        broken_B = ~torch.isfinite(_sum(rows_BSL, (1, 2)) + _sum(q_BHL, (1, 2)))
        if bool(broken_B.any()):
            out_BHL[broken_B] = _by_formula(q_BHL[broken_B], rows_BSL[broken_B], is_key_BS[broken_B], scale)
        out_THR[begin : begin + block] = out_BHL[..., :latent_rank]
    return out_THR


def _by_formula(q_BHL: torch.Tensor, rows_BSL: torch.Tensor, is_key_BS: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, H, L]: the softmax as it is written, for rows that are not finite; those of no key are 0. No key: zeros."""
    precision = _precision(q_BHL)
    wide_BSL = rows_BSL.to(precision)
    logits_BHS = torch.bmm(q_BHL.to(precision), wide_BSL.mT).mul_(scale)
    weights_BHS = logits_BHS.masked_fill_(~is_key_BS[:, None], -torch.inf).softmax(-1)
    return torch.bmm(weights_BHS, wide_BSL).masked_fill_(~is_key_BS.any(1)[:, None, None], 0).to(q_BHL.dtype)


def selected(
    q_THQ: torch.Tensor,
    rows: PagedRows,
    indices_TS: torch.Tensor,
    w_uk_HNR: torch.Tensor,
    w_uv_HVR: torch.Tensor,
    *,
    start: int,
    scale: float,
) -> torch.Tensor:
    """Attention over selected rows in the absorbed form.

    Args:
        q_THQ: queries [T, H, nope + P], rope dims last, of positions start, start + 1, ...
        rows: latent rows of the job.
        indices_TS: int positions up to each query's own, without duplicates; -1 is no key, anywhere in the row.
        w_uk_HNR: key expansion of each head.
        w_uv_HVR: value expansion of each head.
        start: position of the first query.
        scale: factor of the logits.

    Returns:
        [T, H, V] in q's dtype. A query without a key gives zeros.

    Raises:
        ValueError: shapes that do not fit each other, a scale that is not above 0, or an index of a row that its query
            does not see.
    """
    check_selected(q_THQ, rows, indices_TS, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    q_THL = absorbed(q_THQ, w_uk_HNR)
    return values_of(sparse(q_THL, rows, indices_TS, scale=scale, latent_rank=w_uk_HNR.shape[2]), w_uv_HVR)


def absorbed(q_THQ: torch.Tensor, w_uk_HNR: torch.Tensor) -> torch.Tensor:
    """[T, H, R + P]: queries that meet latent rows as they are cached."""
    nope = w_uk_HNR.shape[1]
    q_HTR = torch.bmm(q_THQ[..., :nope].transpose(0, 1), w_uk_HNR.to(q_THQ.dtype))
    return torch.cat((q_HTR.transpose(0, 1), q_THQ[..., nope:]), dim=-1)


def values_of(latent_THR: torch.Tensor, w_uv_HVR: torch.Tensor) -> torch.Tensor:
    """[T, H, V] of weighted latents."""
    return torch.bmm(latent_THR.transpose(0, 1), w_uv_HVR.to(latent_THR.dtype).mT).transpose(0, 1)


def dense(
    q_THQ: torch.Tensor, rows: PagedRows, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, *, start: int, scale: float
) -> torch.Tensor:
    """Causal attention with expanded keys and values, each key block expanded once for all queries.

    Args:
        q_THQ: queries [T, H, nope + P], rope dims last, of positions start, start + 1, ...
        rows: latent rows of the job; rows [0, start + T) are read.
        w_uk_HNR: key expansion of each head.
        w_uv_HVR: value expansion of each head.
        start: position of the first query, which sees rows [0, start].
        scale: factor of the logits.

    Returns:
        [T, H, V] in q's dtype. A NaN row reaches only queries at or after it.

    Raises:
        ValueError: shapes that do not fit each other, a scale that is not above 0, or fewer cached rows than the last
            query sees.
    """
    check_dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    num_queries, num_heads, _ = q_THQ.shape
    if num_queries == 0:  # torch's fused kernel ends the process when it has no query
        return q_THQ.new_empty(0, num_heads, w_uv_HVR.shape[1])
    # Half precision runs in torch's fused CPU kernel, which keeps logits and sums in fp32; elsewhere fp32 products do.
    is_fused = q_THQ.device.type == "cpu" and q_THQ.dtype in (torch.bfloat16, torch.float16)
    dtype = q_THQ.dtype if is_fused else _precision(q_THQ)
    attend = _attend_fused if is_fused else _attend
    q_HTQ = q_THQ.transpose(0, 1).to(dtype).contiguous()
    expansion = _Expansion(rows, w_uk_HNR.to(dtype), w_uv_HVR.to(dtype))
    shape, precision = (num_heads, num_queries), _precision(q_THQ)
    state = _Partial(
        torch.full(shape, -torch.inf, dtype=precision, device=q_THQ.device),
        torch.zeros(shape, dtype=precision, device=q_THQ.device),
        torch.zeros(*shape, w_uv_HVR.shape[1], dtype=precision, device=q_THQ.device),
    )
    for begin in range(0, start, KEY_BLOCK):
        k_HKQ, v_HKV = expansion.block(begin, min(begin + KEY_BLOCK, start))
        _fold(state, slice(0, num_queries), attend(q_HTQ, k_HKQ, v_HKV, scale))
    for first in range(0, num_queries, KEY_BLOCK):
        last = min(first + KEY_BLOCK, num_queries)
        k_HKQ, v_HKV = expansion.block(start + first, start + last)
        if last < num_queries:
            _fold(state, slice(last, num_queries), attend(q_HTQ[:, last:], k_HKQ, v_HKV, scale))
        # Weight 0 times a NaN value is NaN: a block with non-finite rows is cut to each query's own view.
        size = 1 if not bool(torch.isfinite(_sum(k_HKQ) + _sum(v_HKV))) else last - first
        for query in range(first, last, size):
            part = slice(query, query + size)
            seen = query + size - first
            is_causal = size > 1
            _fold(state, part, attend(q_HTQ[:, part], k_HKQ[:, :seen], v_HKV[:, :seen], scale, is_causal=is_causal))
    return state.weighted_HTV.div_(state.sum_HT[..., None]).transpose(0, 1).to(q_THQ.dtype)


def check_sparse(
    q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, latent_rank: int, scale: float
) -> None:
    """ValueError unless queries, rows, indices, rank and scale fit each other and all selected rows are cached."""
    fits = q_THL.dim() == 3 and indices_TS.dim() == 2 and len(indices_TS) == len(q_THL)
    width = rows.format.width
    if not fits or q_THL.shape[2] != width or not 0 < latent_rank <= width:
        raise ValueError(
            f"sparse attention of q {tuple(q_THL.shape)}, indices {tuple(indices_TS.shape)}, rows {width} wide, "
            f"latent_rank={latent_rank}: give q [T, heads, row width], indices [T, places], rank up to the width"
        )
    _check_scale(scale)
    if indices_TS.numel() and int(indices_TS.max()) >= rows.num_rows:
        raise ValueError(f"index {int(indices_TS.max())} of {rows.num_rows} cached rows: select only cached positions")


def check_dense(
    q_THQ: torch.Tensor, rows: PagedRows, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, *, start: int, scale: float
) -> None:
    """ValueError unless queries, rows, expansions and scale fit each other and all visible rows are cached."""
    num_queries, num_heads, query_width = q_THQ.shape
    nope, rank = w_uk_HNR.shape[1:]
    rope = rows.format.width - rank
    if rope < 0 or query_width != nope + rope or w_uv_HVR.shape[::2] != (num_heads, rank) or len(w_uk_HNR) != num_heads:
        raise ValueError(
            f"dense attention of q {tuple(q_THQ.shape)}, w_uk {tuple(w_uk_HNR.shape)}, w_uv {tuple(w_uv_HVR.shape)}, "
            f"rows {rows.format.width} wide: give q [T, H, N + P], w_uk [H, N, R], w_uv [H, V, R], rows [R + P]"
        )
    if rows.num_rows < start + num_queries:
        raise ValueError(
            f"{rows.num_rows} cached rows, but the last query sees {start + num_queries}: write them first"
        )
    _check_scale(scale)


def check_selected(
    q_THQ: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor,
    *, start: int, scale: float,
) -> None:  # fmt: skip
    """ValueError unless `check_dense` holds and every query selects rows that it sees."""
    check_dense(q_THQ, rows, w_uk_HNR, w_uv_HVR, start=start, scale=scale)
    if indices_TS.dim() != 2 or len(indices_TS) != len(q_THQ):
        raise ValueError(
            f"attention of q {tuple(q_THQ.shape)} over indices {tuple(indices_TS.shape)}: give q [T, heads, N + P], "
            "indices [T, places]"
        )
    if indices_TS.numel() == 0:
        return
    last_T = torch.arange(start, start + len(q_THQ), device=indices_TS.device)
    beyond_T = indices_TS.amax(1) > last_T
    if bool(beyond_T.any()):
        query = int(beyond_T.nonzero()[0])
        raise ValueError(
            f"query {query} at position {start + query} selects row {int(indices_TS[query].max())}: "
            f"select rows 0 to {start + query}, or -1 for none"
        )


def _check_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}: the factor of the logits must be finite and above 0")


class _Gather(NamedTuple):
    """Reads rows at any positions as numbers of the queries' dtype, the cheapest way this cache allows."""

    rows: PagedRows
    dtype: torch.dtype
    decoded_NL: torch.Tensor | None
    """Rows as numbers, indexed by `slots` of the logical page; None: gather bytes, then decode."""
    slots: torch.Tensor | None
    """First row of each logical page in `decoded_NL`; None: positions are row numbers."""

    @classmethod
    def plan(cls, rows: PagedRows, dtype: torch.dtype, *, num_reads: int) -> _Gather:
        stored = {Fp32Rows: torch.float32, Bf16Rows: torch.bfloat16}.get(type(rows.format))
        if stored == dtype:  # the pool itself is a table of numbers
            pool_NB = rows.pages_NPB.view(-1, rows.format.row_bytes)
            slots = torch.tensor(rows.table, device=pool_NB.device) * rows.page_rows
            return cls(rows, dtype, rows.format.decode(pool_NB, dtype), slots)
        decoded_bytes = rows.num_rows * rows.format.width * dtype.itemsize
        if num_reads >= 2 * rows.num_rows and decoded_bytes <= DECODED_BYTES:
            return cls(rows, dtype, rows.read(0, rows.num_rows, dtype), None)
        return cls(rows, dtype, None, None)

    def read(self, indices_BS: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """[B, S, L], which the caller may change and the next call overwrites."""
        if self.decoded_NL is None:
            return self.rows.gather(indices_BS, self.dtype)
        if self.slots is not None:
            size = self.rows.page_rows
            indices_BS = self.slots[indices_BS // size] + indices_BS % size
        rows = buffer[: indices_BS.numel()]
        # Memory that is touched for the first time costs more than the gathering: one buffer serves all blocks.
        torch.index_select(self.decoded_NL, 0, indices_BS.reshape(-1), out=rows)
        return rows.view(*indices_BS.shape, -1)


class _Expansion(NamedTuple):
    rows: PagedRows
    w_uk_HNR: torch.Tensor
    w_uv_HVR: torch.Tensor

    def block(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [H, K, N + P] and values [H, K, V] of rows [begin, end)."""
        num_heads, nope, rank = self.w_uk_HNR.shape
        rows_KL = self.rows.read(begin, end, self.w_uk_HNR.dtype)
        c_KR = rows_KL[:, :rank]
        k_HKQ = rows_KL.new_empty(num_heads, end - begin, nope + rows_KL.shape[1] - rank)
        k_HKQ[..., :nope] = torch.matmul(c_KR, self.w_uk_HNR.mT)
        k_HKQ[..., nope:] = rows_KL[:, rank:]
        return k_HKQ, torch.matmul(c_KR, self.w_uv_HVR.mT)


class _Partial(NamedTuple):
    """Attention over some of the keys: the largest logit, the sum of exp(logit - max), and the values weighted by it.

    Kept apart, because a log of the sum loses digits at every join: its absolute error is a relative one of the result.
    """

    max_HT: torch.Tensor
    sum_HT: torch.Tensor
    weighted_HTV: torch.Tensor


def _fold(state: _Partial, part: slice, new: _Partial) -> None:
    """Joins attention over further keys into the state's queries `part`."""
    old = _Partial(*(tensor[:, part] for tensor in state))
    max_HT = torch.maximum(old.max_HT, new.max_HT)
    base_HT = _base(max_HT)
    old_factor_HT, new_factor_HT = (old.max_HT - base_HT).exp_(), (new.max_HT - base_HT).exp_()
    old.sum_HT.mul_(old_factor_HT).addcmul_(new.sum_HT, new_factor_HT)
    old.weighted_HTV.mul_(old_factor_HT[..., None])
    old.weighted_HTV.addcmul_(new.weighted_HTV.to(old.weighted_HTV.dtype), new_factor_HT[..., None])
    old.max_HT.copy_(max_HT)


def _attend(
    q_HTQ: torch.Tensor, k_HKQ: torch.Tensor, v_HKV: torch.Tensor, scale: float, *, is_causal: bool = False
) -> _Partial:
    """Attention by matrix products; causal means that query t sees keys [0, t] of the block."""
    num_heads, num_queries, _ = q_HTQ.shape
    result = _Partial(
        q_HTQ.new_empty(num_heads, num_queries),
        q_HTQ.new_empty(num_heads, num_queries),
        q_HTQ.new_empty(num_heads, num_queries, v_HKV.shape[2]),
    )
    for begin in range(0, num_queries, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num_queries)
        seen = end if is_causal else k_HKQ.shape[1]
        logits_HBK = torch.bmm(q_HTQ[:, begin:end], k_HKQ[:, :seen].mT).mul_(scale)
        if is_causal:
            positions = torch.arange(seen, device=q_HTQ.device)
            logits_HBK.masked_fill_(positions > positions[begin:, None], -torch.inf)
        max_HB1 = logits_HBK.amax(2, keepdim=True)
        weights_HBK = logits_HBK.sub_(_base(max_HB1)).exp_()
        result.max_HT[:, begin:end] = max_HB1[..., 0]
        result.sum_HT[:, begin:end] = weights_HBK.sum(2)
        result.weighted_HTV[:, begin:end] = torch.bmm(weights_HBK, v_HKV[:, :seen])
    return result


def _attend_fused(
    q_HTQ: torch.Tensor, k_HKQ: torch.Tensor, v_HKV: torch.Tensor, scale: float, *, is_causal: bool = False
) -> _Partial:
    """The same by the operator below scaled_dot_product_attention on a CPU: the public function hides the log-sum."""
    if not bool(torch.isfinite(_sum(q_HTQ) + _sum(k_HKQ) + _sum(v_HKV))):  # it would make NaN or 0 of them, by shape
        precision = _precision(q_HTQ)
        return _attend(q_HTQ.to(precision), k_HKQ.to(precision), v_HKV.to(precision), scale, is_causal=is_causal)
    value_width = v_HKV.shape[2]
    width = max(value_width, q_HTQ.shape[2])  # the operator wants keys and values equally wide
    out_1HTV, lse_1HT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        functional.pad(q_HTQ, (0, width - q_HTQ.shape[2]))[None],
        functional.pad(k_HKQ, (0, width - k_HKQ.shape[2]))[None],
        functional.pad(v_HKV, (0, width - value_width))[None],
        is_causal=is_causal,
        scale=scale,
    )
    return _Partial(lse_1HT[0], torch.ones_like(lse_1HT[0]), out_1HTV[0, ..., :value_width])


def _base(max_HT: torch.Tensor) -> torch.Tensor:
    """What logits are taken relative to: 0 where all so far are -inf, which then weigh 0 and not exp(-inf + inf)."""
    return max_HT.masked_fill(max_HT == -torch.inf, 0.0)


def _sum(x: torch.Tensor, dims: tuple[int, ...] | None = None) -> torch.Tensor:
    """Finite only where all numbers are; the cheapest test of it. fp16 alone needs a wider sum: its own overflows."""
    return x.sum(dims, dtype=torch.float32 if x.dtype == torch.float16 else None)


def _precision(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
