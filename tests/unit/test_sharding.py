"""How weights are split over a mesh: shares cover every tensor once, heads stay whole, experts and columns need not
divide."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.shards import even_ranges
from longprefill.workers.model.config import KdaConfig, MlaConfig
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sharding import (
    ALONE,
    MeshPlace,
    Ranges,
    expert_ranges,
    local_config,
    parameter_ranges,
    shard_shape,
)
from longprefill.workers.model.sizes import RAW_CONFIGS

HYBRID = config_from(RAW_CONFIGS["longprefill_hybrid", "mesh"])
CONFIGS = {
    "hybrid": HYBRID,
    "glm5_next": config_from(RAW_CONFIGS["glm5_next", "tiny"]),
    "latent, gated": config_from(
        RAW_CONFIGS["longprefill_hybrid", "mesh"] | {"routed_expert_hidden_size": 24, "mla_use_output_gate": True}
    ),
}
REPLICATED = ("norm", "q_a", "kv_a", "f_a", "g_a", "gate", "bias", "embed", "query", "latent_in", "latent_out")
"""Endings of parameters that every rank has whole; so is everything of the indexer and of hyper-connections."""


def places(num_cp: int, num_tp: int, *, expert_parallel: bool) -> list[MeshPlace]:
    return [
        MeshPlace.of(rank, num_cp=num_cp, num_tp=num_tp, expert_parallel=expert_parallel)
        for rank in range(num_cp * num_tp)
    ]


def indices(ranges: Ranges, dim: int) -> list[int]:
    return [index for run in ranges[dim] for index in run]


@pytest.mark.parametrize("num_cp", [1, 2])
@pytest.mark.parametrize("num_tp", [1, 2, 4])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_shares_cover_every_tensor(name: str, expert_parallel: bool, num_tp: int, num_cp: int) -> None:
    """In at most one dimension, disjoint and complete over the ranks that share it; else whole everywhere."""
    config = CONFIGS[name]
    everyone = places(num_cp, num_tp, expert_parallel=expert_parallel)
    by_rank = [parameter_ranges(config, place) for place in everyone]
    for parameter, shape in parameter_shapes(config).items():
        split = [
            dim
            for dim, size in enumerate(shape)
            if any(indices(ranges[parameter], dim) != list(range(size)) for ranges in by_rank)
        ]
        assert len(split) <= 1, parameter
        if not split:
            continue
        (dim,) = split
        is_expert = parameter.endswith(("moe.gate_up", "moe.down"))
        assert expert_parallel or not is_expert
        sharing = everyone if is_expert else [place for place in everyone if place.cp_rank == 0]
        held = [index for place in sharing for index in indices(by_rank[place.world_rank][parameter], dim)]
        assert sorted(held) == list(range(shape[dim])), parameter
        for place in everyone:
            if not is_expert:
                assert by_rank[place.world_rank][parameter] == by_rank[place.tp_rank][parameter], "cp splits no weights"


@pytest.mark.parametrize("num_tp", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_local_shapes_are_those_of_the_local_config(name: str, num_tp: int) -> None:
    """A rank's layers read what its config says: heads, conv channels, gates."""
    config = CONFIGS[name]
    for place in places(1, num_tp, expert_parallel=False):
        expected = parameter_shapes(local_config(config, place))
        for parameter, ranges in parameter_ranges(config, place).items():
            if parameter.split(".")[-1] not in ("gate_up", "down", "shared_gate_up", "shared_down", "head"):
                assert shard_shape(ranges) == expected[parameter], parameter


@pytest.mark.parametrize("num_tp", [2, 4])
def test_what_is_replicated(num_tp: int) -> None:
    for config in CONFIGS.values():
        for place in places(1, num_tp, expert_parallel=False):
            for parameter, ranges in parameter_ranges(config, place).items():
                is_whole = shard_shape(ranges) == parameter_shapes(config)[parameter]
                is_replicated = (
                    parameter.split(".")[-1] in REPLICATED or ".indexer." in parameter or "_hc." in parameter
                )
                if is_replicated:
                    assert is_whole, parameter


def test_conv_channels_of_a_rank_are_its_heads() -> None:
    """q, k and v are split each on their own: rank 1 of 2 has the second half of all three."""
    kda = HYBRID.layers[0].mixer
    assert isinstance(kda, KdaConfig)
    width = kda.num_heads * kda.key_dim
    ranges = parameter_ranges(HYBRID, places(1, 2, expert_parallel=False)[1])
    (q, k, v), _ = ranges["layers.0.kda.conv"]
    assert (q, k) == (range(width // 2, width), range(width + width // 2, 2 * width))
    v_width = kda.num_value_heads * kda.value_dim
    assert v == range(2 * width + v_width // 2, 2 * width + v_width)
    assert indices(ranges["layers.0.kda.q_proj"], 0) == list(q)
    assert indices(ranges["layers.0.kda.o_proj"], 1) == [channel - 2 * width for channel in v]


def test_gate_and_up_columns_go_together() -> None:
    """97 columns over 4: gate column i and up column i are on one rank, with row i of down."""
    held: list[int] = []
    for place in places(1, 4, expert_parallel=False):
        ranges = parameter_ranges(HYBRID, place)
        gate, up = ranges["layers.0.ffn.gate_up"][0]
        assert [index + 97 for index in gate] == list(up)
        assert indices(ranges["layers.0.ffn.down"], 1) == list(gate)
        held += gate
    assert held == list(range(97))


@given(num_experts=st.integers(1, 40), num_world=st.integers(1, 24))
def test_any_number_of_experts(num_experts: int, num_world: int) -> None:
    ranges = expert_ranges(num_experts, num_world)
    assert [expert for held in ranges for expert in held] == list(range(num_experts))
    sizes = [len(held) for held in ranges]
    assert len(sizes) == num_world
    assert max(sizes) - min(sizes) <= 1


@given(total=st.integers(0, 200), parts=st.integers(1, 20))
def test_even_ranges(total: int, parts: int) -> None:
    ranges = even_ranges(total, parts)
    assert [index for part in ranges for index in part] == list(range(total))
    assert all(len(part) in (total // parts, math.ceil(total / parts)) for part in ranges)


@given(num_cp=st.integers(1, 6), num_tp=st.integers(1, 6), data=st.data())
def test_places(num_cp: int, num_tp: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, num_cp * num_tp - 1))
    place = MeshPlace.of(rank, num_cp=num_cp, num_tp=num_tp, expert_parallel=True)
    assert (place.world_rank, place.num_world) == (rank, num_cp * num_tp)
    assert place.cp_rank < num_cp
    assert place.tp_rank < num_tp


def test_a_rank_alone_has_everything() -> None:
    assert ALONE.is_alone
    assert local_config(HYBRID, ALONE) == HYBRID
    shapes = {name: shard_shape(ranges) for name, ranges in parameter_ranges(HYBRID, ALONE).items()}
    assert shapes == parameter_shapes(HYBRID)


@pytest.mark.parametrize("num_tp", [2, 4])
def test_local_heads(num_tp: int) -> None:
    place = places(1, num_tp, expert_parallel=False)[-1]
    for whole, local in zip(HYBRID.layers, local_config(HYBRID, place).layers, strict=True):
        mixer: Any = local.mixer
        assert mixer.num_heads * num_tp == whole.mixer.num_heads
        if isinstance(whole.mixer, KdaConfig):
            assert mixer.num_value_heads * num_tp == whole.mixer.num_value_heads
        elif isinstance(whole.mixer, MlaConfig):
            assert mixer.indexer == whole.mixer.indexer, "the indexer keeps all of its heads"
        assert local.ffn == whole.ffn
