"""Norms against fp64 formulas, torch's own, and the Hugging Face modules with their order of casts.

Legend: T tokens, G value heads, V value dim, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm, KimiLinearRMSNormGated

from longprefill.kernels.norm import plain, reference

from .compiled import compiled_backends
from .tolerances import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("norm"),
]
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (50, 24), (9, 3, 24)])
def test_rms_norm(backend: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight_D = (3 * normal(*shape) + 1).to(dtype), normal(24, seed=1).to(dtype)
    module = KimiLinearRMSNorm(24, eps=EPS).to(dtype)
    module.weight.data.copy_(weight_D)
    with torch.no_grad():
        expected = module(x)
    actual = backend.rms_norm(x, weight_D, EPS)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="norm")
    assert_close(actual, reference.rms_norm(x.double(), weight_D.double(), EPS), op="norm")


@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_norm_casts_before_it_multiplies(backend: Any) -> None:
    x, weight_D = normal(200, 24).bfloat16(), normal(24, seed=1).bfloat16()
    normed = reference.rms_norm(x, torch.ones_like(weight_D), EPS)
    assert torch.equal(backend.rms_norm(x, weight_D, EPS), normed * weight_D)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (50, 33)])
def test_add_rms_norm_is_a_sum_and_its_norm(backend: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sum_TD, x_TD, weight_D = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype), normal(shape[1]).to(dtype)
    expected_TD, kept_TD = sum_TD + x_TD, x_TD.clone()
    actual = backend.add_rms_norm(sum_TD, x_TD, weight_D, EPS)
    assert torch.equal(sum_TD, expected_TD)  # in place, rounded before the norm
    assert torch.equal(x_TD, kept_TD)
    assert torch.equal(actual, backend.rms_norm(expected_TD, weight_D, EPS))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 24), (50, 24), (9, 3, 24)])
def test_layer_norm(backend: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight_D, bias_D = (normal(*shape) + 5).to(dtype), normal(24, seed=1), normal(24, seed=2)
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    expected = (wide - mean) / (variance + EPS).sqrt() * weight_D.double() + bias_D.double()
    actual = backend.layer_norm(x, weight_D, bias_D, EPS)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="norm")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_gated_rms_norm(backend: Any, dtype: torch.dtype, tokens: int) -> None:
    x_TGV, gate_TGV = normal(tokens, 3, 24).to(dtype), (4 * normal(tokens, 3, 24, seed=1)).to(dtype)
    weight_V = normal(24, seed=2)
    module = KimiLinearRMSNormGated(24, eps=EPS)
    module.weight.data.copy_(weight_V)
    with torch.no_grad():
        expected = module(x_TGV, gate_TGV)
    actual = backend.gated_rms_norm(x_TGV, gate_TGV, weight_V, EPS)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="norm")
    exact = reference.gated_rms_norm(x_TGV.double(), gate_TGV.double(), weight_V.double(), EPS)
    assert_close(actual, exact, op="norm")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_row_stays_zero(backend: Any) -> None:
    zero = torch.zeros(2, 1, 24)
    assert not backend.rms_norm(zero, torch.ones(24), EPS).any()
    assert not backend.gated_rms_norm(zero, zero, torch.ones(24), EPS).any()


def test_row_blocks_and_views_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.full((50, 3, 60), torch.nan)
    wide[..., 7:31] = normal(50, 3, 24)
    x_TGV, gate_TGV, weight_V = wide[..., 7:31], normal(50, 3, 24, seed=1), normal(24, seed=2)
    before = x_TGV.clone()
    norms = (
        lambda: plain.rms_norm(x_TGV, weight_V, EPS),
        lambda: plain.gated_rms_norm(x_TGV, gate_TGV, weight_V, EPS),
        lambda: plain.layer_norm(x_TGV, weight_V, weight_V, EPS),
    )
    whole = [norm() for norm in norms]
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 24 * 3 * 7)
    for norm, expected in zip(norms, whole, strict=True):
        assert_close(norm(), expected.double(), op="norm")
    assert torch.equal(x_TGV, before)
