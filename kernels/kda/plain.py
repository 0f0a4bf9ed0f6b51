"""KDA in tiles of 64 tokens with torch operators: the CPU default, and correct on any device.

Legend: T tokens, H q/k heads, G value heads (value head g uses q/k head g * H // G), K key dim, V value dim,
N segments, C tokens a tile, Z tiles, Y = Z * G tiles of all heads, B blocks of a tile, I rows of a half block,
J = V + K columns.

The derivation and the table of symbols are in README.md of this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longprefill.kernels.contracts import KdaInputs, KdaScan, KdaStep, Summary
from longprefill.kernels.conv import plain as conv
from longprefill.kernels.shapes import check_shape

from .algebra import check_gate, check_inputs, compute_dtype, decay_slope, keep_states, split_decay
from .tiles import TILE_TOKENS as C
from .tiles import TileTable, check_interior, tile_table

L2_EPS = 1e-6
GROUP_BYTES = 8 << 20
"""Tiles are prepared in groups whose work buffers take about this much, so that they stay in cache whatever T."""
POINTWISE_ELEMENTS = 1 << 18
"""Elements a block of rows in the pointwise functions: about 1 MiB, which stays in L2."""
SMALL_SUM = -1.0
"""Sums of g above have a smaller rounding error than products of their exps."""
ZERO_CHECK_TILES = 4
"""A summary looks this often whether its transition has underflowed to exactly zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTiles:
    """The state-independent part of every tile: 4 (3 K + V + C) bytes a token and value head in fp32."""

    w_u_YCJ: torch.Tensor
    """(I + L)^-1 beta [K-tilde | V]: columns [0, K) are W, columns [K, K + V) are U."""
    q_YCK: torch.Tensor
    """scale * q * decay from the tile's start."""
    k_YCK: torch.Tensor
    """k * decay to the tile's end."""
    attention_YCC: torch.Tensor
    """scale * q_i . k_j under the decay between them, j <= i, zero above."""
    change_YK: torch.Tensor
    """With `kept` the decay P of the whole tile, as P S = kept S + change S (`split_decay`)."""
    kept_YK: torch.Tensor
    tiles: TileTable
    num_tokens: int
    num_heads: int
    num_values: int
    out_dtype: torch.dtype


