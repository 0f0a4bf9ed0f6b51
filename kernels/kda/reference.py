"""KDA token by token, the formulas as they stand: the oracle of every other backend. Slow on purpose.

Legend: T tokens, H q/k heads, G value heads (value head g uses q/k head g * H // G), K key dim, V value dim,
N segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longprefill.kernels.contracts import KdaInputs, KdaScan, KdaStep, Summary
from longprefill.kernels.conv import reference as conv
from longprefill.kernels.segments import segment_bounds
from longprefill.kernels.shapes import check_shape

from .algebra import check_gate, check_inputs, compute_dtype, decay_slope, keep_states
from .tiles import check_interior

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTokens:
    """The inputs in compute precision with q and k repeated to value heads; nothing is worked out ahead."""

    q_TGK: torch.Tensor
    k_TGK: torch.Tensor
    v_TGV: torch.Tensor
    alpha_TGK: torch.Tensor
    beta_TG: torch.Tensor
    bounds: list[tuple[int, int]]
    scale: float
    out_dtype: torch.dtype


def gate(
    x_TGK: torch.Tensor, a_log_G: torch.Tensor, dt_bias_GK: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay g <= 0 [T, G, K], fp32 (fp64 for fp64 x).

    `lower_bound` None is Kimi-Linear's softplus gate, a number in [-5, 0) the bounded gate: two models, not two
    approximations of one.
    """
    check_gate(x_TGK, a_log_G, dt_bias_GK)
    dtype = compute_dtype(x_TGK)
    shifted_TGK = x_TGK.to(dtype) + dt_bias_GK.to(dtype)
    slope_G1 = decay_slope(a_log_G, dtype).unsqueeze(-1)
    if lower_bound is None:
        return -slope_G1 * torch.nn.functional.softplus(shifted_TGK)
    return lower_bound * torch.sigmoid(slope_G1 * shifted_TGK)


