"""Rotary positions: both pairings against complex rotation and transformers, exact at millions of tokens.

Legend: T tokens, H heads, P rotated dims, P2 = P / 2 pairs.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, rotate_half

from longprefill.kernels.rope import plain, reference
from longprefill.kernels.rope.frequencies import inverse_frequencies, yarn_factors, yarn_magnitude

from .tolerances import assert_close

Pairing = Literal["interleaved", "half"]
BACKENDS = [pytest.param(reference, id="reference"), pytest.param(plain, id="plain")]
PAIRINGS: list[Pairing] = ["interleaved", "half"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frequencies(dim: int) -> torch.Tensor:
    return torch.tensor(inverse_frequencies(10000.0, dim), dtype=torch.float64)


def by_definition(
    x_THP: torch.Tensor, positions_T: torch.Tensor, freq_P2: torch.Tensor, pairing: Pairing
) -> torch.Tensor:
    """Each pair as one complex number, turned in fp64, one pair at a time."""
    out_THP, num_pairs = x_THP.double().clone(), freq_P2.shape[0]
    for i in range(num_pairs):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + num_pairs)
        for t, position in enumerate(positions_T.tolist()):
            turn = complex(math.cos(position * float(freq_P2[i])), math.sin(position * float(freq_P2[i])))
            for head in range(x_THP.shape[1]):
                turned = complex(float(x_THP[t, head, a]), float(x_THP[t, head, b])) * turn
                out_THP[t, head, a], out_THP[t, head, b] = turned.real, turned.imag
    return out_THP


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 4_000_000])
def test_matches_the_definition(backend: Any, pairing: Pairing, dtype: torch.dtype, first: int) -> None:
    x_THP, positions_T = normal(5, 3, 10).to(dtype), first + torch.tensor([0, 3, 3, 64, 1001])
    expected = by_definition(x_THP, positions_T, frequencies(10), pairing)
    actual = backend.rotate(x_THP, positions_T, frequencies(10), pairing)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="rope")


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_half_pairing_agrees(backend: Any) -> None:
    x_THP, positions_T = normal(20, 2, 16), torch.arange(20)
    angle = positions_T.unsqueeze(-1) * frequencies(16).float()
    both = torch.cat([angle, angle], -1).unsqueeze(0)
    heads_first = x_THP.transpose(0, 1).unsqueeze(0)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, both.cos(), both.sin())
    actual = backend.rotate(x_THP, positions_T, frequencies(16), "half")
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
    assert rotate_half(x_THP).shape == x_THP.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairings_are_one_rotation_of_permuted_dims(backend: Any) -> None:
    x_THP, positions_T = normal(9, 2, 12), torch.arange(9) * 100
    order = torch.cat([torch.arange(0, 12, 2), torch.arange(1, 12, 2)])
    interleaved = backend.rotate(x_THP, positions_T, frequencies(12), "interleaved")
    half = backend.rotate(x_THP[..., order], positions_T, frequencies(12), "half")
    torch.testing.assert_close(half, interleaved[..., order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_products_depend_on_the_distance_only(pairing: Pairing) -> None:
    q, k = normal(1, 1, 64), normal(1, 1, 64, seed=1)

    def product(position: int) -> float:
        turned = [
            plain.rotate(x.double(), torch.tensor([p]), frequencies(64), pairing)
            for x, p in ((q, position + 777), (k, position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(0) == pytest.approx(product(4_194_304), abs=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_row_blocks_views_and_empty_inputs(backend: Any, pairing: Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.full((30, 3, 31), torch.nan)
    wide[..., 5:17] = normal(30, 3, 12)
    x_THP, positions_T = wide[..., 5:17], torch.arange(30) * 1000
    before = x_THP.clone()
    expected = reference.rotate(before.double(), positions_T, frequencies(12), pairing)
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 36 * 7)
    assert_close(backend.rotate(x_THP, positions_T, frequencies(12), pairing), expected, op="rope")
    assert torch.equal(x_THP, before)
    one_odd_row = wide.flatten()[5:17].view(1, 1, 12)
    assert_close(backend.rotate(one_odd_row, positions_T[:1], frequencies(12), pairing), expected[:1, :1], op="rope")
    assert backend.rotate(x_THP[:0], positions_T[:0], frequencies(12), pairing).shape == (0, 3, 12)
    assert backend.rotate(x_THP[:, :0], positions_T, frequencies(12), pairing).shape == (30, 0, 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_pairing_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="pairing='neox'"):
        backend.rotate(normal(1, 1, 4), torch.arange(1), frequencies(4), "neox")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("width", "num_frequencies"), [(7, 3), (8, 3), (8, 1), (8, 8)])
def test_widths_without_pairs_are_refused(backend: Any, pairing: Pairing, width: int, num_frequencies: int) -> None:
    message = (
        rf"x of shape \[2, 3, {width}\] with frequencies of shape \[{num_frequencies}\]: the last dim must be even"
    )
    with pytest.raises(ValueError, match=message):
        backend.rotate(normal(2, 3, width), torch.arange(2), frequencies(2 * num_frequencies), pairing)


@given(
    theta=st.sampled_from([1e4, 5e5, 8e6]), dim=st.sampled_from([32, 64, 128]), factor=st.floats(1.0, 64.0),
    original=st.sampled_from([4096, 8192, 131072]),
)  # fmt: skip
def test_yarn_agrees_with_transformers(theta: float, dim: int, factor: float, original: int) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = DeepseekV3Config(rope_parameters=rope, qk_rope_head_dim=dim, max_position_embeddings=original * 64)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device=torch.device("cpu"))
    scale = yarn_factors(theta, dim, factor=factor, original_max_tokens=original)
    actual = torch.tensor(inverse_frequencies(theta, dim, scale))
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
    assert attention_factor == pytest.approx(yarn_magnitude(factor, 1.0) / yarn_magnitude(factor, 1.0))


def test_yarn_magnitude_of_deepseek_v32() -> None:
    assert yarn_magnitude(40.0, 1.0) == pytest.approx(1.36889, abs=1e-5)
    assert 192**-0.5 * yarn_magnitude(40.0, 1.0) ** 2 == pytest.approx(0.13523, abs=1e-5)
    assert yarn_magnitude(1.0, 1.0) == 1.0


def test_wrong_frequencies_are_refused() -> None:
    with pytest.raises(ValueError, match="dim=7"):
        inverse_frequencies(1e4, 7)
    with pytest.raises(ValueError, match="3 frequency factors for dim=8"):
        inverse_frequencies(1e4, 8, (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="yarn factor=0"):
        yarn_factors(1e4, 64, factor=0.0, original_max_tokens=4096)
