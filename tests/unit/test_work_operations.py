"""Operations add up to the work model; hyper-connections and grouped queries against their formulae."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.partition.generators import generate, zigzag
from longprefill.partition.halo import RowSource, halo_moves
from longprefill.partition.layout import Slice
from longprefill.partition.operations import OPERATIONS, LayerPlace, layer_operations, operation_shape
from longprefill.partition.row_work import residual_flops
from longprefill.partition.shapes import (
    DenseShape,
    GqaShape,
    IndexerShape,
    KdaShape,
    LayerShape,
    MlaShape,
    ModelShape,
    MoeShape,
)
from longprefill.partition.traffic import Traffic, summary_traffic
from longprefill.partition.work import Exchange, chain_role, halo_flops, head_share, layer_flops, step_flops

KDA = KdaShape(num_heads=2, num_value_heads=6, key_dim=5, value_dim=7, conv_width=4, gate_rank=4, output_gate_rank=2)
MOE = MoeShape(num_experts=6, experts_per_token=2, intermediate=20, shared_intermediate=12, latent_dim=16)
DENSE = DenseShape(intermediate=24)


def mla(indexer: IndexerShape | None, *, q_lora_rank: int | None = 9, is_gated: bool = False) -> MlaShape:
    return MlaShape(
        num_heads=3, q_lora_rank=q_lora_rank, kv_lora_rank=11, nope_dim=5, rope_dim=2, value_dim=7, row_bytes=40,
        indexer=indexer, is_gated=is_gated,
    )  # fmt: skip


INDEXER = IndexerShape(num_heads=4, head_dim=6, topk=96, key_bytes=12)
LAYERS = (
    LayerShape(mixer=KDA, ffn=DENSE),
    LayerShape(mixer=replace(KDA, output_gate_rank=None, conv_width=1), ffn=MOE),
    LayerShape(mixer=mla(None, q_lora_rank=None), ffn=DENSE),
    LayerShape(mixer=mla(INDEXER, is_gated=True), ffn=MOE),
    LayerShape(mixer=mla(replace(INDEXER, pool=4)), ffn=replace(MOE, shared_intermediate=0)),
    LayerShape(mixer=GqaShape(num_heads=4, num_kv_heads=2, head_dim=8, row_bytes=64), ffn=DENSE),
)
MODEL = ModelShape(hidden=40, layers=LAYERS, element_bytes=2, attn_res_block=None, vocab_size=50)
slices_of = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 900)).map(lambda span: (span[0], span[0] + span[1])),
    min_size=1,
    max_size=3,
).map(lambda spans: [Slice(job=job, start=start, end=end) for job, (start, end) in enumerate(spans)])
EXCHANGES: tuple[Exchange, ...] = ("all_gather", "head_transposed", "relay")


@settings(max_examples=40)
@given(slices_of, st.integers(1, 7), st.sampled_from(EXCHANGES), st.sampled_from(["zigzag", "contiguous"]))
def test_operations_add_up_to_the_work_model(slices: list[Slice], num_ranks: int, exchange: Exchange, kind) -> None:
    layout = generate(kind, slices, num_ranks)
    for layer in LAYERS:
        counted = layer_flops(layout, layer, MODEL.hidden, exchange)
        works = layer_operations(layout, layer, MODEL, LayerPlace(exchange=exchange))
        assert [sum(each.flops for each in work.all) for work in works] == [flops.total for flops in counted]
        for operation in works[0].all:
            assert operation.name in OPERATIONS
            shape = operation_shape(operation.name, layer, MODEL)
            assert shape["hidden"] == MODEL.hidden
            assert all(isinstance(value, int) for value in shape.values())


def test_some_ranks_are_the_same_as_all() -> None:
    layout = zigzag([Slice(job=0, start=0, end=5000)], 5)
    for layer in LAYERS:
        everything = layer_operations(layout, layer, MODEL, LayerPlace())
        assert layer_operations(layout, layer, MODEL, LayerPlace(), (0, 3)) == (everything[0], everything[3])


def test_tensor_parallel_ranks_share_what_is_per_own_row() -> None:
    layout = zigzag([Slice(job=0, start=0, end=4096)], 2)
    layer = LAYERS[3]
    totals: list[Counter[str]] = []
    for tp in (1, 4):
        totals.append(Counter())
        for operation in layer_operations(layout, layer, MODEL, LayerPlace(num_tp=tp))[0].all:
            totals[-1][operation.name] += operation.flops
    alone, shared = totals
    for name in ("mla.rows", "indexer", "moe.route", "moe.experts"):
        assert shared[name] == pytest.approx(alone[name] / 4, rel=0.01), name
    for name in ("attention.short", "attention.sparse", "mla.output", "moe.shared"):
        assert shared[name] == alone[name], name  # heads and columns are split in the shape


@given(slices_of, st.integers(1, 7), st.integers(1, 5))
@settings(max_examples=40)
def test_halo_rows_in_closed_form(slices: list[Slice], num_ranks: int, width: int) -> None:
    layout = zigzag(slices, num_ranks)
    counts = [0] * num_ranks
    for move in halo_moves(layout, width - 1):
        counts[move.fragment.rank] += isinstance(move.source, RowSource)
    kda = replace(KDA, conv_width=width)
    assert halo_flops(layout, kda, 10) == [count * 20 * kda.conv_channels for count in counts]


@given(slices_of, st.integers(1, 9))
@settings(max_examples=40)
def test_head_transposed_in_closed_form(slices: list[Slice], num_ranks: int) -> None:
    """Against every message by itself."""
    layout = zigzag(slices, num_ranks)
    expected = [Traffic() for _ in range(num_ranks)]
    shares = [head_share(KDA.num_value_heads, num_ranks, rank) for rank in range(num_ranks)]
    there = [[0] * num_ranks for _ in range(num_ranks)]
    back = [[0] * num_ranks for _ in range(num_ranks)]
    for piece in layout.slices:
        chain = layout.chain(piece.job)
        for fragment in chain:
            role = chain_role(fragment.order, len(chain))
            size = KDA.state_bytes * role.publishes_state + KDA.transition_bytes * role.publishes_transition
            for peer in range(num_ranks):
                there[fragment.rank][peer] += size // KDA.num_value_heads * shares[peer]
                back[peer][fragment.rank] += (
                    (fragment.order > 0) * KDA.state_bytes // KDA.num_value_heads * shares[peer]
                )
    for table in (there, back):
        for sender in range(num_ranks):
            for receiver in range(num_ranks):
                size = table[sender][receiver]
                if sender != receiver and size:
                    expected[sender] += Traffic(sent_bytes=size, sent_messages=1)
                    expected[receiver] += Traffic(received_bytes=size, received_messages=1)
    assert summary_traffic(layout, KDA, "head_transposed") == tuple(expected)


def test_hyper_connections_are_counted() -> None:
    layout = zigzag([Slice(job=0, start=0, end=1000)], 3)
    plain = step_flops(layout, MODEL)
    hyper = step_flops(layout, replace(MODEL, hyper_streams=4))
    streams, hidden = 4, MODEL.hidden
    norm, weights, read = 2 * streams * hidden, 2 * streams * hidden * (2 + streams) * streams, 2 * streams * hidden
    mixed, added = 2 * streams * streams * hidden, 2 * streams * hidden
    site = norm + weights + read + mixed + added
    for rank, (with_hyper, without) in enumerate(zip(hyper, plain, strict=True)):
        assert with_hyper.residual - without.residual == layout.row_counts[rank] * 2 * len(LAYERS) * site
    assert residual_flops(replace(MODEL, hyper_streams=4), 0) == 2 * site


def test_grouped_queries_are_counted() -> None:
    layout = zigzag([Slice(job=0, start=0, end=300)], 1)
    (flops,) = layer_flops(layout, LAYERS[5], 40)
    assert flops.attention == 4 * 4 * 8 * 300 * 301 // 2
    assert flops.projection == 300 * 2 * 40 * (4 + 2 + 2 + 4) * 8