def l2_normalize(x_THK: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dim, fp32 (fp64 for fp64 x). A zero vector stays zero."""
    x_THK = x_THK.to(compute_dtype(x_THK))
    return x_THK * torch.rsqrt(x_THK.square().sum(-1, keepdim=True) + L2_EPS)


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
) -> PreparedTokens:  # fmt: skip
    """Casts and repeats heads. Shapes as in `KdaKernels.prepare`.

    Raises:
        ValueError: `offsets` do not cover the T rows, value heads are no multiple of q/k heads, or shapes that do not
            fit each other.
    """
    check_inputs(q_THK, k_THK, v_TGV, g_TGK, beta_TG)
    dtype = compute_dtype(q_THK, k_THK, v_TGV, g_TGK, beta_TG)
    repeat = v_TGV.shape[1] // q_THK.shape[1]
    return PreparedTokens(
        q_TGK=q_THK.to(dtype).repeat_interleave(repeat, 1),
        k_TGK=k_THK.to(dtype).repeat_interleave(repeat, 1),
        v_TGV=v_TGV.to(dtype),
        alpha_TGK=g_TGK.to(dtype).exp(),
        beta_TG=beta_TG.to(dtype),
        bounds=segment_bounds(offsets, v_TGV.shape[0]),
        scale=scale,
        out_dtype=v_TGV.dtype,
    )


def summarize(prepared: PreparedTokens, segment: int, *, initial_state_GKV: torch.Tensor | None = None) -> Summary:
    """The affine map of one segment. M is read off by running K extra value columns with v = 0 from the identity."""
    start, end = prepared.bounds[segment]
    v_TGV = prepared.v_TGV
    num_values = v_TGV.shape[-1]
    if initial_state_GKV is not None:
        check_shape(initial_state_GKV, "initial", *prepared.k_TGK.shape[1:], num_values)
        return Summary(_run(prepared, start, end, v_TGV, initial_state_GKV.to(v_TGV.dtype))[1], None)
    k_TGK = prepared.k_TGK
    state_GKJ = v_TGV.new_zeros(*k_TGK.shape[1:], num_values + k_TGK.shape[2])
    state_GKJ[:, :, num_values:] = torch.eye(k_TGK.shape[2], dtype=v_TGV.dtype, device=v_TGV.device)
    values_TGJ = torch.cat([v_TGV, torch.zeros_like(k_TGK)], dim=-1)
    _, state_GKJ = _run(prepared, start, end, values_TGJ, state_GKJ)
    transition_GKK = state_GKJ[:, :, num_values:].contiguous()
    return Summary(
        state_GKJ[:, :, :num_values].contiguous(), transition_GKK if bool(transition_GKK.count_nonzero()) else None
    )


def scan(
    prepared: PreparedTokens, initial_state_NGKV: torch.Tensor | None, *, interior: Sequence[tuple[int, int]] = ()
) -> KdaScan:
    """Outputs in v's dtype and the state after each segment; for a state inside, the segment up to there once more."""
    check_interior(interior, prepared.bounds)
    v_TGV, num_segments = prepared.v_TGV, len(prepared.bounds)
    shape = (num_segments, *prepared.k_TGK.shape[1:], v_TGV.shape[-1])
    if initial_state_NGKV is not None:
        check_shape(initial_state_NGKV, "initial", *shape)
    state_NGKV = v_TGV.new_zeros(shape) if initial_state_NGKV is None else initial_state_NGKV.to(v_TGV.dtype)
    outs, states = [v_TGV.new_zeros(0, *v_TGV.shape[1:])], []
    for (start, end), state_GKV in zip(prepared.bounds, state_NGKV, strict=True):
        out_TGV, final_GKV = _run(prepared, start, end, v_TGV, state_GKV)
        outs.append(out_TGV)
        states.append(final_GKV)
    inside = [v_TGV.new_zeros(0, *shape[1:])]
    for segment, rows in interior:
        start = prepared.bounds[segment][0]
        inside.append(_run(prepared, start, start + rows, v_TGV, state_NGKV[segment])[1].unsqueeze(0))
    final_NGKV = torch.stack(states) if states else v_TGV.new_zeros(shape)
    return KdaScan(torch.cat(outs).to(prepared.out_dtype), final_NGKV, torch.cat(inside))


def step(
    q_NHK: torch.Tensor, k_NHK: torch.Tensor, v_NGV: torch.Tensor, g_NGK: torch.Tensor, beta_NG: torch.Tensor,
    states_GKV: Sequence[torch.Tensor], *, scale: float, in_place: bool = False,
) -> KdaStep:  # fmt: skip
    """One token of each request: N segments of one row."""
    offsets = range(v_NGV.shape[0] + 1)
    prepared = prepare(q_NHK, k_NHK, v_NGV, g_NGK, beta_NG, offsets=offsets, scale=scale)
    out_NGV, new_NGKV, _ = scan(prepared, torch.stack(list(states_GKV)) if states_GKV else None)
    return KdaStep(out_NGV, keep_states(new_NGKV.unbind(), states_GKV, in_place=in_place))


def _run(
    prepared: PreparedTokens, start: int, end: int, values_TGJ: torch.Tensor, state_GKJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over rows [start, end) for any number J of value columns."""
    state_GKJ = state_GKJ.clone()
    out_TGJ = values_TGJ.new_empty(end - start, *values_TGJ.shape[1:])
    for t in range(start, end):
        k_GK = prepared.k_TGK[t]
        state_GKJ = prepared.alpha_TGK[t].unsqueeze(-1) * state_GKJ
        error_GJ = values_TGJ[t] - torch.einsum("gkj,gk->gj", state_GKJ, k_GK)
        delta_GJ = prepared.beta_TG[t].unsqueeze(-1) * error_GJ
        state_GKJ = state_GKJ + k_GK.unsqueeze(-1) * delta_GJ.unsqueeze(-2)
        out_TGJ[t - start] = prepared.scale * torch.einsum("gkj,gk->gj", state_GKJ, prepared.q_TGK[t])
    return out_TGJ, state_GKJ
