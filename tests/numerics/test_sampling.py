"""Token sampling: the generator's published vectors, the distribution, and independence of call order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.kernels.sampling import plain, reference
from longprefill.kernels.sampling.philox import philox4x32, uniform

from .dsa_cases import make_generator

BACKENDS = [pytest.param(reference, id="reference"), pytest.param(plain, id="plain")]


def draw(backend: Any, logits: Any, **changes: Any) -> int:
    request: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "seed": 0, "sample": 0, "position": 0}
    return backend.sample(torch.as_tensor(logits), **(request | changes))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    """The three vectors that the authors publish for Philox4x32-10."""
    assert philox4x32(counter, key) == words


def test_uniform_depends_on_each_argument_and_fills_the_interval() -> None:
    numbers = [
        uniform(seed=seed, sample=sample, position=p) for seed in (0, 1) for sample in (0, 1) for p in range(500)
    ]
    assert len(set(numbers)) == 2000
    assert all(0 <= u < 1 for u in numbers)
    assert sum(numbers) / 2000 == pytest.approx(0.5, abs=0.03)
    # High halves count too: streams 2^32 apart are others.
    assert uniform(seed=1 << 32, sample=0, position=0) != uniform(seed=0, sample=0, position=0)
    assert uniform(seed=0, sample=0, position=1 << 32) != uniform(seed=0, sample=1, position=0)
    with pytest.raises(ValueError, match="seed=-1"):
        uniform(seed=-1, sample=0, position=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_lowest_of_equal_tokens(backend: Any, dtype: torch.dtype) -> None:
    logits = torch.tensor([1.0, 3.0, -2.0, 3.0, 3.0], dtype=dtype)
    assert draw(backend, logits, temperature=0.0) == 1
    assert draw(backend, torch.zeros(9, dtype=dtype), temperature=0.0) == 0


@settings(max_examples=60)
@given(
    size=st.integers(1, 40),
    levels=st.sampled_from([2, 1000]),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.5, 0.95, 1.0]),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_backends_agree(size: int, levels: int, temperature: float, top_p: float, seed: int) -> None:
    logits = torch.randint(-levels, levels + 1, (size,), generator=make_generator(seed & 0xFFFF)) * 3 / levels
    for position in range(5):
        request = {"temperature": temperature, "top_p": top_p, "seed": seed, "position": position}
        assert draw(plain, logits, **request) == draw(reference, logits, **request)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frequencies_follow_the_softmax(backend: Any) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])
    expected = (logits.double() / 0.8).softmax(0)
    counts = torch.zeros(5)
    for position in range(4000):
        counts[draw(backend, logits, temperature=0.8, seed=5, position=position)] += 1
    deviation = (counts / 4000 - expected).abs() / (expected * (1 - expected) / 4000).sqrt()
    assert bool((deviation < 4).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nucleus_is_the_shortest_prefix_that_reaches_top_p(backend: Any) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).double().log()
    for top_p, allowed in ((0.35, {1}), (0.45, {1, 3}), (0.75, {1, 3, 2}), (1.0, {0, 1, 2, 3})):
        drawn = {draw(backend, logits, top_p=top_p, seed=7, position=position) for position in range(300)}
        assert drawn == allowed


@pytest.mark.parametrize("backend", BACKENDS)
def test_nucleus_of_equal_tokens_takes_the_lower_ids(backend: Any) -> None:
    drawn = {draw(backend, torch.zeros(8), top_p=0.26, seed=3, position=position) for position in range(200)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top_p", [0.6, 1.0])
def test_rounding_does_not_swap_tokens_that_are_nearly_equal(backend: Any, top_p: float) -> None:
    """Another batch or step size moves logits by some 1e-6; half of these tokens have a neighbour as near as that."""
    logits = torch.randn(30, generator=make_generator(5)).repeat_interleave(2)
    noise = 1e-6 * torch.randn(2, 60, generator=make_generator(6))
    one, other = (
        [
            draw(backend, logits + part, temperature=0.8, top_p=top_p, seed=9, position=position)
            for position in range(500)
        ]
        for part in noise
    )
    assert one == other


@pytest.mark.parametrize("backend", BACKENDS)
def test_forbidden_tokens_never_come(backend: Any) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    drawn = {draw(backend, logits, temperature=9.0, seed=1, position=position) for position in range(100)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_calls_does_not_matter(backend: Any) -> None:
    logits = torch.randn(50, generator=make_generator(0))
    forward = [draw(backend, logits, seed=2, sample=1, position=position) for position in range(30)]
    backward = [draw(backend, logits, seed=2, sample=1, position=position) for position in reversed(range(30))]
    assert forward == backward[::-1]
    assert forward != [draw(backend, logits, seed=2, sample=2, position=position) for position in range(30)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusals(backend: Any) -> None:
    logits = torch.zeros(6)
    logits[[1, 4]] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="2 of 6 logits are NaN"):
            draw(backend, logits, temperature=temperature)
    with pytest.raises(ValueError, match="1 of 2 logits"):
        draw(backend, [0.0, math.inf])
    with pytest.raises(ValueError, match="all 2 logits are -inf"):
        draw(backend, [-math.inf, -math.inf])
    with pytest.raises(ValueError, match="temperature=-1"):
        draw(backend, [0.0], temperature=-1.0)
    with pytest.raises(ValueError, match="top_p=0"):
        draw(backend, [0.0], top_p=0.0)
    with pytest.raises(ValueError, match="non-empty row"):
        draw(backend, torch.zeros(2, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_of_known_probabilities(backend: Any) -> None:
    """Ties come by id, forbidden tokens are left out, and temperature plays no part."""
    logits = torch.tensor([0.25, 0.125, 0.0, 0.25, 0.375]).log()
    found = backend.logprobs(logits, token=1, num_top=4)
    assert found.token == pytest.approx(math.log(0.125), rel=1e-6)
    assert [number for number, _ in found.top] == [4, 0, 3, 1]
    assert [value for _, value in found.top] == pytest.approx([math.log(p) for p in (0.375, 0.25, 0.25, 0.125)])
    assert len(backend.logprobs(logits, token=0, num_top=20).top) == 4
    assert backend.logprobs(logits, token=0, num_top=0).top == ()
    with pytest.raises(ValueError, match="token=5"):
        backend.logprobs(logits, token=5, num_top=0)
    with pytest.raises(ValueError, match="NaN"):
        backend.logprobs(torch.tensor([0.0, math.nan]), token=0, num_top=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_log_probability_is_the_greedy_token(backend: Any, dtype: torch.dtype) -> None:
    """Also where two logits differ by less than a rounding of their log-probabilities."""
    logits = torch.tensor([0.0, 1e-9, -3.0], dtype=dtype)
    assert draw(backend, logits, temperature=0.0) == 1
    for num_top in (1, 2, 3):
        found = backend.logprobs(logits, token=1, num_top=num_top)
        assert [number for number, _ in found.top] == [1, 0, 2][:num_top]
        assert found.top[0][1] == found.token


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_logprobs_agree_with_the_reference(scale: float) -> None:
    logits = scale * torch.randn(700, generator=make_generator(5)).round(decimals=2)
    plainly, exactly = (b.logprobs(logits, token=17, num_top=50) for b in (plain, reference))
    assert plainly.token == pytest.approx(exactly.token, rel=1e-5, abs=1e-4)
    assert [number for number, _ in plainly.top] == [number for number, _ in exactly.top]
    assert [value for _, value in plainly.top] == pytest.approx([value for _, value in exactly.top], rel=1e-5, abs=1e-4)
