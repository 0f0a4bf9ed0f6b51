"""The pass in front of KDA's recurrence: conv + SiLU, l2 norm, log decay and beta, against the formulas in fp64.

Legend: T tokens, N segments, C channels (q | k | v), W conv width, H q/k heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from longprefill.kernels.contracts import KdaInputs
from longprefill.kernels.kda import plain, reference

from .compiled import compiled_backends
from .tolerances import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("kda"),
]
SEGMENTS = (0, 1, 1, 3, 6, 22, 75)


@dataclass(frozen=True, kw_only=True)
class Raw:
    """One call's arguments."""

    raw: torch.Tensor
    weight: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    history: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    offsets: tuple[int, ...]
    num_heads: int
    lower_bound: float | None = None
    largest_beta: float = 1.0

    def run(self, backend: Any) -> KdaInputs:
        return backend.make_inputs(
            self.raw, self.weight, self.decay, self.beta, offsets=self.offsets, history_NWC=self.history,
            num_heads=self.num_heads, a_log_G=self.a_log, dt_bias_GK=self.dt_bias, lower_bound=self.lower_bound,
            largest_beta=self.largest_beta,
        )  # fmt: skip

    def cast(self, dtype: torch.dtype, *names: str) -> Raw:
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names or TENSORS})


TENSORS = ("raw", "weight", "decay", "beta", "history", "a_log", "dt_bias")
ROWS = ("raw", "decay", "beta")


def make_raw(
    *, offsets: tuple[int, ...] = SEGMENTS, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (24, 40),
    width: int = 4, **options: Any,
) -> Raw:  # fmt: skip
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    (num_heads, value_heads), (num_keys, num_values) = heads, dims
    channels = 2 * num_heads * num_keys + value_heads * num_values
    # channels of different sizes: a norm over another head's would show
    return Raw(
        raw=normal(offsets[-1], channels) * torch.linspace(0.2, 3, channels),
        weight=normal(channels, width),
        decay=4 * normal(offsets[-1], value_heads, num_keys),
        beta=3 * normal(offsets[-1], value_heads),
        history=normal(len(offsets) - 1, width - 1, channels),
        a_log=torch.linspace(0, 2.7, value_heads),
        dt_bias=normal(value_heads, num_keys),
        offsets=offsets,
        num_heads=num_heads,
        **options,
    )


def check(raw: Raw, backend: Any) -> None:
    found, wanted = raw.run(backend), raw.cast(torch.float64).run(reference)
    for name, actual, expected in zip(KdaInputs._fields, found, wanted, strict=True):
        assert actual.dtype == (raw.raw.dtype if name == "v_TGV" else torch.float32), name
        assert_close(actual, expected, op="kda.inputs", dim=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bounds", [(None, 1.0), (-5.0, 2.0)])
def test_matches_the_formulas(backend: Any, width: int, bounds: tuple[float | None, float]) -> None:
    check(make_raw(width=width, lower_bound=bounds[0], largest_beta=bounds[1]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (2, 6)])
@pytest.mark.parametrize("dims", [(1, 9), (60, 100), (128, 128), (33, 33)])
def test_every_width_of_heads(backend: Any, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(make_raw(heads=heads, dims=dims, offsets=(0, 17, 40)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("history", [torch.bfloat16, torch.float32])
def test_bf16_is_rounded_nowhere_but_in_v(backend: Any, history: torch.dtype) -> None:
    check(make_raw().cast(torch.bfloat16, *ROWS).cast(history, "history"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_projections_may_differ_in_dtype(backend: Any) -> None:
    check(make_raw().cast(torch.bfloat16, "raw", "history"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 0, 0)])
def test_no_tokens(backend: Any, offsets: tuple[int, ...]) -> None:
    inputs = make_raw(offsets=offsets).run(backend)
    assert [tuple(x.shape) for x in inputs] == [(0, 2, 24), (0, 2, 24), (0, 4, 40), (0, 4, 24), (0, 4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_offsets_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="offsets="):
        replace(make_raw(), offsets=(0, 9)).run(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 50), (0, 15, 16, 17, 50), (0, 4, 4, 33, 50)])
def test_a_cut_with_its_halo_changes_no_bit(backend: Any, cuts: tuple[int, ...]) -> None:
    whole = make_raw(offsets=(0, 50))
    rows_TC = torch.cat([whole.history[0], whole.raw])
    cut = replace(whole, offsets=cuts, history=torch.stack([rows_TC[at : at + 3] for at in cuts[:-1]]))
    for actual, expected in zip(cut.run(backend), whole.run(backend), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_reaches_its_window_only(backend: Any) -> None:
    sound = make_raw(offsets=(0, 30, 60))
    raw_TC = sound.raw.clone()
    raw_TC[12], raw_TC[29] = torch.nan, torch.nan
    inputs = replace(sound, raw=raw_TC).run(backend)
    reached = torch.tensor([t in (12, 13, 14, 15, 29) for t in range(60)])
    for name, actual, expected in zip(KdaInputs._fields, inputs, sound.run(backend), strict=True):
        hit = reached if name in ("q_THK", "k_THK", "v_TGV") else torch.zeros_like(reached)
        assert torch.equal(actual[~hit], expected[~hit]), name
        assert actual[hit].isnan().all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_are_views_of_poisoned_buffers(backend: Any) -> None:
    case = make_raw()
    views = {}
    for name in (*ROWS, "history"):
        value = getattr(case, name)
        view = value.new_full([n + 3 for n in value.shape], torch.nan)[tuple(slice(1, 1 + n) for n in value.shape)]
        views[name] = view.copy_(value)
    for actual, expected in zip(replace(case, **views).run(backend), case.run(backend), strict=True):
        assert_close(actual, expected, op="kda.inputs")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slope_beyond_fp32_gives_a_number(backend: Any) -> None:
    case = replace(make_raw(offsets=(0, 20), lower_bound=-5.0), a_log=torch.full((4,), 90.0))
    g_TGK = replace(case, decay=-case.dt_bias.expand_as(case.decay)).run(backend).g_TGK
    assert torch.equal(g_TGK, torch.full_like(g_TGK, -2.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_vector_stays_zero(backend: Any) -> None:
    case = make_raw(offsets=(0, 20))
    raw_TC = case.raw.clone()
    raw_TC[4:8, :24] = 0
    assert not replace(case, raw=raw_TC).run(backend).q_THK[7, 0].any()
