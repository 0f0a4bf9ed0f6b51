"""Hyper-connections: plain = reference = transformers' module, and mistakes in them are caught.

Legend: T tokens, M streams, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

from longprefill.kernels.norm.reference import rms_norm
from longprefill.kernels.residual import plain, reference

from .compiled import compiled_backends
from .tolerances import rms_ratio

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("residual"),
]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
NUMBERS: dict[str, Any] = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-5}


def parameters(num_streams: int, num_hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projection, base and scale under which every mixing weight moves."""
    generator = torch.Generator().manual_seed(seed)
    num_weights = (2 + num_streams) * num_streams
    projection_WF = torch.randn(num_weights, num_streams * num_hidden, generator=generator)
    base_W = torch.randn(num_weights, generator=generator)
    return projection_WF * (num_streams * num_hidden) ** -0.5, base_W, torch.tensor([0.7, 1.3, 2.0])


def streams(num_tokens: int, num_streams: int, num_hidden: int, seed: int = 0) -> torch.Tensor:
    """Streams of very different sizes."""
    values = torch.randn(num_tokens, num_streams, num_hidden, generator=torch.Generator().manual_seed(seed))
    return values * 2.0 ** torch.arange(num_streams).view(1, -1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_transformers_module_agrees(backend: Any, iterations: int) -> None:
    config = Glm5NextTextConfig(
        hidden_size=24, hc_mult=3, hc_sinkhorn_iters=iterations, hc_eps=1e-4, rms_norm_eps=1e-2, num_hidden_layers=4
    )
    module = Glm5NextTextHyperConnection(config)
    projection_WF, base_W, scale_3 = parameters(3, 24)
    with torch.no_grad():
        module.fn.copy_(projection_WF)
        module.base.copy_(base_W)
        module.scale.copy_(scale_3)
        values_TMD, output_TD = streams(37, 3, 24), torch.randn(37, 24, generator=torch.Generator().manual_seed(5))
        post, comb, collapsed = (tensor[0] for tensor in module(values_TMD[None]))
        expected_TMD = post.unsqueeze(-1) * output_TD.unsqueeze(1) + comb.transpose(1, 2) @ values_TMD
    mix = backend.hyper_mix(values_TMD, projection_WF, base_W, scale_3, iterations=iterations, eps=1e-4, norm_eps=1e-2)
    actual_TMD = backend.hyper_update(values_TMD, output_TD, mix.post_TM, mix.comb_TMM)
    for actual, expected in (
        (mix.input_TD, collapsed), (mix.post_TM, post), (mix.comb_TMM, comb), (actual_TMD, expected_TMD)
    ):  # fmt: skip
        assert actual.shape == expected.shape
        assert rms_ratio(actual, expected) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS[1:])
@given(
    num_tokens=st.integers(0, 70),
    num_streams=st.integers(1, 5),
    num_hidden=st.sampled_from([1, 7, 16, 33, 450]),
    iterations=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=40)
