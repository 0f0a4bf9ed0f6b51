"""The tests can fail: known mistakes, made on purpose, are caught by the comparisons that the other tests use.

Each mutation takes a case and returns (actual, expected, op); the unchanged case must pass the same comparison.
Legend: T tokens, H q/k heads, G value heads, K key dim, V value dim, N segments, C channels, W conv width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch

from longprefill.kernels.contracts import KdaScan, Summary
from longprefill.kernels.conv import plain as conv
from longprefill.kernels.kda import plain, reference
from longprefill.kernels.kda.algebra import compose, fold
from longprefill.kernels.norm import plain as norm
from longprefill.kernels.residual import plain as residual
from longprefill.kernels.residual import reference as residual_reference
from longprefill.kernels.rope import plain as rope
from longprefill.kernels.rope import reference as rope_reference
from longprefill.kernels.rope.frequencies import inverse_frequencies

from .kda_cases import Case, make_case
from .tolerances import assert_close

Compared = tuple[torch.Tensor, torch.Tensor, str]


@cache
def sound_case() -> Case:
    """Two fragments of one chain: 70 and 60 tokens, slow per-head decays, K != V, two value heads a q/k head."""
    case = make_case(offsets=(0, 70, 130), heads=(2, 4), dims=(24, 40), regime="uniform")
    slope_G1 = torch.tensor([1.0, 5.0, 20.0, 90.0]).unsqueeze(-1)
    return case.changed(g=2e-4 * case.g * slope_G1)


def expect(case: Case) -> KdaScan:
    return case.doubled().scan(reference)


def outputs(changed: Case) -> Compared:
    """The changed case's outputs beside those of the sound one."""
    return changed.scan(plain).out_TGV, expect(sound_case()).out_TGV, "kda"


def final_state(state_GKV: torch.Tensor) -> Compared:
    """A final state beside that of the whole chain in one piece."""
    case = sound_case()
    whole = expect(case.changed(offsets=(0, 130), initial=case.initial[:1]))
    return state_GKV, whole.state_NGKV[0], "kda"


def summaries() -> tuple[Summary, Summary]:
    prepared = sound_case().prepare(plain)
    return plain.summarize(prepared, 0), plain.summarize(prepared, 1)


def gated(lower_bound: float | None, a_log_G: torch.Tensor) -> torch.Tensor:
    x_TGK = sound_case().g * 100 + 1
    return plain.gate(x_TGK, a_log_G, torch.zeros(4, 24), lower_bound)


A_LOG_G = torch.tensor([0.0, 0.3, 0.6, 0.9])


def swapped_rows_and_columns() -> Compared:
    state_NGKV = sound_case().scan(plain).state_NGKV
    mutant = state_NGKV.transpose(-1, -2).reshape(state_NGKV.shape)  # V-major bytes read as K-major
    return mutant, expect(sound_case()).state_NGKV, "kda"


def swapped_incoming_state() -> Compared:
    initial = sound_case().initial
    return outputs(sound_case().changed(initial=initial.transpose(-1, -2).reshape(initial.shape)))


def doubled_initial_state() -> Compared:
    return outputs(sound_case().changed(initial=2 * sound_case().initial))


def forgotten_initial_state() -> Compared:
    return outputs(sound_case().changed(initial=torch.zeros_like(sound_case().initial)))


def future_gate() -> Compared:
    return outputs(sound_case().changed(g=torch.roll(sound_case().g, -1, 0)))


def gate_of_head_0_for_all() -> Compared:
    return outputs(sound_case().changed(g=sound_case().g[:, :1].expand(-1, 4, -1)))


def q_heads_tiled_instead_of_repeated() -> Compared:
    """Value head g on q/k head g % H: right for G = H, wrong for G = 2 H."""
    case = sound_case()
    return outputs(case.changed(q=case.q.repeat(1, 2, 1), k=case.k.repeat(1, 2, 1)))


def unscaled_output() -> Compared:
    return outputs(sound_case().changed(scale=1.0))


def beta_left_out() -> Compared:
    return outputs(sound_case().changed(beta=torch.ones_like(sound_case().beta)))


def cut_ignored() -> Compared:
    return outputs(sound_case().changed(offsets=(0, 130), initial=sound_case().initial[:1]))


def cut_one_row_late() -> Compared:
    return outputs(sound_case().changed(offsets=(0, 71, 130)))


def swapped_states_of_segments() -> Compared:
    return outputs(sound_case().changed(initial=sound_case().initial.flip(0)))


