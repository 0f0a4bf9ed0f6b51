"""KDA backends against the fp64 recurrence, against each other's cuts, and against fla's reference.

Legend: T tokens, H q/k heads, G value heads, K key dim, V value dim, N segments.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.contracts import Summary
from longprefill.kernels.kda import plain, reference
from longprefill.kernels.kda.algebra import compose, fold

from .compiled import compiled_backends
from .kda_cases import REGIMES, Case, make_case
from .tolerances import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("kda"),
]
LENGTHS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 129)
SEGMENTS = (0, 129, 129, 130, 195, 257)


def check(case: Case, backend: Any, op: str = "kda") -> None:
    """Outputs, states and every segment's summary against the fp64 recurrence, head by head."""
    expected_prepared = case.doubled().prepare(reference)
    expected = reference.scan(expected_prepared, case.initial.double())
    prepared = case.prepare(backend)
    actual = backend.scan(prepared, case.initial)
    assert_close(actual.out_TGV, expected.out_TGV, op=op, dim=1)
    assert_close(actual.state_NGKV, expected.state_NGKV, op=op, dim=1)
    for segment in range(len(case.offsets) - 1):
        found = backend.summarize(prepared, segment)
        wanted = reference.summarize(expected_prepared, segment)
        assert_close(found.state_GKV, wanted.state_GKV, op=op, dim=0)
        assert_transition_close(found, wanted, op)
        seeded = backend.summarize(prepared, segment, initial_state_GKV=case.initial[segment])
        assert seeded.transition_GKK is None
        assert_close(seeded.state_GKV, expected.state_NGKV[segment], op=op, dim=0)


def assert_transition_close(found: Summary, wanted: Summary, op: str) -> None:
    """M acts on states of E's size and |M| <= 1: below a tenth of the identity's RMS its own size no longer counts."""
    expected = transition(wanted)
    assert_close(transition(found), expected, op=op, dim=0, floor=0.1 * expected.shape[-1] ** -0.5)


