"""KDA by the compiled kernels (cpu_src): fp32 accuracy for every gate; fp64 inputs go to `plain`.

Legend: T tokens, H q/k heads, G value heads (value head g uses q/k head g * H // G), K key dim, V value dim,
N segments or requests.

`prepare` is lazy: the state-independent part of a tile is cheaper to make again (a sixth of the work) than to write to
memory and read back, so `scan` and `summarize` each make it tile by tile and nothing grows with T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longprefill.kernels.contracts import KdaInputs, KdaScan, KdaStep, Summary
from longprefill.kernels.native.library import COMPILED_DTYPES, ops
from longprefill.kernels.segments import segment_bounds

from . import plain
from .algebra import compute_dtype, decay_slope, keep_states
from .tiles import check_interior

L2_EPS = 1e-6
MAX_KEY_DIM = 256
"""Wider keys go to `plain`: a tile's work memory would no longer fit the second-level cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """One call's inputs as the kernels read them: fp32, contiguous within a row."""

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_TGV: torch.Tensor
    g_TGK: torch.Tensor
    beta_TG: torch.Tensor
    bounds: list[tuple[int, int]]
    offsets: list[int]
    scale: float
    out_dtype: torch.dtype


def gate(
    x_TGK: torch.Tensor, a_log_G: torch.Tensor, dt_bias_GK: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay g <= 0 [T, G, K], fp32.

    `lower_bound` None is Kimi-Linear's softplus gate, a number in [-5, 0) the bounded gate: two models, not two
    approximations of one.
    """
    if x_TGK.dtype not in COMPILED_DTYPES:
        return plain.gate(x_TGK, a_log_G, dt_bias_GK, lower_bound)
    return ops().kda_gate(
        _rows(x_TGK), decay_slope(a_log_G, torch.float32), dt_bias_GK.float().contiguous(), lower_bound
    )


