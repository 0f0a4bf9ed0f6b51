"""One token of decode of many requests: the recurrence's next step for each, in place or not.

Legend: N requests, H q/k heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longprefill.kernels.contracts import KdaStep
from longprefill.kernels.kda import plain, reference

from .compiled import compiled_backends
from .kda_cases import Case, make_case
from .tolerances import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("kda"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_decode_steps_continue_a_prefill(backend: Any, in_place: bool) -> None:
    case = make_case(tokens=75, regime="spikes")
    expected = case.doubled().scan(reference)
    head = case.changed(offsets=(0, 70), **{name: getattr(case, name)[:70] for name in ("q", "k", "v", "g", "beta")})
    states = [head.scan(backend).state_NGKV[0]]
    for t in range(70, 75):
        before = states[0].clone()
        result = step(case, backend, rows=slice(t, t + 1), states=states, in_place=in_place)
        assert torch.equal(states[0], result.states_GKV[0] if in_place else before)
        assert (result.states_GKV[0] is states[0]) == in_place
        assert_close(result.out_NGV[0], expected.out_TGV[t], op="kda", dim=0)
        states = result.states_GKV
    assert_close(states[0], expected.state_NGKV[0], op="kda", dim=0)


def step(case: Case, backend: Any, *, rows: slice, states: list[torch.Tensor], in_place: bool = False) -> KdaStep:
    inputs = (x[rows] for x in (case.q, case.k, case.v, case.g, case.beta))
    return backend.step(*inputs, states, scale=case.scale, in_place=in_place)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
@pytest.mark.parametrize("dims", [(1, 9), (24, 40), (100, 60), (128, 128), (300, 160), (33, 33)])
@pytest.mark.parametrize("num_requests", [0, 1, 7])
def test_a_step_of_many_requests_is_a_scan_of_one_row_each(
    backend: Any, heads: tuple[int, int], dims: tuple[int, int], num_requests: int
) -> None:
    case = make_case(offsets=tuple(range(num_requests + 1)), heads=heads, dims=dims, regime="infinite")
    expected = case.doubled().scan(reference)
    result = step(case, backend, rows=slice(None), states=list(case.initial.unbind()))
    assert_close(result.out_NGV, expected.out_TGV, op="kda")
    assert len(result.states_GKV) == num_requests
    for found, wanted in zip(result.states_GKV, expected.state_NGKV, strict=True):
        assert_close(found, wanted, op="kda", dim=0)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("decay", [1e-3, 1e-5])
def test_errors_of_constant_slow_gates_do_not_add_up(backend: Any, decay: float) -> None:
    case = make_case(tokens=2048, heads=(1, 1), dims=(32, 16), regime="tiny")
    uniform = torch.rand(1, 1, 32, generator=torch.Generator().manual_seed(0))
    case = case.changed(g=(-decay * uniform).expand_as(case.g), beta=0.1 * case.beta)
    states = [case.initial[0].clone()]
    for t in range(2048):
        states = step(case, backend, rows=slice(t, t + 1), states=states, in_place=True).states_GKV
    wanted = plain.scan(case.doubled().prepare(plain), case.initial.double())
    assert_close(states[0], wanted.state_NGKV[0], op="kda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_in_place_writes_the_given_states_wherever_they_lie(backend: Any) -> None:
    case = make_case(offsets=(0, 1, 2, 3), regime="tiny")
    expected = case.scan(backend).state_NGKV
    transposed = case.initial[0].transpose(1, 2).contiguous().transpose(1, 2)
    states = [transposed, case.initial[1].clone(), torch.full((6, 4, 24, 40), torch.nan)[2].copy_(case.initial[2])]
    result = step(case, backend, rows=slice(None), states=states, in_place=True)
    for state, returned, wanted in zip(states, result.states_GKV, expected, strict=True):
        assert returned is state
        assert_close(state, wanted, op="kda", dim=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_reads_bf16_and_views_of_poisoned_buffers(backend: Any) -> None:
    case = make_case(offsets=(0, 1, 2, 3), regime="spikes")
    case = case.changed(**{name: getattr(case, name).bfloat16() for name in ("q", "k", "v")})
    expected = case.doubled().scan(reference)
    views = {}
    for name in ("q", "k", "v", "g", "beta"):
        value = getattr(case, name)
        view = value.new_full([size + 3 for size in value.shape], torch.nan)[
            tuple(slice(1, 1 + n) for n in value.shape)
        ]
        views[name] = view.copy_(value)
    result = step(case.changed(**views), backend, rows=slice(None), states=list(case.initial.unbind()))
    assert result.out_NGV.dtype == torch.bfloat16
    assert_close(result.out_NGV, expected.out_TGV, op="kda", dim=1)
    assert_close(torch.stack(result.states_GKV), expected.state_NGKV, op="kda", dim=1)