def transition(summary: Summary) -> torch.Tensor:
    heads, num_keys, _ = summary.state_GKV.shape
    return (
        summary.state_GKV.new_zeros(heads, num_keys, num_keys)
        if summary.transition_GKK is None
        else summary.transition_GKK
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("collinear", [None, 0.05])
def test_every_gate_matches_the_fp64_recurrence(backend: Any, regime: str, collinear: float | None) -> None:
    beta = None if collinear is None else 1.0
    check(make_case(offsets=SEGMENTS, regime=regime, collinear=collinear, beta=beta), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("collinear", [None, 0.05])
@pytest.mark.parametrize("beta", [1.5, 2.0])
def test_negative_eigenvalues(backend: Any, collinear: float | None, beta: float) -> None:
    check(make_case(tokens=200, regime="tiny", collinear=collinear, beta=beta), backend, "kda.negative_eigenvalues")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("regime", ["uniform", "spikes"])
def test_every_length(backend: Any, tokens: int, regime: str) -> None:
    check(make_case(tokens=tokens, regime=regime, seed=tokens), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (2, 6)])
@pytest.mark.parametrize("dims", [(1, 9), (8, 5), (60, 100), (100, 60), (256, 32), (33, 33)])
def test_every_width(backend: Any, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(make_case(offsets=(0, 66, 70), heads=heads, dims=dims, regime="tiny"), backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(
    ("decay", "beta", "moving"), [(1e-3, 0.2, True), (1e-3, 0.02, False), (1e-4, 0.02, False), (1e-5, 0.02, False)]
)
def test_errors_of_slow_gates_do_not_add_up(backend: Any, decay: float, beta: float, moving: bool) -> None:
    """After 4096 tokens M and the initial state are still there, and everything is right to its size.

    Gates that do not move in time round to the same side every time, so whatever leans adds up. The fp32 recurrence
    does: a token's decay is a factor just below 1, and the state is rounded 4096 times.
    """
    case = make_case(tokens=4096, heads=(1, 1), dims=(32, 16), regime="tiny")
    uniform = torch.rand(case.g.shape, generator=torch.Generator().manual_seed(0))
    case = case.changed(g=-decay * (uniform if moving else uniform[:1].expand_as(uniform)), beta=beta * case.beta)
    doubled = case.doubled().prepare(plain)
    found, wanted = case.scan(backend), plain.scan(doubled, case.initial.double())
    assert_close(found.out_TGV, wanted.out_TGV, op="kda")
    assert_close(found.state_NGKV, wanted.state_NGKV, op="kda")
    summary, wanted_summary = backend.summarize(case.prepare(backend), 0), plain.summarize(doubled, 0)
    assert_close(summary.state_GKV, wanted_summary.state_GKV, op="kda")
    assert_close(transition(summary), transition(wanted_summary), op="kda")


def test_plain_in_fp64_is_exact_to_fp64_rounding() -> None:
    check(make_case(offsets=SEGMENTS, regime="spikes", collinear=0.1).doubled(), plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_tokens_and_zero_segments(backend: Any) -> None:
    case = make_case(offsets=(0, 0, 0))
    result = case.scan(backend)
    assert result.out_TGV.shape == (0, 4, 40)
    assert torch.equal(result.state_NGKV, case.initial)
    summary = backend.summarize(case.prepare(backend), 1)
    assert not summary.state_GKV.any()
    assert torch.equal(transition(summary), torch.eye(24).expand(4, 24, 24))
    nothing = make_case(offsets=(0,))
    assert nothing.scan(backend).state_NGKV.shape == (0, 4, 24, 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_initial_state_is_a_zero_state(backend: Any) -> None:
    case = make_case(offsets=SEGMENTS)
    prepared = case.prepare(backend)
    a, b = backend.scan(prepared, None), backend.scan(prepared, torch.zeros_like(case.initial))
    assert torch.equal(a.out_TGV, b.out_TGV)
    assert torch.equal(a.state_NGKV, b.state_NGKV)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", [(), (1, 9), (0, 8), (0, 5, 3, 9), (0, 10)])
def test_wrong_offsets_are_refused(backend: Any, offsets: tuple[int, ...]) -> None:
    case = make_case(tokens=9)
    with pytest.raises(ValueError, match="offsets="):
        case.changed(offsets=offsets).prepare(backend)


def run_in_cuts(case: Case, cuts: tuple[int, ...], backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of the case's one segment, computed fragment by fragment with folded incoming states."""
    cut = case.changed(offsets=cuts)
    prepared = cut.prepare(backend)
    summaries = [backend.summarize(prepared, fragment) for fragment in range(len(cuts) - 1)]
    incoming = [fold(summaries[:fragment], case.initial[0]) for fragment in range(len(summaries))]
    result = backend.scan(prepared, torch.stack(incoming))
    assert_close(fold(summaries, case.initial[0]), result.state_NGKV[-1], op="kda", dim=0)
    return result.out_TGV, result.state_NGKV[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    cuts=st.lists(st.integers(0, 150), max_size=6).map(lambda inner: (0, *sorted(inner), 150)),
    regime=st.sampled_from(REGIMES),
    with_state=st.booleans(),
)
@settings(max_examples=15)
def test_any_cut_equals_the_whole(backend: Any, cuts: tuple[int, ...], regime: str, with_state: bool) -> None:
    case = make_case(tokens=150, heads=(1, 2), dims=(12, 20), regime=regime)
    if not with_state:
        case = case.changed(initial=torch.zeros_like(case.initial))
    expected = case.doubled().scan(reference)
    out_TGV, state_GKV = run_in_cuts(case, cuts, backend)
    assert_close(out_TGV, expected.out_TGV, op="kda", dim=1)
    assert_close(state_GKV, expected.state_NGKV[0], op="kda", dim=0)


@pytest.mark.parametrize("position", [1, 2, 3, 15, 16, 31, 32, 63, 64, 65, 127, 128])
def test_one_cut_near_every_edge_equals_the_whole(position: int) -> None:
    case = make_case(tokens=129, regime="spikes", collinear=0.1)
    expected = case.doubled().scan(reference)
    out_TGV, state_GKV = run_in_cuts(case, (0, position, 129), plain)
    assert_close(out_TGV, expected.out_TGV, op="kda", dim=1)
    assert_close(state_GKV, expected.state_NGKV[0], op="kda", dim=0)


@pytest.mark.parametrize("regime", ["tiny", "spikes", "all_infinite"])
def test_composition_is_associative_and_agrees_with_fold(regime: str) -> None:
    case = make_case(offsets=(0, 40, 41, 110), regime=regime).doubled()
    prepared = case.prepare(plain)
    a, b, c = (plain.summarize(prepared, segment) for segment in range(3))
    left, right = compose(compose(c, b), a), compose(c, compose(b, a))
    whole = plain.summarize(case.changed(offsets=(0, 110)).prepare(plain), 0)
    for found in (left, right):
        assert_close(found.state_GKV, whole.state_GKV, op="kda", dim=0)
        assert_close(transition(found), transition(whole), op="kda", dim=0)
        assert_close(fold([found], case.initial[0]), fold([a, b, c], case.initial[0]), op="kda", dim=0)
    assert_close(fold([a, b, c], None), whole.state_GKV, op="kda", dim=0)


def test_fold_skips_what_a_zero_transition_forgets() -> None:
    poison = torch.full((1, 2, 3), torch.nan)
    kept = Summary(torch.ones(1, 2, 3), None)
    assert torch.equal(fold([Summary(poison, None), kept], poison), kept.state_GKV)
    assert compose(kept, Summary(poison, None)) is kept
    assert torch.equal(fold([], poison[:0]), poison[:0])
    with pytest.raises(ValueError, match="0 summaries"):
        fold([], None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transition_is_none_only_if_exactly_zero(backend: Any) -> None:
    forgets = make_case(tokens=3, regime="all_infinite")
    assert backend.summarize(forgets.prepare(backend), 0).transition_GKK is None
    one_channel_left = forgets.g.clone()
    one_channel_left[:, 1, 5] = 0.0
    kept = backend.summarize(forgets.changed(g=one_channel_left).prepare(backend), 0).transition_GKK
    assert kept is not None
    assert kept[1, 5, 5] != 0
    assert kept[0].count_nonzero() == 0


def test_a_transition_that_underflows_on_the_way_is_dropped() -> None:
    case = make_case(tokens=700, heads=(1, 2), dims=(8, 12))
    case = case.changed(g=torch.full_like(case.g, -0.5))
    expected = case.doubled().scan(reference)
    summary = plain.summarize(case.prepare(plain), 0)
    assert summary.transition_GKK is None
    assert_close(summary.state_GKV, expected.state_NGKV[0], op="kda", dim=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [1, 15, 16, 17, 33, 63, 64, 65, 100])
@pytest.mark.parametrize("gate", [0.0, -1e-3, -30.0, -1000.0, -torch.inf])
def test_the_future_changes_nothing_before_it(backend: Any, position: int, gate: float) -> None:
    case = make_case(tokens=130, heads=(1, 2), dims=(12, 20), regime="uniform")
    before = case.scan(backend).out_TGV[:position]
    future = {name: getattr(case, name).clone() for name in ("q", "k", "v", "g", "beta")}
    future["g"][position:] = gate
    for name in ("q", "k", "v"):
        future[name][position:] *= -0.7
    future["beta"][position:] = 0.3
    after = case.changed(**future).scan(backend).out_TGV
    assert torch.equal(after[:position], before)
    assert not torch.equal(after[position:], case.scan(backend).out_TGV[position:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [1, 7, 8, 16, 31, 64, 100, 129])
@pytest.mark.parametrize("names", [("k",), ("v",), ("g",), ("q", "beta"), ("q", "k", "v", "g", "beta")])
def test_nan_in_later_rows_reaches_no_earlier_output(backend: Any, position: int, names: tuple[str, ...]) -> None:
    """`plain` multiplies zeros of whole tiles: there it reaches no earlier tile."""
    case = make_case(offsets=(0, 130, 140), heads=(1, 2), regime="spikes")
    broken = {name: getattr(case, name).clone() for name in names}
    for value in broken.values():
        value[position:130] = torch.nan
    found, sound = case.changed(**broken).scan(backend), case.scan(backend)
    clean = position // 64 * 64 if backend is plain else position
    assert torch.equal(found.out_TGV[:clean], sound.out_TGV[:clean])
    assert found.out_TGV[position:130].isnan().all()
    assert torch.equal(found.out_TGV[130:], sound.out_TGV[130:])
    assert torch.equal(found.state_NGKV[1], sound.state_NGKV[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_do_not_feel_each_other(backend: Any) -> None:
    lengths = (5, 0, 130, 64, 1, 70)
    offsets = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    case = make_case(offsets=offsets, regime="spikes")
    result = case.scan(backend)
    order = (4, 2, 5, 1, 0, 3)
    rows = torch.cat([torch.arange(*list(pairwise(offsets))[segment]) for segment in order])
    permuted_offsets = tuple(sum(lengths[s] for s in order[:i]) for i in range(len(order) + 1))
    permuted = {name: getattr(case, name)[rows] for name in ("q", "k", "v", "g", "beta")}
    moved = case.changed(**permuted, initial=case.initial[list(order)], offsets=permuted_offsets).scan(backend)
    assert_close(moved.out_TGV, result.out_TGV[rows], op="kda", dim=1)
    assert_close(moved.state_NGKV, result.state_NGKV[list(order)], op="kda", dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_views_of_poisoned_buffers_and_stay_as_they_are(backend: Any) -> None:
    case = make_case(offsets=SEGMENTS)
    expected = case.scan(backend)
    views = {}
    for name in ("q", "k", "v", "g", "beta"):
        value = getattr(case, name)
        buffer = torch.full([size + 3 for size in value.shape], torch.nan)
        view = buffer[tuple(slice(1, 1 + size) for size in value.shape)]
        view.copy_(value)
        views[name] = view
    initial = case.initial.clone()
    strided = case.changed(**views, initial=initial)
    result = strided.scan(backend)
    assert torch.equal(result.out_TGV, expected.out_TGV)
    assert torch.equal(result.state_NGKV, expected.state_NGKV)
    backend.summarize(strided.prepare(backend), 0, initial_state_GKV=initial[0])
    for name, view in views.items():
        assert torch.equal(view, getattr(case, name)), name
    assert torch.equal(initial, case.initial)


def test_groups_of_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(offsets=(0, 300, 301, 700), regime="spikes")
    whole = case.scan(plain)
    monkeypatch.setattr(plain, "GROUP_BYTES", 1)
    monkeypatch.setattr(plain, "POINTWISE_ELEMENTS", 1)
    tile_by_tile = case.scan(plain)
    assert_close(tile_by_tile.out_TGV, whole.out_TGV, op="kda", dim=1)
    assert_close(tile_by_tile.state_NGKV, whole.state_NGKV, op="kda", dim=1)
    assert torch.equal(plain.l2_normalize(case.v), plain.l2_normalize(case.v.unsqueeze(0))[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_inputs_are_computed_in_fp32(backend: Any) -> None:
    case = make_case(offsets=SEGMENTS, regime="tiny")
    rounded = {name: getattr(case, name).bfloat16() for name in ("q", "k", "v")}
    case = case.changed(**rounded)
    expected = case.doubled().scan(reference)
    result = case.scan(backend)
    assert result.out_TGV.dtype == torch.bfloat16
    assert_close(result.out_TGV, expected.out_TGV, op="kda", dim=1)
    assert_close(result.state_NGKV, expected.state_NGKV, op="kda", dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(2, 4), (3, 9)])
@pytest.mark.parametrize("with_state", [False, True])
def test_states_at_page_borders_are_those_of_a_scan_that_stops_there(
    backend: Any, heads: tuple[int, int], with_state: bool
) -> None:
    case = make_case(offsets=(0, 150, 150, 278, 300, 364), heads=heads, regime="spikes")
    interior = [(2, 128), (0, 0), (0, 128), (4, 64), (1, 0), (0, 64), (0, 128), (3, 0), (2, 64)]
    initial = case.initial if with_state else None
    result = backend.scan(case.prepare(backend), initial, interior=interior)
    whole = backend.scan(case.prepare(backend), initial)
    assert torch.equal(result.out_TGV, whole.out_TGV)
    assert torch.equal(result.state_NGKV, whole.state_NGKV)
    assert result.interior_BGKV.shape[0] == len(interior)
    assert whole.interior_BGKV.shape[0] == 0
    for found, (segment, rows) in zip(result.interior_BGKV, interior, strict=True):
        start = case.offsets[segment]
        names = ("q", "k", "v", "g", "beta")
        part = case.changed(offsets=(0, rows), **{name: getattr(case, name)[start : start + rows] for name in names})
        before = case.initial[segment : segment + 1] if with_state else None
        assert torch.equal(found, backend.scan(part.prepare(backend), before).state_NGKV[0]), (segment, rows)
        exact = part.doubled()
        wanted = reference.scan(exact.prepare(reference), None if before is None else before.double())
        assert_close(found, wanted.state_NGKV[0], op="kda", dim=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [(0, 63), (0, 128), (1, 0), (-1, 0), (0, -64)])
def test_states_off_the_grid_are_refused(backend: Any, place: tuple[int, int]) -> None:
    case = make_case(tokens=100)
    with pytest.raises(ValueError, match="interior state"):
        backend.scan(case.prepare(backend), None, interior=[(0, 64), place])


@pytest.fixture(scope="module")
def fla_naive() -> ModuleType:
    return load_fla("ops/kda/naive.py")


def load_fla(path: str) -> ModuleType:
    """One of fla's plain-torch references, loaded from its file: importing the package would need triton."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location("fla_reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regime", ["zero", "uniform", "spikes", "infinite"])
@pytest.mark.parametrize("heads", [(2, 2), (2, 6)])
def test_fla_recurrence_agrees(backend: Any, regime: str, heads: tuple[int, int], fla_naive: ModuleType) -> None:
    case = make_case(tokens=131, heads=heads, regime=regime)
    inputs = [x.unsqueeze(0) for x in (case.q, case.k, case.v, case.g, case.beta)]
    out, state = fla_naive.naive_recurrent_kda(
        *inputs, scale=case.scale, initial_state=case.initial, output_final_state=True
    )
    result = case.scan(backend)
    assert_close(result.out_TGV, out[0], op="kda.third_party", dim=1)
    assert_close(result.state_NGKV, state, op="kda.third_party", dim=1)


def gate_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x_TGK = 4 * torch.randn(70, 4, 24, generator=generator)
    x_TGK[0, 0, :4] = torch.tensor([-1000.0, 1000.0, 20.1, -90.0])
    a_log_G = torch.tensor([0.0, 0.9, 1.8, 2.77])
    return x_TGK, a_log_G, torch.randn(4, 24, generator=generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
def test_gate_formula(backend: Any, lower_bound: float | None) -> None:
    x_TGK, a_log_G, dt_bias_GK = gate_inputs()
    shifted = x_TGK.double() + dt_bias_GK.double()
    slope = a_log_G.double().exp().unsqueeze(-1)
    if lower_bound is None:
        expected = -slope * torch.logaddexp(shifted, torch.zeros_like(shifted))
    else:
        expected = lower_bound / (1 + torch.exp(-slope * shifted))
    g_TGK = backend.gate(x_TGK, a_log_G, dt_bias_GK, lower_bound)
    assert g_TGK.dtype == torch.float32
    assert (g_TGK <= 0).all()
    assert_close(g_TGK, expected, op="kda.gate", dim=1)
    from_bf16 = backend.gate(x_TGK.bfloat16(), a_log_G, dt_bias_GK, lower_bound)
    assert torch.equal(from_bf16, backend.gate(x_TGK.bfloat16().float(), a_log_G, dt_bias_GK, lower_bound))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a_slope_beyond_fp32_is_the_largest_number(backend: Any, lower_bound: float | None) -> None:
    """exp(A_log) is infinite from 88.8 on, and would be NaN times a zero."""
    x_TGK = torch.tensor([0.0, 2.0, -2.0, -200.0]).expand(3, 1, 4)
    g_TGK = backend.gate(x_TGK, torch.tensor([90.0]), torch.zeros(1, 4), lower_bound)[0, 0].tolist()
    if lower_bound is None:
        assert g_TGK[1] == -torch.inf
        assert g_TGK[3] == 0.0
    else:
        assert g_TGK == [-2.5, -5.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_each_head_has_its_own_decay(backend: Any, lower_bound: float | None) -> None:
    x_TGK, a_log_G, dt_bias_GK = gate_inputs()
    case = make_case(tokens=70)
    expected_g = reference.gate(x_TGK.double(), a_log_G.double(), dt_bias_GK.double(), lower_bound)
    expected = case.doubled().changed(g=expected_g).scan(reference)
    result = case.changed(g=backend.gate(x_TGK, a_log_G, dt_bias_GK, lower_bound)).scan(backend)
    assert_close(result.out_TGV, expected.out_TGV, op="kda", dim=1)
    assert_close(result.state_NGKV, expected.state_NGKV, op="kda", dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_l2_normalize(backend: Any) -> None:
    x_THK = make_case(tokens=9).v
    x_THK[3, 1] = 0
    expected = x_THK.double() / (x_THK.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(backend.l2_normalize(x_THK), expected, op="kda.gate")
    assert not backend.l2_normalize(x_THK)[3, 1].any()
    assert backend.l2_normalize(x_THK.bfloat16()).dtype == torch.float32