def l2_normalize(x_THK: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dim, fp32. A zero vector stays zero."""
    if x_THK.dtype not in COMPILED_DTYPES or x_THK.dim() != 3:
        return plain.l2_normalize(x_THK)
    return ops().kda_l2_normalize(_rows(x_THK), L2_EPS)


def make_inputs(
    raw_TC: torch.Tensor, weight_CW: torch.Tensor, decay_TGK: torch.Tensor, beta_TG: torch.Tensor, *,
    offsets: Sequence[int], history_NWC: torch.Tensor, num_heads: int, a_log_G: torch.Tensor,
    dt_bias_GK: torch.Tensor, lower_bound: float | None, largest_beta: float,
) -> KdaInputs:  # fmt: skip
    """One pass over memory (cpu_src/front.cpp). Shapes as in `KdaKernels.make_inputs`.

    Raises:
        ValueError: `offsets` do not cover the T rows.
    """
    if raw_TC.dtype not in COMPILED_DTYPES:
        return plain.make_inputs(
            raw_TC, weight_CW, decay_TGK, beta_TG, offsets=offsets, history_NWC=history_NWC, num_heads=num_heads,
            a_log_G=a_log_G, dt_bias_GK=dt_bias_GK, lower_bound=lower_bound, largest_beta=largest_beta,
        )  # fmt: skip
    segment_bounds(offsets, raw_TC.shape[0])
    out_dtype = raw_TC.dtype
    if not raw_TC.dtype == decay_TGK.dtype == beta_TG.dtype:
        raw_TC, decay_TGK, beta_TG = raw_TC.float(), decay_TGK.float(), beta_TG.float()
    q_THK, k_THK, v_TGV, g_TGK, new_beta_TG = ops().kda_inputs(
        _rows(raw_TC), weight_CW.float().t().contiguous(), _rows(decay_TGK), _rows(beta_TG), list(offsets),
        _compiled(history_NWC).contiguous(), num_heads, decay_slope(a_log_G, torch.float32),
        dt_bias_GK.float().contiguous(), lower_bound, largest_beta, L2_EPS,
    )  # fmt: skip
    return KdaInputs(q_THK, k_THK, v_TGV.to(out_dtype), g_TGK, new_beta_TG)


def prepare(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_TGV: torch.Tensor, g_TGK: torch.Tensor, beta_TG: torch.Tensor,
    *, offsets: Sequence[int], scale: float,
) -> PreparedInputs | plain.PreparedTiles:  # fmt: skip
    """Checks and casts; the tiles are made where they are used. Shapes as in `KdaKernels.prepare`.

    Raises:
        ValueError: `offsets` do not cover the T rows, or value heads are no multiple of q/k heads.
    """
    if compute_dtype(q_THK, k_THK, v_TGV, g_TGK, beta_TG) == torch.float64 or k_THK.shape[-1] > MAX_KEY_DIM:
        return plain.prepare(q_THK, k_THK, v_TGV, g_TGK, beta_TG, offsets=offsets, scale=scale)
    if v_TGV.shape[1] % k_THK.shape[1]:
        raise ValueError(f"{v_TGV.shape[1]} value heads, {k_THK.shape[1]} q/k heads: value heads must be a multiple")
    return PreparedInputs(
        q_THK=_rows(q_THK.float()),
        k_THK=_rows(k_THK.float()),
        v_TGV=_rows(_compiled(v_TGV)),
        g_TGK=_rows(g_TGK.float()),
        beta_TG=_rows(beta_TG.float()),
        bounds=segment_bounds(offsets, v_TGV.shape[0]),
        offsets=list(offsets),
        scale=scale,
        out_dtype=v_TGV.dtype,
    )


def summarize(
    prepared: PreparedInputs | plain.PreparedTiles, segment: int, *, initial_state_GKV: torch.Tensor | None = None
) -> Summary:
    """[E | M] of one segment in one pass over V + K columns; with an initial state, its true final state only."""
    if isinstance(prepared, plain.PreparedTiles):
        return plain.summarize(prepared, segment, initial_state_GKV=initial_state_GKV)
    start, end = prepared.bounds[segment]
    initial = None if initial_state_GKV is None else initial_state_GKV.float().contiguous()
    state_GKV, transition_GKK, is_there_G = ops().kda_summarize(
        prepared.k_THK, prepared.v_TGV, prepared.g_TGK, prepared.beta_TG, start, end, initial
    )
    return Summary(state_GKV, transition_GKK if bool(is_there_G.any()) else None)


def scan(
    prepared: PreparedInputs | plain.PreparedTiles,
    initial_state_NGKV: torch.Tensor | None,
    *,
    interior: Sequence[tuple[int, int]] = (),
) -> KdaScan:
    """Outputs in v's dtype and states of all segments; threads take (segment, head) pairs."""
    if isinstance(prepared, plain.PreparedTiles):
        return plain.scan(prepared, initial_state_NGKV, interior=interior)
    check_interior(interior, prepared.bounds)
    initial = None if initial_state_NGKV is None else initial_state_NGKV.float().contiguous()
    out_TGV, state_NGKV, interior_BGKV = ops().kda_scan(
        prepared.q_THK, prepared.k_THK, prepared.v_TGV, prepared.g_TGK, prepared.beta_TG,
        prepared.offsets, prepared.scale, initial, [n for n, _ in interior], [rows for _, rows in interior],
    )  # fmt: skip
    return KdaScan(out_TGV.to(prepared.out_dtype), state_NGKV, interior_BGKV)


def step(
    q_NHK: torch.Tensor, k_NHK: torch.Tensor, v_NGV: torch.Tensor, g_NGK: torch.Tensor, beta_NG: torch.Tensor,
    states_GKV: Sequence[torch.Tensor], *, scale: float, in_place: bool = False,
) -> KdaStep:  # fmt: skip
    """One token of each request; threads take (request, head) pairs."""
    tensors = (q_NHK, k_NHK, v_NGV, g_NGK, beta_NG)
    if compute_dtype(*tensors, *states_GKV) == torch.float64:
        return plain.step(*tensors, states_GKV, scale=scale, in_place=in_place)
    q_NHK, k_NHK, g_NGK, beta_NG = (_rows(x.float()) for x in (q_NHK, k_NHK, g_NGK, beta_NG))
    old_GKV = [state.float().contiguous() for state in states_GKV]
    new_GKV = old_GKV if in_place else [torch.empty_like(state) for state in old_GKV]
    out_NGV = ops().kda_step(q_NHK, k_NHK, _rows(_compiled(v_NGV)), g_NGK, beta_NG, old_GKV, new_GKV, scale)
    return KdaStep(out_NGV.to(v_NGV.dtype), keep_states(new_GKV, states_GKV, in_place=in_place))


def _compiled(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in COMPILED_DTYPES else x.float()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x itself if each row of dim 0 lies in one piece, wherever the rows are; else a copy."""
    return x if x[:1].is_contiguous() else x.contiguous()
