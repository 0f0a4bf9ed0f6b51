"""Routing and experts: against the formulas, against transformers, and in any order of the slots.

Legend: T tokens, D hidden, E experts, A experts a token, F intermediate.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32MoE
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE

from longprefill.kernels.contracts import Routing
from longprefill.kernels.moe import plain, reference

from .compiled import compiled_backends
from .dsa_cases import make_generator, randomize
from .tolerances_dsa import assert_close

BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(plain, id="plain"),
    *compiled_backends("moe"),
]


def route(backend: Any, logits_TE: torch.Tensor, bias_E: torch.Tensor | None = None, **changes: Any) -> Routing:
    settings_of_a_model: dict[str, Any] = {
        "topk": 4, "scoring": "sigmoid", "num_groups": 1, "topk_groups": 1, "normalize": True, "scale": 2.5,
    }  # fmt: skip
    return backend.route(logits_TE, bias_E, **(settings_of_a_model | changes))


def expert_weights(num_experts: int, width: int, inner: int, dtype: torch.dtype = torch.float32) -> Any:
    generator = make_generator(1)
    gate_up = torch.randn(num_experts, 2 * inner, width, generator=generator) * width**-0.5
    down = torch.randn(num_experts, width, inner, generator=generator) * inner**-0.5
    return gate_up.to(dtype), down.to(dtype)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@settings(max_examples=60)
@given(
    num_tokens=st.integers(0, 20),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (8, 3)]),
    topk=st.integers(1, 4),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    normalize=st.booleans(),
    has_bias=st.booleans(),
    levels=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 1 << 30),
)
def test_routing_against_the_formula(
    backend: Any, num_tokens: int, groups: tuple[int, int], topk: int, scoring: str, normalize: bool, has_bias: bool,
    levels: int, seed: int,
) -> None:  # fmt: skip
    generator = make_generator(seed)
    # Few levels: many experts tie, and the lower one must win.
    logits_TE = torch.randint(-levels, levels + 1, (num_tokens, 32), generator=generator) / levels
    bias_E = torch.randint(-2, 3, (32,), generator=generator).float() / 8 if has_bias else None
    changes = {
        "topk": topk, "scoring": scoring, "num_groups": groups[0], "topk_groups": groups[1], "normalize": normalize,
    }  # fmt: skip
    actual = route(backend, logits_TE, bias_E, **changes)
    expected = route(reference, logits_TE, bias_E, **changes)
    assert actual.expert_TA.dtype == torch.int64
    assert actual.weight_TA.dtype == torch.float32
    assert torch.equal(actual.expert_TA, expected.expert_TA)
    torch.testing.assert_close(actual.weight_TA, expected.weight_TA)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_experts_are_taken_lowest_first(backend: Any) -> None:
    routing = route(backend, torch.zeros(3, 16), num_groups=4, topk_groups=2)
    assert routing.expert_TA.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_steers_the_choice_and_not_the_weight(backend: Any) -> None:
    logits_TE = torch.tensor([[3.0, 2.0, 1.0, -1.0]])
    bias_E = torch.tensor([-5.0, 0.0, 0.0, 5.0])
    routing = route(backend, logits_TE, bias_E, topk=2, normalize=False, scale=1.0)
    assert routing.expert_TA.tolist() == [[3, 1]]
    assert_close(routing.weight_TA, torch.tensor([[-1.0, 2.0]]).double().sigmoid(), op="moe")


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_compete_by_the_sum_of_their_two_best(backend: Any) -> None:
    # Group 0 has the single best expert, group 1 the better pair.
    logits_TE = torch.tensor([[4.0, -9.0, -9.0, 2.0, 2.0, -9.0, -9.0, -9.0, -9.0]])
    routing = route(backend, logits_TE, topk=2, num_groups=3, topk_groups=1)
    assert routing.expert_TA.tolist() == [[3, 4]]


@pytest.mark.parametrize("backend", BACKENDS[1:])
@settings(max_examples=20)
@given(
    num_tokens=st.integers(0, 200),
    num_experts=st.integers(1, 9),
    topk=st.integers(1, 3),
    activation=st.sampled_from(["silu", "gelu"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 30),
)
def test_experts_against_the_formula(
    backend: Any, num_tokens: int, num_experts: int, topk: int, activation: str, dtype: torch.dtype, seed: int
) -> None:
    generator = make_generator(seed)
    topk = min(topk, num_experts)
    x_TD = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    chosen = [torch.randperm(num_experts, generator=generator)[:topk] for _ in range(num_tokens)]
    expert_TA = torch.stack(chosen) if chosen else torch.zeros(0, topk, dtype=torch.int64)
    elsewhere_TA = torch.rand(expert_TA.shape, generator=generator) < 0.2
    routing = Routing(expert_TA.masked_fill(elsewhere_TA, -1), torch.rand(expert_TA.shape, generator=generator))
    gate_up, down = expert_weights(num_experts, 24, 20, dtype)
    actual = backend.experts(x_TD, routing, gate_up, down, activation=activation)
    expected = reference.experts(x_TD.double(), routing, gate_up.double(), down.double(), activation=activation)
    assert actual.dtype == dtype
    assert_close(actual, expected, op="moe")


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_the_slots_changes_no_bit(backend: Any, dtype: torch.dtype) -> None:
    generator = make_generator(2)
    x_TD = torch.randn(50, 24, generator=generator).to(dtype)
    routing = route(plain, torch.randn(50, 12, generator=generator))
    gate_up, down = expert_weights(12, 24, 20, dtype)
    mixed = torch.tensor([2, 0, 3, 1])
    reordered = Routing(routing.expert_TA[:, mixed], routing.weight_TA[:, mixed])
    first = backend.experts(x_TD, routing, gate_up, down, activation="silu")
    assert torch.equal(backend.experts(x_TD, reordered, gate_up, down, activation="silu"), first)


def test_sum_runs_in_ascending_expert_order() -> None:
    # 1e8 + 1 - 1e8 is 0 in fp32 in this order of experts, and 1 in the other.
    gate_up = torch.ones(3, 2, 1) * 20  # silu(20) * 20 is 400 to the last bit
    down = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1) / 400
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        routing = Routing(torch.tensor([order]), torch.ones(1, 3))
        for backend in (plain, reference):
            assert backend.experts(torch.ones(1, 1), routing, gate_up, down, activation="silu").item() == 0


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v32"])
def test_against_transformers(family: str, groups: tuple[int, int]) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 24, "moe_intermediate_size": 20, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "n_group": groups[0], "topk_group": groups[1], "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }  # fmt: skip
    if family == "kimi_linear":
        kimi_config: Any = KimiLinearConfig  # it takes the experts under their old name too, untyped
        module: Any = KimiLinearMoE(kimi_config(num_experts=16, **sizes))
    else:
        module = DeepseekV32MoE(DeepseekV32Config(n_routed_experts=16, **sizes))
    module = module.eval().requires_grad_(False)
    randomize(module, seed=3)
    module.gate.e_score_correction_bias.copy_(torch.randn(16, generator=make_generator(4)) * 0.2)
    x_TD = torch.randn(60, 24, generator=make_generator(5))
    logits_TE, theirs_weight, theirs_expert = module.gate(x_TD)
    routing = route(plain, logits_TE, module.gate.e_score_correction_bias, num_groups=groups[0], topk_groups=groups[1])
    ours = torch.zeros(60, 16).scatter_(1, routing.expert_TA, routing.weight_TA)
    theirs = torch.zeros(60, 16).scatter_(1, theirs_expert, theirs_weight)
    assert torch.equal(ours > 0, theirs > 0)
    assert_close(ours, theirs.double(), op="moe")
    routed = plain.experts(x_TD, routing, module.experts.gate_up_proj, module.experts.down_proj, activation="silu")
    assert_close(routed + module.shared_experts(x_TD), module(x_TD).double(), op="layer")


def test_refusals() -> None:
    logits_TE = torch.zeros(2, 12)
    with pytest.raises(ValueError, match="sigmoid or softmax"):
        route(plain, logits_TE, scoring="relu")
    with pytest.raises(ValueError, match="num_groups=5"):
        route(plain, logits_TE, num_groups=5)
    with pytest.raises(ValueError, match="topk=4: 1 groups offer 3 experts"):
        route(plain, logits_TE, num_groups=4, topk_groups=1)
    gate_up, down = expert_weights(3, 4, 5)
    with pytest.raises(ValueError, match="0 to 3 are routed: this call holds 0 to 2"):
        plain.experts(
            torch.zeros(1, 4), Routing(torch.tensor([[0, 3]]), torch.ones(1, 2)), gate_up, down, activation="silu"
        )
    with pytest.raises(ValueError, match="silu or gelu"):
        plain.experts(
            torch.zeros(1, 4), Routing(torch.tensor([[0]]), torch.ones(1, 1)), gate_up, down, activation="relu"
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_clamped_gates_as_glm5_next_has_them(backend: Any) -> None:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts

    config = Glm5NextTextConfig(
        hidden_size=20, moe_intermediate_size=12, n_routed_experts=5, swiglu_limit=0.6, num_hidden_layers=4
    )
    module = Glm5NextTextExperts(config)
    gate_up_EJD, down_EDF = expert_weights(5, 20, 12)
    x_TD = torch.randn(33, 20, generator=make_generator(2))
    routing = route(backend, torch.randn(33, 5, generator=make_generator(3)), topk=2)
    with torch.no_grad():
        cast(torch.Tensor, module.gate_up_proj).copy_(gate_up_EJD)
        cast(torch.Tensor, module.down_proj).copy_(down_EDF)
        expected_TD = module(x_TD, routing.expert_TA, routing.weight_TA)
    actual_TD = backend.experts(x_TD, routing, gate_up_EJD, down_EDF, activation="silu", clamp=0.6)
    assert_close(actual_TD, expected_TD.double(), op="moe")
    unclamped_TD = backend.experts(x_TD, routing, gate_up_EJD, down_EDF, activation="silu")
    assert (unclamped_TD - expected_TD).abs().max() > 0.05


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 63), (1056, 130), (72, 64)])
@pytest.mark.parametrize("clamp", [None, 0.4])
def test_bf16_experts_of_odd_widths_and_many_tokens(backend: Any, hidden: int, inner: int, clamp: float | None) -> None:
    generator = make_generator(6)
    x_TD = torch.randn(300, hidden, generator=generator).bfloat16()
    routing = Routing(torch.randint(-1, 2, (300, 1), generator=generator), torch.rand(300, 1, generator=generator))
    gate_up, down = expert_weights(2, hidden, inner, torch.bfloat16)
    arguments = {"activation": "silu", "clamp": clamp}
    actual = backend.experts(x_TD, routing, gate_up, down, **arguments, out_dtype=torch.float32)
    expected = reference.experts(x_TD.double(), routing, gate_up.double(), down.double(), **arguments)
    assert actual.dtype == torch.float32
    assert_close(actual.bfloat16(), expected, op="moe")
    unrouted = routing.expert_TA[:, 0] < 0
    assert bool((actual[unrouted] == 0).all())