def gate(
    x_TGK: torch.Tensor, a_log_G: torch.Tensor, dt_bias_GK: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay g <= 0 [T, G, K], fp32 (fp64 for fp64 x), by blocks of rows.

    `lower_bound` None is Kimi-Linear's softplus gate, a number in [-5, 0) the bounded gate: two models, not two
    approximations of one.
    """
    check_gate(x_TGK, a_log_G, dt_bias_GK)
    dtype = compute_dtype(x_TGK)
    bias_GK, slope_G1 = dt_bias_GK.to(dtype), decay_slope(a_log_G, dtype).unsqueeze(-1)
    out_TGK = torch.empty(x_TGK.shape, dtype=dtype, device=x_TGK.device)
    for rows in _row_blocks(x_TGK):
        block = torch.add(x_TGK[rows], bias_GK, out=out_TGK[rows])
        if lower_bound is None:
            block.copy_(torch.nn.functional.softplus(block).mul_(-slope_G1))
        else:
            block.mul_(slope_G1).sigmoid_().mul_(lower_bound)
    return out_TGK


def l2_normalize(x_THK: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dim, fp32 (fp64 for fp64 x). A zero vector stays zero."""
    out_THK = torch.empty(x_THK.shape, dtype=compute_dtype(x_THK), device=x_THK.device)
    for rows in _row_blocks(x_THK):
        block = x_THK[rows].to(out_THK.dtype)
        inverse = torch.linalg.vecdot(block, block).add_(L2_EPS).rsqrt_()
        torch.mul(block, inverse.unsqueeze(-1), out=out_THK[rows])
    return out_THK


def make_inputs(
    raw_TC: torch.Tensor, weight_CW: torch.Tensor, decay_TGK: torch.Tensor, beta_TG: torch.Tensor, *,
    offsets: Sequence[int], history_NWC: torch.Tensor, num_heads: int, a_log_G: torch.Tensor,
    dt_bias_GK: torch.Tensor, lower_bound: float | None, largest_beta: float,
) -> KdaInputs:  # fmt: skip
    """conv + SiLU, l2 norm, gate and sigmoid one after the other. Shapes as in `KdaKernels.make_inputs`."""
    _, value_heads, num_keys = decay_TGK.shape
    check_shape(decay_TGK, "decay", len(raw_TC), value_heads, num_keys)
    check_shape(beta_TG, "beta", len(raw_TC), value_heads)
    dtype = compute_dtype(raw_TC)
    mixed_TC = conv.causal_conv_silu(raw_TC.to(dtype), weight_CW, offsets=offsets, history_NWC=history_NWC)
    q_TC, k_TC, v_TC = mixed_TC.tensor_split((num_heads * num_keys, 2 * num_heads * num_keys), dim=1)
    return KdaInputs(
        q_THK=l2_normalize(q_TC.unflatten(1, (num_heads, num_keys))),
        k_THK=l2_normalize(k_TC.unflatten(1, (num_heads, num_keys))),
        v_TGV=v_TC.unflatten(1, (value_heads, -1)).to(raw_TC.dtype),
        g_TGK=gate(decay_TGK, a_log_G, dt_bias_GK, lower_bound),
        beta_TG=largest_beta * torch.sigmoid(beta_TG.to(dtype)),
    )


def prepare(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_TGV: torch.Tensor, g_TGK: torch.Tensor, beta_TG: torch.Tensor,
    *, offsets: Sequence[int], scale: float,
) -> PreparedTiles:  # fmt: skip
    """All tiles of all segments and heads, a group of tiles at a time. Shapes as in `KdaKernels.prepare`.

    Raises:
        ValueError: `offsets` do not cover the T rows, value heads are no multiple of q/k heads, or shapes that do not
            fit each other.
    """
    check_inputs(q_THK, k_THK, v_TGV, g_TGK, beta_TG)
    num_tokens, num_heads, num_values = v_TGV.shape
    num_keys = k_THK.shape[-1]
    tiles = tile_table(offsets, num_tokens)
    dtype, num = compute_dtype(q_THK, k_THK, v_TGV, g_TGK, beta_TG), len(tiles.starts) * num_heads
    new = torch.empty(0, dtype=dtype, device=v_TGV.device)
    prepared = PreparedTiles(
        w_u_YCJ=new.new_empty(num, C, num_keys + num_values),
        q_YCK=new.new_empty(num, C, num_keys),
        k_YCK=new.new_empty(num, C, num_keys),
        attention_YCC=new.new_zeros(num, C, C),
        change_YK=new.new_empty(num, num_keys),
        kept_YK=new.new_empty(num, num_keys),
        tiles=tiles,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_values=num_values,
        out_dtype=v_TGV.dtype,
    )
    work_elements = 3 * C * num_keys + C * C  # alpha, (k, q) and L of one tile and head
    group = max(1, min(len(tiles.starts), GROUP_BYTES // (dtype.itemsize * num_heads * work_elements)))
    work = new.new_empty(group * num_heads * work_elements)
    for first in range(0, len(tiles.starts), group):
        chosen = range(first, min(first + group, len(tiles.starts)))
        rows = [_tile_rows(x, tiles, chosen) for x in (q_THK, k_THK, v_TGV, g_TGK, beta_TG)]
        which = slice(chosen.start * num_heads, chosen.stop * num_heads)
        _prepare_group(*rows, prepared=prepared, which=which, scale=scale, work=work)
    return prepared


def summarize(prepared: PreparedTiles, segment: int, *, initial_state_GKV: torch.Tensor | None = None) -> Summary:
    """[E | M] of one segment in one pass over V + K columns; with an initial state, its true final state only."""
    num_keys, num_values, heads = prepared.k_YCK.shape[-1], prepared.num_values, prepared.num_heads
    with_transition = initial_state_GKV is None
    width = num_values + num_keys if with_transition else num_values
    state_GKJ = prepared.k_YCK.new_zeros(heads, num_keys, width)
    if initial_state_GKV is None:
        state_GKJ[:, :, num_values:].diagonal(dim1=1, dim2=2).fill_(1)
    else:
        check_shape(initial_state_GKV, "initial", *state_GKJ.shape)
        state_GKJ.copy_(initial_state_GKV)
    delta_GCJ = prepared.k_YCK.new_empty(heads, C, width)
    for index, tile in enumerate(prepared.tiles.tile_ids[segment], start=1):
        which = slice(tile * heads, (tile + 1) * heads)
        w_u_GCJ = prepared.w_u_YCJ[which]
        delta_GCJ[:, :, :num_values] = w_u_GCJ[:, :, num_keys:]
        delta_GCJ[:, :, num_values:] = 0
        delta_GCJ.baddbmm_(w_u_GCJ[:, :, :num_keys], state_GKJ, alpha=-1)
        _advance(state_GKJ, prepared, which, delta_GCJ)
        if with_transition and index % ZERO_CHECK_TILES == 0 and _flush_denormals(state_GKJ[:, :, num_values:]):
            # Later tiles multiply this zero: from here on only E is left to compute.
            state_GKJ, delta_GCJ = (x[:, :, :num_values].contiguous() for x in (state_GKJ, delta_GCJ))
            with_transition = False
    state_GKV = state_GKJ[:, :, :num_values].contiguous()
    if not with_transition or _flush_denormals(state_GKJ[:, :, num_values:]):
        return Summary(state_GKV, None)
    return Summary(state_GKV, state_GKJ[:, :, num_values:].contiguous())


def scan(
    prepared: PreparedTiles, initial_state_NGKV: torch.Tensor | None, *, interior: Sequence[tuple[int, int]] = ()
) -> KdaScan:
    """Outputs in v's dtype and states; at each step all running segments and heads go through one bmm."""
    tiles, heads, num_values = prepared.tiles, prepared.num_heads, prepared.num_values
    num_keys, num_segments = prepared.k_YCK.shape[-1], len(tiles.tile_ids)
    check_interior(interior, tiles.bounds)
    interior_BGKV = prepared.k_YCK.new_empty(len(interior), heads, num_keys, num_values)
    sorted_NGKV = prepared.k_YCK.new_zeros(num_segments, heads, num_keys, num_values)
    if initial_state_NGKV is not None:
        check_shape(initial_state_NGKV, "initial", *sorted_NGKV.shape)
        for place, segment in enumerate(tiles.order):
            sorted_NGKV[place] = initial_state_NGKV[segment]
    out_TGV = torch.empty(
        prepared.num_tokens, heads, num_values, dtype=prepared.out_dtype, device=prepared.k_YCK.device
    )
    state_YKV = sorted_NGKV.view(num_segments * heads, num_keys, num_values)

    def keep_interior(num_tiles: int) -> None:
        for place, (segment, rows) in enumerate(interior):
            if rows == num_tiles * C:
                interior_BGKV[place] = sorted_NGKV[tiles.order.index(segment)]

    for num_tiles, (first, end) in enumerate(tiles.steps):
        keep_interior(num_tiles)
        which = slice(first * heads, end * heads)
        running_YKV = state_YKV[: (end - first) * heads]
        w_u_YCJ = prepared.w_u_YCJ[which]
        delta_YCV = torch.baddbmm(w_u_YCJ[:, :, num_keys:], w_u_YCJ[:, :, :num_keys], running_YKV, alpha=-1)
        tile_out_YCV = torch.bmm(prepared.q_YCK[which], running_YKV)
        tile_out_YCV.baddbmm_(prepared.attention_YCC[which], delta_YCV)
        _advance(running_YKV, prepared, which, delta_YCV)
        for tile in range(first, end):
            start, length = tiles.starts[tile], tiles.lengths[tile]
            tile_out_GCV = tile_out_YCV[(tile - first) * heads : (tile - first + 1) * heads]
            out_TGV[start : start + length] = tile_out_GCV[:, :length].transpose(0, 1)
    keep_interior(len(tiles.steps))
    final_NGKV = torch.empty_like(sorted_NGKV)
    for place, segment in enumerate(tiles.order):
        final_NGKV[segment] = sorted_NGKV[place]
    return KdaScan(out_TGV, final_NGKV, interior_BGKV)


def step(
    q_NHK: torch.Tensor, k_NHK: torch.Tensor, v_NGV: torch.Tensor, g_NGK: torch.Tensor, beta_NG: torch.Tensor,
    states_GKV: Sequence[torch.Tensor], *, scale: float, in_place: bool = False,
) -> KdaStep:  # fmt: skip
    """One token of each request, request by request: a state is in cache when it is updated."""
    check_inputs(q_NHK, k_NHK, v_NGV, g_NGK, beta_NG)
    if len(states_GKV) != len(v_NGV):
        raise ValueError(f"{len(states_GKV)} of the states for {len(v_NGV)} requests: must be one a request")
    dtype = compute_dtype(q_NHK, k_NHK, v_NGV, g_NGK, beta_NG, *states_GKV)
    repeat = v_NGV.shape[1] // k_NHK.shape[1]
    k_q_NG2K = torch.stack([k_NHK, q_NHK], dim=2).to(dtype).repeat_interleave(repeat, 1)
    overlap_NG1 = torch.linalg.vecdot(k_q_NG2K[:, :, 0], k_q_NG2K[:, :, 1]).unsqueeze(-1)
    alpha_NGK = g_NGK.to(dtype).exp()
    change_NGK1, kept_NGK1 = (x.unsqueeze(-1) for x in split_decay(g_NGK.to(dtype), alpha_NGK))
    out_NGV, new_GKV = v_NGV.new_empty(v_NGV.shape), []
    for n, given_GKV in enumerate(states_GKV):
        state_GKV, alpha_G1K = given_GKV.to(dtype), alpha_NGK[n].unsqueeze(1)
        read_G2V = torch.bmm(k_q_NG2K[n] * alpha_G1K, state_GKV)
        delta_GV = beta_NG[n].to(dtype).unsqueeze(-1) * (v_NGV[n].to(dtype) - read_G2V[:, 0])
        out_NGV[n] = scale * (read_G2V[:, 1] + overlap_NG1[n] * delta_GV)
        changed_GKV = change_NGK1[n] * state_GKV
        changed_GKV.baddbmm_(k_q_NG2K[n, :, 0].unsqueeze(-1), delta_GV.unsqueeze(1))
        new_GKV.append(changed_GKV.addcmul_(kept_NGK1[n], state_GKV))
    return KdaStep(out_NGV, keep_states(new_GKV, states_GKV, in_place=in_place))


def _advance(state_YKJ: torch.Tensor, prepared: PreparedTiles, which: slice, delta_YCJ: torch.Tensor) -> None:
    """S = P S + K-hat^T Delta over one tile, in place."""
    added_YKJ = prepared.change_YK[which].unsqueeze(-1) * state_YKJ
    added_YKJ.baddbmm_(prepared.k_YCK[which].transpose(1, 2), delta_YCJ)
    state_YKJ.mul_(prepared.kept_YK[which].unsqueeze(-1)).add_(added_YKJ)


def _flush_denormals(x_GKK: torch.Tensor) -> bool:
    """Sets what is below the smallest normal number to 0 in place; true if nothing is left.

    Rounding to nearest never takes a decaying denormal to 0, and arithmetic on it is many times slower.
    """
    is_normal_GKK = x_GKK.abs() >= torch.finfo(x_GKK.dtype).tiny
    if not is_normal_GKK.any():
        return True
    x_GKK.mul_(is_normal_GKK)
    return False


def _row_blocks(x: torch.Tensor) -> list[slice]:
    """Slices of dim 0 that hold about POINTWISE_ELEMENTS elements each."""
    size = max(1, POINTWISE_ELEMENTS // max(1, x[:1].numel()))
    return [slice(start, start + size) for start in range(0, x.shape[0], size)]


def _tile_rows(x_T: torch.Tensor, tiles: TileTable, chosen: range) -> torch.Tensor:
    """Rows of the chosen tiles, [Z, C, ...], 0 where a ragged tile has none. A view if the rows are one run."""
    starts = [tiles.starts[tile] for tile in chosen]
    ragged = [tile for tile in chosen if tiles.lengths[tile] < C]
    shape = (len(starts), C, *x_T.shape[1:])
    if not ragged and starts == list(range(starts[0], starts[0] + len(starts) * C, C)):
        return x_T[starts[0] : starts[0] + len(starts) * C].view(shape)
    out = x_T.new_empty(shape)
    for place, tile in enumerate(chosen):
        length = tiles.lengths[tile]
        out[place, :length] = x_T[tiles.starts[tile] : tiles.starts[tile] + length]
        out[place, length:] = 0
    return out


def _prepare_group(
    q_ZCHK: torch.Tensor, k_ZCHK: torch.Tensor, v_ZCGV: torch.Tensor, g_ZCGK: torch.Tensor, beta_ZCG: torch.Tensor,
    *, prepared: PreparedTiles, which: slice, scale: float, work: torch.Tensor,
) -> None:  # fmt: skip
    """Fills the rows `which` of `prepared`. Every decay is a running product of alpha <= 1 (README, dyadic split).

    `work` is scratch for all groups: fresh pages for every group would cost more than the arithmetic on them.
    """
    num_keys, heads, dtype = k_ZCHK.shape[-1], prepared.num_heads, prepared.k_YCK.dtype
    num_tiles = k_ZCHK.shape[0]
    repeat = heads // k_ZCHK.shape[2]
    split = (num_tiles, heads // repeat, repeat, C)  # value heads as (q/k head, copy)
    q_ZH1CK, k_ZH1CK = (x.to(dtype).transpose(1, 2).unsqueeze(2) for x in (q_ZCHK, k_ZCHK))
    beta_YC1 = beta_ZCG.to(dtype).transpose(1, 2).reshape(-1, C, 1)
    attention_YCC, k_end_YCK = prepared.attention_YCC[which], prepared.k_YCK[which]

    num = num_tiles * heads
    sizes = [num * C * num_keys, num * C * 2 * num_keys, num * C * C]
    alpha, k_q, lower = work[: sum(sizes)].split(sizes)
    alpha_YCK, lower_YCC = alpha.view(num, C, num_keys), lower.view(num, C, C)  # of L only the lower triangle is read
    torch.exp(g_ZCGK.to(dtype).transpose(1, 2), out=alpha_YCK.view(num_tiles, heads, C, num_keys))
    alpha_ZHRCK = alpha_YCK.view(*split, num_keys)
    k_q_YC2K = k_q.view(num, C, 2, num_keys)  # rows (k_i, q_i), decayed from their block's start
    by_head = k_q_YC2K.view(*split, 2, num_keys)
    torch.mul(k_ZH1CK, alpha_ZHRCK, out=by_head[..., 0, :])
    torch.mul(q_ZH1CK, alpha_ZHRCK, out=by_head[..., 1, :])
    k_end_YCK.view(*split, num_keys).copy_(k_ZH1CK.expand(*split, num_keys))
    diagonal_ZHRC = torch.linalg.vecdot(q_ZH1CK, k_ZH1CK).mul_(scale).expand(split)
    attention_YCC.view(*split, C).diagonal(dim1=-2, dim2=-1).copy_(diagonal_ZHRC)

    g_YCK = g_ZCGK.to(dtype).transpose(1, 2).reshape(num, C, num_keys)
    log_decay_YK, decay_YK = _dyadic_products(
        k_q_YC2K, k_end_YCK, g_YCK, alpha_YCK, beta_YC1, lower_YCC, attention_YCC, scale
    )
    prepared.change_YK[which], prepared.kept_YK[which] = split_decay(log_decay_YK, decay_YK)

    w_u_YCJ = prepared.w_u_YCJ[which]
    torch.mul(k_q_YC2K[:, :, 0], beta_YC1, out=w_u_YCJ[:, :, :num_keys])
    torch.mul(k_q_YC2K[:, :, 1], scale, out=prepared.q_YCK[which])
    beta_ZGC1 = beta_YC1.view(num_tiles, heads, C, 1)
    torch.mul(v_ZCGV.to(dtype).transpose(1, 2), beta_ZGC1, out=w_u_YCJ.view(num_tiles, heads, C, -1)[..., num_keys:])
    # X (I + L)^T = rhs^T on transposed views: row-major data is column-major transposed, so the solver works in place.
    rhs_YJC = w_u_YCJ.transpose(1, 2)
    torch.linalg.solve_triangular(
        lower_YCC.transpose(1, 2), rhs_YJC, upper=True, left=False, unitriangular=True, out=rhs_YJC
    )


def _dyadic_products(
    k_q_YC2K: torch.Tensor, k_end_YCK: torch.Tensor, g_YCK: torch.Tensor, alpha_YCK: torch.Tensor,
    beta_YC1: torch.Tensor, lower_YCC: torch.Tensor, attention_YCC: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Fills L (`lower`) and the attention below the diagonal, level by level; the tile's sum of g and decay [Y, K].

    At a level with halves of I rows, `k_q` holds each row times its decay from its half's start and `k_end` each key
    times its decay to its half's end. A block's rows in the second half meet its keys in the first half: one product.
    Then both are carried over to blocks of 2 I rows, so after the last level they hold the decays of the whole tile.
    A block's decay is exp of its sum of g while that is small, the product of its halves' beyond, where the sum is too
    coarse: products of equal numbers just below 1 all round to one side.
    """
    num, _, _, num_keys = k_q_YC2K.shape
    block_sum, block_decay = g_YCK, alpha_YCK
    half = 1
    while half < C:
        blocks = C // (2 * half)
        rows = k_q_YC2K.view(num, blocks, 2, half, 2, num_keys)
        keys = k_end_YCK.view(num, blocks, 2, half, num_keys)
        decay = block_decay.view(num, blocks, 2, num_keys)
        products = torch.bmm(
            rows[:, :, 1].reshape(num * blocks, 2 * half, num_keys),
            keys[:, :, 0].reshape(num * blocks, half, num_keys).transpose(1, 2),
        ).view(num, blocks, half, 2, half)
        beta = beta_YC1.view(num, blocks, 2, half, 1)[:, :, 1]
        torch.mul(products[:, :, :, 0], beta, out=_below_diagonal(lower_YCC, half))
        torch.mul(products[:, :, :, 1], scale, out=_below_diagonal(attention_YCC, half))
        rows[:, :, 1].mul_(decay[:, :, 0].view(num, blocks, 1, 1, num_keys))
        keys[:, :, 0].mul_(decay[:, :, 1].view(num, blocks, 1, num_keys))
        block_sum = block_sum.view(num, blocks, 2, num_keys).sum(2)
        product = decay[:, :, 0] * decay[:, :, 1]
        block_decay = torch.where(block_sum > SMALL_SUM, block_sum.exp(), product)
        half *= 2
    return block_sum.view(num, num_keys), block_decay.view(num, num_keys)


def _below_diagonal(square_YCC: torch.Tensor, half: int) -> torch.Tensor:
    """The view [Y, B, I, I] of each diagonal block's lower left quarter."""
    num, blocks = square_YCC.shape[0], C // (2 * half)
    quarters = square_YCC.view(num, blocks, 2, half, blocks, 2, half)[:, :, 1, :, :, 0]
    return quarters.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