def output_read_before_the_update() -> Compared:
    case = sound_case()
    result = case.scan(plain)
    overlap_TG = (case.q * case.k).sum(-1).repeat_interleave(2, 1) * case.beta * case.scale
    return result.out_TGV - overlap_TG.unsqueeze(-1) * case.v, expect(case).out_TGV, "kda"


def composed_in_the_wrong_order() -> Compared:
    first, second = summaries()
    return final_state(fold([compose(first, second)], sound_case().initial[0]))


def folded_in_the_wrong_order() -> Compared:
    first, second = summaries()
    return final_state(fold([second, first], sound_case().initial[0]))


def transition_left_out() -> Compared:
    first, second = summaries()
    return final_state(fold([first, Summary(second.state_GKV, None)], sound_case().initial[0]))


def transposed_transition() -> Compared:
    first, second = summaries()
    assert second.transition_GKK is not None
    mutant = Summary(second.state_GKV, second.transition_GKK.transpose(1, 2))
    return final_state(fold([first, mutant], sound_case().initial[0]))


def initial_state_folded_twice() -> Compared:
    case = sound_case()
    first = plain.summarize(case.prepare(plain), 0, initial_state_GKV=case.initial[0]).state_GKV
    second = summaries()[1]
    return final_state(fold([Summary(first, summaries()[0].transition_GKK), second], case.initial[0]))


def softplus_model_with_the_bounded_gate() -> Compared:
    return gated(-5.0, A_LOG_G), reference.gate(*gate_arguments(), None), "kda.gate"


def a_log_of_head_0_for_all() -> Compared:
    return gated(None, A_LOG_G[:1].expand(4)), reference.gate(*gate_arguments(), None), "kda.gate"


def gate_arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (sound_case().g.double() * 100 + 1, A_LOG_G.double(), torch.zeros(4, 24).double())


