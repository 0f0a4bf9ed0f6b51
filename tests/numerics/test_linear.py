"""Gated activations and fp32 products: every backend against the formulas in fp64 and against torch's own layers.

Legend: T tokens, D hidden, E outputs, F intermediate, J = 2F.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from longprefill.kernels.linear import plain, reference

from .compiled import compiled_backends
from .tolerances import assert_close, rms_ratio

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("linear"),
]
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("clamp", [None, 1.5])
@given(
    num_tokens=st.integers(0, 40),
    inner=st.sampled_from([1, 15, 16, 33, 200]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=20)
def test_gated_is_the_formula(
    backend: Any, activation: str, clamp: float | None, num_tokens: int, inner: int, dtype: torch.dtype, seed: int
) -> None:
    gate_up_TJ = (3 * normal(num_tokens, 2 * inner, seed=seed)).to(dtype)
    before = gate_up_TJ.clone()
    expected = reference.gated(gate_up_TJ.double(), activation=activation, clamp=clamp)
    actual = backend.gated(gate_up_TJ, activation=activation, clamp=clamp)
    assert actual.dtype == dtype
    # torch's gelu is 1 + erf: where that cancels, a single number has few digits
    assert_close(actual, expected, op="linear", floor=0.1)
    assert torch.equal(gate_up_TJ, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_reads_rows_of_a_wider_tensor(backend: Any) -> None:
    wide = torch.full((30, 100), torch.nan)
    wide[:, 7:47] = normal(30, 40)
    expected = reference.gated(wide[:, 7:47].double(), activation="silu")
    assert_close(backend.gated(wide[:, 7:47], activation="silu"), expected, op="linear")


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_gated_at_the_ends(backend: Any) -> None:
    """silu(-inf) up to silu(inf), and NaN stays NaN."""
    gates = torch.tensor([-torch.inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, torch.nan])
    actual = backend.gated(torch.cat([gates, torch.ones(8)])[None], activation="silu")[0]
    assert actual[1:7].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 100.0, 1e30], rel=1e-6, abs=1e-30)
    assert torch.isnan(actual[7])
    limited = backend.gated(torch.cat([gates[5:7], torch.tensor([20.0, -20.0])])[None], activation="silu", clamp=2.0)
    assert limited[0].tolist() == pytest.approx([2 * 1.7615942, -2 * 1.7615942], rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_unknown_activation_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="activation='relu'"):
        backend.gated(normal(2, 4), activation="relu")


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    num_tokens=st.sampled_from([0, 1, 63, 64, 65, 130, 200]),
    depth=st.sampled_from([1, 32, 40, 96, 512]),
    num_out=st.sampled_from([1, 8, 16, 33]),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=30)
def test_linear_fp32_is_exact_to_fp32(
    backend: Any, num_tokens: int, depth: int, num_out: int, dtype: torch.dtype, seed: int
) -> None:
    x_TD, weight_ED = normal(num_tokens, depth, seed=seed).to(dtype), normal(num_out, depth, seed=seed + 1).to(dtype)
    actual = backend.linear_fp32(x_TD, weight_ED)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(actual, functional.linear(x_TD.double(), weight_ED.double()), op="linear")


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_fp32_keeps_what_bf16_would_lose(backend: Any) -> None:
    """Logits that differ by less than a bf16 step choose the right expert, rows of a wider tensor included."""
    wide = torch.full((100, 100), torch.nan, dtype=torch.bfloat16)
    wide[:, :64] = normal(100, 64).bfloat16()
    weight_ED = normal(12, 64, seed=1).bfloat16()
    exact = functional.linear(wide[:, :64].double(), weight_ED.double())
    assert rms_ratio(backend.linear_fp32(wide[:, :64], weight_ED), exact) <= 1e-6
    assert rms_ratio(functional.linear(wide[:, :64], weight_ED), exact) > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", ["linear", "linear_fp32"])
def test_rows_may_overlap(backend: Any, function: str) -> None:
    """One row for all tokens, and windows over one vector."""
    weight_ED, vector = normal(12, 64, seed=1).bfloat16(), normal(300).bfloat16()
    for x_TD in (vector[:64].expand(100, 64), vector.unfold(0, 64, 1)[:100]):
        expected = x_TD.double() @ weight_ED.double().T
        assert_close(getattr(backend, function)(x_TD, weight_ED), expected, op="linear", floor=8.0)


def test_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up_TJ = normal(50, 24)
    whole = plain.gated(gate_up_TJ, activation="silu", clamp=1.0)
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 24 * 7)
    assert rms_ratio(plain.gated(gate_up_TJ, activation="silu", clamp=1.0), whole) <= 1e-7


@pytest.mark.parametrize("mutation", ["halves swapped", "no clamp", "clamp on one side of up", "no activation"])
def test_the_tests_can_fail(mutation: str) -> None:
    gate_up_TJ = 3 * normal(40, 32)
    gate_TF, up_TF = gate_up_TJ.chunk(2, dim=1)
    right = reference.gated(gate_up_TJ, activation="silu", clamp=1.5)
    wrong = {
        "halves swapped": reference.gated(torch.cat([up_TF, gate_TF], dim=1), activation="silu", clamp=1.5),
        "no clamp": reference.gated(gate_up_TJ, activation="silu"),
        "clamp on one side of up": functional.silu(gate_TF.clamp(max=1.5)) * up_TF.clamp(max=1.5),
        "no activation": gate_TF.clamp(max=1.5) * up_TF.clamp(-1.5, 1.5),
    }[mutation]
    assert rms_ratio(wrong, right) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    num_tokens=st.sampled_from([0, 1, 3, 11, 12, 13, 96, 97, 200]),
    depth=st.sampled_from([1, 7, 8, 31, 160, 161, 330]),
    num_out=st.sampled_from([1, 5, 24, 25, 48, 505]),
    dtype=st.sampled_from([torch.float64, *DTYPES]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=25)
def test_linear_is_the_product(
    backend: Any, num_tokens: int, depth: int, num_out: int, dtype: torch.dtype, seed: int
) -> None:
    wide_TD, weight_ED = (
        normal(num_tokens, depth + 3, seed=seed).to(dtype),
        normal(num_out, depth, seed=seed + 1).to(dtype),
    )
    x_TD = wide_TD[:, 2 : depth + 2]  # rows of a wider tensor
    expected = x_TD.double() @ weight_ED.double().T
    actual = backend.linear(x_TD, weight_ED)
    assert actual.dtype == dtype
    # a single number may cancel: errors are those of its summands
    assert_close(actual, expected, op="linear", floor=depth**0.5)
    wide_out = torch.full((num_tokens, num_out + 4), torch.nan, dtype=dtype)
    out_TE = wide_out[:, 1 : num_out + 1]
    assert backend.linear(x_TD, weight_ED, out_TE=out_TE) is out_TE
    assert_close(out_TE, expected, op="linear", floor=depth**0.5)
    assert torch.isnan(wide_out[:, [0, -1]]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [2, 40])
def test_a_row_that_is_not_finite_stays_alone(backend: Any, num_tokens: int) -> None:
    x_TD, weight_ED = normal(num_tokens, 64).bfloat16(), normal(30, 64, seed=1).bfloat16()
    clean = backend.linear(x_TD, weight_ED)
    x_TD[0, 5], x_TD[1, 6] = torch.nan, torch.inf
    actual = backend.linear(x_TD, weight_ED)
    assert torch.isnan(actual[0]).all()
    assert torch.isinf(actual[1]).all()
    assert torch.equal(actual[2:], clean[2:])
    assert torch.isnan(
        backend.linear(clean.new_zeros(num_tokens, 64), weight_ED.masked_fill(weight_ED > 2, torch.inf))
    ).any()


@pytest.mark.parametrize("backend", compiled_backends("linear"))
@pytest.mark.parametrize("num_tokens", [1, 5, 100])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_heads_multiply_with_their_own_weights(
    backend: Any, num_tokens: int, is_transposed: bool, out_dtype: torch.dtype
) -> None:
    """Queries' and outputs' rows lie in wider ones, heads of weights apart, as in latent attention."""
    x_THD = normal(num_tokens, 3, 50).bfloat16()[..., :40]
    weight_HED = normal(3, 60, 40, seed=1).bfloat16()[:, 7:]
    expected = torch.einsum("thd,hed->the", x_THD.double(), weight_HED.double())
    wide_out = torch.zeros(num_tokens, 3, 56, dtype=out_dtype)
    stored = weight_HED.mT.contiguous() if is_transposed else weight_HED
    backend.multiply_heads(x_THD, stored, wide_out[..., :53], is_transposed=is_transposed)
    assert_close(wide_out[..., :53], expected, op="linear")
    assert not wide_out[..., 53:].any()