def test_every_backend_equals_the_formulas(
    backend: Any, num_tokens: int, num_streams: int, num_hidden: int, iterations: int, dtype: torch.dtype, seed: int
) -> None:
    values_TMD = streams(num_tokens, num_streams, num_hidden, seed).to(dtype)
    output_TD = torch.randn(num_tokens, num_hidden, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    weights = parameters(num_streams, num_hidden, seed)
    numbers = NUMBERS | {"iterations": iterations}
    expected = reference.hyper_mix(values_TMD.double(), *(weight.double() for weight in weights), **numbers)
    actual = backend.hyper_mix(values_TMD, *weights, **numbers)
    assert actual.input_TD.dtype == dtype
    assert actual.post_TM.dtype == actual.comb_TMM.dtype == torch.float32
    assert rms_ratio(actual.input_TD, expected.input_TD) <= TOLERANCES[dtype]
    assert rms_ratio(actual.post_TM, expected.post_TM) <= TOLERANCES[torch.float32]
    assert rms_ratio(actual.comb_TMM, expected.comb_TMM) <= TOLERANCES[torch.float32]
    kept_TMD = values_TMD.clone()
    updated_TMD = backend.hyper_update(values_TMD, output_TD, actual.post_TM, actual.comb_TMM)
    exact_TMD = reference.hyper_update(values_TMD.double(), output_TD.double(), expected.post_TM, expected.comb_TMM)
    assert updated_TMD.dtype == dtype
    assert rms_ratio(updated_TMD, exact_TMD) <= TOLERANCES[dtype]
    assert torch.equal(values_TMD, kept_TMD)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@given(
    num_tokens=st.sampled_from([0, 1, 63, 70, 300, 321]),
    num_streams=st.sampled_from([1, 2, 4]),
    num_hidden=st.sampled_from([7, 32, 136]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=20)
def test_update_and_next_mix_in_one_pass(
    backend: Any, num_tokens: int, num_streams: int, num_hidden: int, dtype: torch.dtype, seed: int
) -> None:
    """Against the two steps one after the other, the input through its norm; the streams are written over."""
    values_TMD = streams(num_tokens, num_streams, num_hidden, seed).to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    output_TD = torch.randn(num_tokens, num_hidden, generator=generator).to(dtype)
    norm_D = torch.randn(num_hidden, generator=generator).to(dtype)
    weights, following = parameters(num_streams, num_hidden, seed), parameters(num_streams, num_hidden, seed + 2)
    mix = plain.hyper_mix(values_TMD, *weights, **NUMBERS)
    sizes = (mix.post_TM, mix.comb_TMM)
    updated_TMD = plain.hyper_update(values_TMD, output_TD, *sizes)
    mean_TD = backend.hyper_final(values_TMD, output_TD, *sizes)
    assert mean_TD.dtype == dtype
    assert rms_ratio(mean_TD, updated_TMD.double().mean(dim=1)) <= TOLERANCES[dtype]
    actual = backend.hyper_update_mix(
        values_TMD, output_TD, *sizes, *following, **NUMBERS, input_norm_D=norm_D, input_eps=1e-5
    )
    assert rms_ratio(values_TMD, updated_TMD.double()) <= TOLERANCES[dtype]
    # from the streams as they were rounded: what one rounding more or less does to the weights is no error
    expected = reference.hyper_mix(values_TMD.double(), *(weight.double() for weight in following), **NUMBERS)
    normed_TD = rms_norm(expected.input_TD, norm_D.double(), 1e-5)
    assert actual.input_TD.dtype == dtype
    assert rms_ratio(actual.input_TD, normed_TD) <= TOLERANCES[dtype]
    assert rms_ratio(actual.post_TM, expected.post_TM) <= TOLERANCES[torch.float32]
    assert rms_ratio(actual.comb_TMM, expected.comb_TMM) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("backend", compiled_backends("residual"))
@pytest.mark.parametrize("num_tokens", [256, 300, 700])
def test_threads_change_no_bit(backend: Any, num_tokens: int) -> None:
    """A thread's share of a call is no call: on AMX fewer than 256 tokens are multiplied in another way."""
    values_TMD, weights = streams(num_tokens, 4, 32).bfloat16(), parameters(4, 32)
    expected = backend.hyper_mix(values_TMD, *weights, **NUMBERS)
    try:
        for num_threads in (2, 3, 5):
            torch.set_num_threads(num_threads)
            for found, wanted in zip(backend.hyper_mix(values_TMD, *weights, **NUMBERS), expected, strict=True):
                assert torch.equal(found, wanted)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("backend", compiled_backends("residual"))
def test_widest_streams_and_raw_weights(backend: Any) -> None:
    """F = 28,672 products of one sign: the longest chain of sums there is, and the worst."""
    generator = torch.Generator().manual_seed(0)
    values_TMD = (torch.rand(256, 4, 7168, generator=generator) + 0.5).bfloat16()
    projection_WF = torch.rand(24, 4 * 7168, generator=generator)
    weights = (projection_WF, torch.randn(24, generator=generator), torch.tensor([0.7, 1.3, 2.0]) / 28672**0.5)
    numbers = NUMBERS | {"iterations": 2}
    expected = plain.hyper_mix(values_TMD.double(), *(weight.double() for weight in weights), **numbers)
    found = backend.hyper_mix(values_TMD, *weights, **numbers)
    assert rms_ratio(found.comb_TMM, expected.comb_TMM) <= 10 * TOLERANCES[torch.float32]
    assert rms_ratio(found.post_TM, expected.post_TM) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixing_keeps_the_sum_of_the_streams(backend: Any) -> None:
    """Columns of the mixing matrix sum to 1, rows nearly, so many layers neither grow nor starve the streams."""
    mix = backend.hyper_mix(streams(50, 4, 16), *parameters(4, 16), **NUMBERS)
    for dim, tolerance in ((1, 1e-5), (2, 0.1)):
        torch.testing.assert_close(mix.comb_TMM.sum(dim), torch.ones(50, 4), rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_rows_are_independent(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's result does not depend on which tokens are computed with it."""
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 4 * 16 * 7)
    values_TMD, weights = streams(50, 4, 16), parameters(4, 16)
    whole = backend.hyper_mix(values_TMD, *weights, **NUMBERS)
    parts = [backend.hyper_mix(part, *weights, **NUMBERS) for part in values_TMD.split(13)]
    for field in range(3):
        torch.testing.assert_close(torch.cat([part[field] for part in parts]), whole[field], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mutation",
    ["no Sinkhorn", "rows last", "matrix transposed", "post not doubled", "norm of each stream", "norm with weight"],
)
def test_the_tests_can_fail(mutation: str) -> None:
    """Each mistake moves the new streams by far more than the tolerance."""
    values_TMD, output_TD = streams(40, 4, 16), torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
    weights = parameters(4, 16)
    right = plain.hyper_mix(values_TMD, *weights, **NUMBERS)
    post_TM, comb_TMM = right.post_TM, right.comb_TMM
    if mutation == "no Sinkhorn":
        comb_TMM = plain.hyper_mix(values_TMD, *weights, **dict[str, Any](NUMBERS, iterations=1)).comb_TMM
    elif mutation == "rows last":
        early = plain.hyper_mix(values_TMD, *weights, **dict[str, Any](NUMBERS, iterations=2)).comb_TMM
        comb_TMM = early / early.sum(2, keepdim=True)
    elif mutation == "matrix transposed":
        comb_TMM = comb_TMM.transpose(1, 2)
    elif mutation == "post not doubled":
        post_TM = post_TM / 2
    else:
        per_stream = values_TMD.square().mean(-1, keepdim=True).rsqrt()
        changed = values_TMD * (per_stream if mutation == "norm of each stream" else torch.linspace(0.5, 2.0, 16))
        wrong = plain.hyper_mix(changed, *weights, **NUMBERS)
        post_TM, comb_TMM = wrong.post_TM, wrong.comb_TMM
    expected_TMD = plain.hyper_update(values_TMD, output_TD, right.post_TM, right.comb_TMM)
    assert rms_ratio(plain.hyper_update(values_TMD, output_TD, post_TM, comb_TMM), expected_TMD) > 1e-3