def normal(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def convolution(history_NWC: torch.Tensor, weight_CW: torch.Tensor) -> Compared:
    """Two fragments of one job with the given halos beside the whole."""
    x_TC, sound_CW = normal(30, 6), normal(6, 4, seed=6)
    whole = conv.causal_conv_silu(x_TC, sound_CW, offsets=(0, 30), history_NWC=torch.zeros(1, 3, 6))
    cut = conv.causal_conv_silu(x_TC, weight_CW, offsets=(0, 12, 30), history_NWC=history_NWC)
    return cut, whole, "conv"


def halo(rows: slice) -> torch.Tensor:
    return torch.stack([torch.zeros(3, 6), normal(30, 6)[rows]])


def halo_of_zeros() -> Compared:
    return convolution(torch.zeros(2, 3, 6), normal(6, 4, seed=6))


def halo_backwards() -> Compared:
    return convolution(halo(slice(9, 12)).flip(1), normal(6, 4, seed=6))


def halo_one_row_early() -> Compared:
    return convolution(halo(slice(8, 11)), normal(6, 4, seed=6))


def halo_of_the_end() -> Compared:
    return convolution(halo(slice(27, 30)), normal(6, 4, seed=6))


def halo_after_the_activation() -> Compared:
    return convolution(torch.nn.functional.silu(halo(slice(9, 12))), normal(6, 4, seed=6))


def taps_backwards() -> Compared:
    return convolution(halo(slice(9, 12)), normal(6, 4, seed=6).flip(1))


def attn_res_values() -> list[torch.Tensor]:
    return [3.0**i * normal(9, 24, seed=i) for i in range(4)]


def attn_res_expected() -> torch.Tensor:
    return residual_reference.mix([v.double() for v in attn_res_values()], normal(24).double(), eps=1e-6)


def attn_res_values_normalised() -> Compared:
    values = [norm.rms_norm(value, torch.ones(24), 1e-6) for value in attn_res_values()]
    return residual.mix(values, normal(24), eps=1e-6), attn_res_expected(), "attn_res"


def attn_res_partial_left_out() -> Compared:
    phase1 = residual.prepare(attn_res_values()[:3], normal(1, 24), eps=1e-6)
    return residual.update(None, phase1, 0, normal(24), eps=1e-6), attn_res_expected(), "attn_res"


def attn_res_partial_counted_twice() -> Compared:
    phase1 = residual.prepare(attn_res_values(), normal(1, 24), eps=1e-6)
    return residual.update(attn_res_values()[3], phase1, 0, normal(24), eps=1e-6), attn_res_expected(), "attn_res"


def output_gate_silu_instead_of_sigmoid() -> Compared:
    x_TGV, gate_TGV = normal(9, 2, 24), normal(9, 2, 24, seed=6)
    mutant = norm.gated_rms_norm(x_TGV, gate_TGV, torch.ones(24), 1e-5) * gate_TGV
    return mutant, norm.gated_rms_norm(x_TGV.double(), gate_TGV.double(), torch.ones(24), 1e-5), "norm"


def rotation(pairing: str, first: int) -> Compared:
    frequency_P2 = torch.tensor(inverse_frequencies(1e4, 24), dtype=torch.float64)
    x_THP, positions_T = normal(9, 2, 24), torch.arange(9)
    actual = rope.rotate(x_THP, positions_T, frequency_P2, pairing)  # type: ignore[arg-type]
    expected = rope_reference.rotate(x_THP.double(), positions_T + first, frequency_P2, "interleaved")
    return actual, expected, "rope"


def wrong_rope_pairing() -> Compared:
    return rotation("half", 0)


def local_instead_of_global_positions() -> Compared:
    return rotation("interleaved", 4096)


MUTATIONS: list[Callable[[], Compared]] = [
    swapped_rows_and_columns,
    swapped_incoming_state,
    doubled_initial_state,
    forgotten_initial_state,
    future_gate,
    gate_of_head_0_for_all,
    q_heads_tiled_instead_of_repeated,
    unscaled_output,
    beta_left_out,
    cut_ignored,
    cut_one_row_late,
    swapped_states_of_segments,
    output_read_before_the_update,
    composed_in_the_wrong_order,
    folded_in_the_wrong_order,
    transition_left_out,
    transposed_transition,
    initial_state_folded_twice,
    softplus_model_with_the_bounded_gate,
    a_log_of_head_0_for_all,
    halo_of_zeros,
    halo_backwards,
    halo_one_row_early,
    halo_of_the_end,
    halo_after_the_activation,
    taps_backwards,
    attn_res_values_normalised,
    attn_res_partial_left_out,
    attn_res_partial_counted_twice,
    output_gate_silu_instead_of_sigmoid,
    wrong_rope_pairing,
    local_instead_of_global_positions,
]


def sound_comparisons() -> list[Compared]:
    """The same comparisons without a mistake."""
    case = sound_case()
    x_TGV, gate_TGV = normal(9, 2, 24), normal(9, 2, 24, seed=6)
    phase1 = residual.prepare(attn_res_values()[:3], normal(1, 24), eps=1e-6)
    return [
        outputs(case),
        (case.scan(plain).state_NGKV, expect(case).state_NGKV, "kda"),
        final_state(fold(summaries(), case.initial[0])),
        final_state(fold([compose(*reversed(summaries()))], case.initial[0])),
        (gated(None, A_LOG_G), reference.gate(*gate_arguments(), None), "kda.gate"),
        convolution(halo(slice(9, 12)), normal(6, 4, seed=6)),
        (residual.mix(attn_res_values(), normal(24), eps=1e-6), attn_res_expected(), "attn_res"),
        (
            residual.update(attn_res_values()[3], phase1, 0, normal(1, 24)[0], eps=1e-6),
            residual_reference.mix([v.double() for v in attn_res_values()], normal(1, 24)[0].double(), eps=1e-6),
            "attn_res",
        ),
        (
            norm.gated_rms_norm(x_TGV, gate_TGV, torch.ones(24), 1e-5),
            norm.gated_rms_norm(x_TGV.double(), gate_TGV.double(), torch.ones(24), 1e-5),
            "norm",
        ),
        rotation("interleaved", 0),
    ]


@pytest.mark.parametrize("index", range(10))
def test_the_sound_form_passes(index: int) -> None:
    actual, expected, op = sound_comparisons()[index]
    assert_close(actual, expected, op=op)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_mistake_is_caught(mutation: Callable[[], Compared]) -> None:
    actual, expected, op = mutation()
    assert actual.shape == expected.shape, "a mistake that changes the shape proves nothing about values"
    with pytest.raises(AssertionError, match="RMS ratio"):
        assert_close(actual, expected, op=op)


def test_the_cuts_of_the_sound_case_are_a_real_chain() -> None:
    """Each fragment is longer than nothing and no decay is so strong that a wrong state would be forgotten."""
    case = sound_case()
    assert all(end - start > 4 for start, end in pairwise(case.offsets))
    assert all(summary.transition_GKK is not None for summary in summaries())
