"""Composition of segment summaries: affine maps `S_out = M S_in + E`, associative, not commutative, identity (0, I).

Legend: G value heads, K key dim, V value dim. A transition of None is exactly zero: whatever came before is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.contracts import Summary
from longprefill.kernels.shapes import check_shape

SLOW_LOG_DECAY = -0.35
"""Channels that decay by less, in logarithms, keep their state and add a small change to it (`split_decay`)."""


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """fp64 if any input is fp64, else fp32: bf16 and fp16 inputs are computed in fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def check_inputs(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_TGV: torch.Tensor, g_TGK: torch.Tensor, beta_TG: torch.Tensor
) -> None:
    """ValueError unless the inputs of the recurrence fit each other, and value heads are a multiple of q/k heads."""
    num_tokens, value_heads, _ = v_TGV.shape
    _, num_heads, num_keys = k_THK.shape
    check_shape(k_THK, "k", num_tokens, num_heads, num_keys)
    check_shape(q_THK, "q", num_tokens, num_heads, num_keys)
    check_shape(g_TGK, "g", num_tokens, value_heads, num_keys)
    check_shape(beta_TG, "beta", num_tokens, value_heads)
    if value_heads % num_heads:
        raise ValueError(f"{value_heads} value heads, {num_heads} q/k heads: value heads must be a multiple")


def check_gate(x_TGK: torch.Tensor, a_log_G: torch.Tensor, dt_bias_GK: torch.Tensor) -> None:
    """ValueError unless every head has its own slope and biases."""
    check_shape(a_log_G, "a_log", *x_TGK.shape[1:2])
    check_shape(dt_bias_GK, "dt_bias", *x_TGK.shape[1:])


def decay_slope(a_log_G: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(A_log) of the gates, finite: an infinite one times 0 would be NaN."""
    return a_log_G.to(dtype).exp().clamp_(max=torch.finfo(dtype).max)


def split_decay(log_decay: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(change, kept): a state's decay as P S = kept S + change S. `factor` is exp(log_decay); any one shape.

    1 and a small change for slow channels, 0 and the whole factor for others. A factor just below 1 is rounded by up to
    3e-8; gates that hardly move in time round it to the same side again and again, and a state that forgets next to
    nothing in thousands of tiles adds that up. All that is added to a state is to be summed before it meets the state.
    """
    is_slow = log_decay > SLOW_LOG_DECAY
    return torch.where(is_slow, torch.expm1(log_decay), factor), is_slow.to(factor.dtype)


def keep_states(
    new_GKV: Sequence[torch.Tensor], given_GKV: Sequence[torch.Tensor], *, in_place: bool
) -> list[torch.Tensor]:
    """The new states, or with `in_place` the given tensors, which then hold them."""
    if not in_place:
        return list(new_GKV)
    for given, new in zip(given_GKV, new_GKV, strict=True):
        if new is not given:
            given.copy_(new)
    return list(given_GKV)


def compose(later: Summary, earlier: Summary) -> Summary:
    """The summary of `earlier` followed by `later`: (M2 M1, M2 E1 + E2).

    2 K K (K + V) flops a head, none where M2 is None.
    """
    if later.transition_GKK is None:
        return later
    state_GKV = torch.baddbmm(later.state_GKV, later.transition_GKK, earlier.state_GKV)
    if earlier.transition_GKK is None:
        return Summary(state_GKV, None)
    return Summary(state_GKV, torch.bmm(later.transition_GKK, earlier.transition_GKK))


def fold(summaries: Sequence[Summary], initial_state_GKV: torch.Tensor | None) -> torch.Tensor:
    """The state [G, K, V] after `summaries`, given in sequence order, from `initial_state_GKV` (None: zero).

    Starts at the last summary that forgets everything before it, so nothing is multiplied by an exact zero.

    Raises:
        ValueError: no summary and no initial state: the shape is unknown.
    """
    if not summaries:
        if initial_state_GKV is None:
            raise ValueError("fold of 0 summaries without an initial state: pass one or the other")
        return initial_state_GKV
    state_GKV = initial_state_GKV
    first = max((i for i, summary in enumerate(summaries) if summary.transition_GKK is None), default=0)
    for summary in summaries[first:]:
        if summary.transition_GKK is None or state_GKV is None:
            state_GKV = summary.state_GKV
        else:
            state_GKV = torch.baddbmm(summary.state_GKV, summary.transition_GKK, state_GKV)
    assert state_GKV is not None
    return state_GKV
