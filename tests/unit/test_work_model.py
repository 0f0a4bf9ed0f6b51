"""The work model against sums over single tokens, and against figures worked out elsewhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.generators import contiguous, zigzag
from longprefill.partition.layout import PAGE_TOKENS, Fragment, Layout, Slice
from longprefill.partition.steps import plan_steps
from longprefill.partition.work import (
    DenseShape,
    Exchange,
    Flops,
    IndexerShape,
    KdaShape,
    LayerShape,
    MlaShape,
    ModelShape,
    MoeShape,
    attn_res_sources,
    chain_role,
    head_share,
    imbalance,
    layer_flops,
    selected_keys,
    step_flops,
    visible_keys,
    visible_pools,
)

HIDDEN = 40
DENSE = DenseShape(intermediate=96)
MOE = MoeShape(num_experts=6, experts_per_token=2, intermediate=20, shared_intermediate=12, latent_dim=None)
LATENT_MOE = MoeShape(num_experts=6, experts_per_token=2, intermediate=20, shared_intermediate=0, latent_dim=16)
KDA = KdaShape(
    num_heads=3, num_value_heads=6, key_dim=5, value_dim=7, conv_width=4, gate_rank=4, output_gate_rank=2, tile=64
)
FULL_GATE_KDA = KdaShape(
    num_heads=2, num_value_heads=2, key_dim=8, value_dim=3, conv_width=2, gate_rank=3, output_gate_rank=None, tile=32
)
INDEXER = IndexerShape(num_heads=4, head_dim=6, topk=50)
POOLED = IndexerShape(num_heads=4, head_dim=6, topk=50, pool=4)


def mla(indexer: IndexerShape | None, q_lora_rank: int | None = 9, *, is_gated: bool = False) -> MlaShape:
    return MlaShape(
        num_heads=3,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=11,
        nope_dim=5,
        rope_dim=2,
        value_dim=7,
        row_bytes=100,
        indexer=indexer,
        is_gated=is_gated,
    )


@st.composite
def tables(draw: st.DrawFn) -> Layout:
    """Any legal table: ragged slices, cuts on any page border, any rank for any fragment, ranks without rows."""
    num_ranks = draw(st.integers(1, 5))
    slices, fragments = [], []
    for job in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 4) | st.integers(60, 70) | st.integers(0, 400))
        end = start + draw(st.integers(1, 5) | st.integers(1, 500))
        borders = range(start // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS, end, PAGE_TOKENS)
        cuts = sorted(draw(st.sets(st.sampled_from(borders)))) if borders else []
        slices.append(Slice(job=job, start=start, end=end))
        for order, (first, last) in enumerate(pairwise([start, *cuts, end])):
            rank = draw(st.integers(0, num_ranks - 1))
            fragments.append(Fragment(job=job, start=first, length=last - first, rank=rank, order=order))
    return Layout(num_ranks=num_ranks, slices=tuple(slices), fragments=tuple(fragments))


exchanges = st.sampled_from(["all_gather", "head_transposed", "relay"])


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 90), st.integers(1, 9))
def test_closed_forms_are_sums_over_queries(start: int, length: int, topk: int, pool: int) -> None:
    visible = range(start + 1, start + length + 1)
    end = start + length
    assert visible_keys(start, end) == sum(visible)
    assert visible_pools(start, end, pool) == sum(n // pool for n in visible)
    assert selected_keys(start, end, topk) == sum(min(topk, n) for n in visible)
    assert selected_keys(start, end, topk, pool) == sum(min(topk // pool, n // pool) * pool + n % pool for n in visible)


def matmul(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def expected_ffn(ffn: DenseShape | MoeShape) -> int:
    """One token through the feed-forward, matrix by matrix."""

    def gated(width: int, intermediate: int) -> int:
        return 2 * matmul(1, width, intermediate) + matmul(1, intermediate, width)

    if isinstance(ffn, DenseShape):
        return gated(HIDDEN, ffn.intermediate)
    flops = matmul(1, HIDDEN, ffn.num_experts) + gated(HIDDEN, ffn.shared_intermediate)
    width = HIDDEN
    if ffn.latent_dim is not None:
        width = ffn.latent_dim
        flops += matmul(1, HIDDEN, width) + matmul(1, width, HIDDEN)
    return flops + sum(gated(width, ffn.intermediate) for _ in range(ffn.experts_per_token))


def expected_kda(layout: Layout, kda: KdaShape, ffn: DenseShape | MoeShape, exchange: Exchange) -> list[Flops]:
    """Token by token, head by head, and by playing the folds."""
    ranks = [Flops()] * layout.num_ranks
    key, value, heads = kda.key_dim, kda.value_dim, kda.num_value_heads
    conv_channels = 2 * kda.num_heads * key + heads * value
    gate = matmul(1, HIDDEN, kda.gate_rank) + matmul(1, kda.gate_rank, heads * key) + matmul(1, HIDDEN, heads)
    output_gate = matmul(1, HIDDEN, heads * value)
    if kda.output_gate_rank is not None:
        output_gate = matmul(1, HIDDEN, kda.output_gate_rank) + matmul(1, kda.output_gate_rank, heads * value)
    token = matmul(1, HIDDEN, conv_channels) + 2 * kda.conv_width * conv_channels + gate + output_gate
    token += matmul(1, heads * value, HIDDEN)
    for piece in layout.slices:
        chain = layout.chain(piece.job)
        for fragment in chain:
            rank = fragment.rank
            is_middle = 0 < fragment.order < len(chain) - 1
            for _ in range(fragment.length):
                ranks[rank] += Flops(projection=token, ffn=expected_ffn(ffn))
                for _ in range(heads):
                    ranks[rank] += Flops(kda_scan=6 * key * value + 2 * kda.tile * (key + value))
                    if is_middle and exchange != "relay":
                        ranks[rank] += Flops(kda_summary=4 * key * value + 4 * key * key)
            for position in range(fragment.start - kda.conv_width + 1, fragment.start):
                if position >= piece.start:
                    ranks[rank] += Flops(projection=matmul(1, HIDDEN, conv_channels))
        for head in range(heads):
            for rank in range(layout.num_ranks):
                if exchange == "relay":
                    continue
                if exchange == "head_transposed":
                    first = sum(head_share(heads, layout.num_ranks, before) for before in range(rank))
                    is_mine = first <= head < first + head_share(heads, layout.num_ranks, rank)
                    wanted = [fragment.order for fragment in chain if is_mine]
                else:
                    wanted = [fragment.order for fragment in chain if fragment.rank == rank]
                # The state into fragment 1 is what fragment 0 published; each later one costs a product.
                for _ in range(2, max(wanted, default=0) + 1):
                    ranks[rank] += Flops(kda_fold=matmul(key, key, value))
    return ranks


@given(tables(), st.sampled_from([(KDA, DENSE), (FULL_GATE_KDA, LATENT_MOE)]), exchanges)
def test_kda_layers_against_single_tokens(
    layout: Layout, shapes: tuple[KdaShape, DenseShape | MoeShape], exchange: Exchange
) -> None:
    kda, ffn = shapes
    layer = LayerShape(mixer=kda, ffn=ffn)
    assert list(layer_flops(layout, layer, HIDDEN, exchange)) == expected_kda(layout, kda, ffn, exchange)


def expected_mla(layout: Layout, shape: MlaShape, ffn: DenseShape | MoeShape) -> list[Flops]:
    """Token by token; keys are counted by listing them."""
    ranks = [Flops()] * layout.num_ranks
    heads, latent, nope, rope, value = 3, 11, 5, 2, 7
    query_input = HIDDEN if shape.q_lora_rank is None else shape.q_lora_rank
    token = matmul(1, query_input, heads * (nope + rope)) + matmul(1, HIDDEN, latent + rope)
    token += matmul(1, heads * value, HIDDEN)
    token += matmul(1, HIDDEN, shape.q_lora_rank) if shape.q_lora_rank is not None else 0
    token += matmul(1, HIDDEN, heads * value) if shape.is_gated else 0
    indexer = shape.indexer
    if indexer is not None:
        token += matmul(1, query_input, indexer.num_heads * indexer.head_dim)
        token += matmul(1, HIDDEN, indexer.head_dim) + matmul(1, HIDDEN, indexer.num_heads)
        token += matmul(1, HIDDEN, indexer.head_dim) if indexer.pool > 1 else 0
        token += heads * (matmul(1, nope, latent) + matmul(1, latent, value))
    seen: dict[tuple[int, int], set[int]] = {}
    for fragment in layout.fragments:
        for position in range(fragment.start, fragment.end):
            visible = list(range(position + 1))
            if indexer is None:
                attention = heads * len(visible) * (matmul(1, nope + rope, 1) + matmul(1, 1, value))
                seen.setdefault((fragment.rank, fragment.job), set()).update(visible)
                ranks[fragment.rank] += Flops(projection=token, ffn=expected_ffn(ffn), attention=attention)
                continue
            complete = len(visible) // indexer.pool
            selected = min(indexer.topk // indexer.pool, complete) * indexer.pool
            selected += len(visible) - complete * indexer.pool
            ranks[fragment.rank] += Flops(
                projection=token,
                ffn=expected_ffn(ffn),
                indexer=complete * indexer.num_heads * matmul(1, indexer.head_dim, 1),
                attention=selected * heads * (matmul(1, latent + rope, 1) + matmul(1, 1, latent)),
            )
    for (rank, _), rows in seen.items():
        ranks[rank] += Flops(expansion=len(rows) * matmul(1, latent, heads * (nope + value)))
    return ranks


@given(
    tables(),
    st.sampled_from(
        [
            (mla(INDEXER), MOE),
            (mla(POOLED, None), DENSE),
            (mla(None, is_gated=True), LATENT_MOE),
            (mla(None, None), DENSE),
        ]
    ),
)
def test_mla_layers_against_single_tokens(layout: Layout, shapes: tuple[MlaShape, DenseShape | MoeShape]) -> None:
    shape, ffn = shapes
    layer = LayerShape(mixer=shape, ffn=ffn)
    assert list(layer_flops(layout, layer, HIDDEN)) == expected_mla(layout, shape, ffn)


@given(st.integers(0, 20), st.integers(1, 6))
def test_attn_res_sources_by_walking_the_layers(num_layers: int, block_layers: int) -> None:
    finished, running, sources = 0, 0, 0
    for layer in range(num_layers):
        if layer % block_layers == 0 and running:
            finished, running = finished + 1, 0
        for _ in ("mixer", "ffn"):
            sources += 1 + finished + (running > 0)
            running += 1
    assert attn_res_sources(num_layers, block_layers) == sources + 1 + finished + (running > 0)


def model(*layers: LayerShape, attn_res_block: int | None = None) -> ModelShape:
    return ModelShape(hidden=HIDDEN, layers=layers, element_bytes=2, attn_res_block=attn_res_block)


HYBRID = (
    LayerShape(mixer=KDA, ffn=DENSE),
    LayerShape(mixer=KDA, ffn=MOE),
    LayerShape(mixer=KDA, ffn=MOE),
    LayerShape(mixer=mla(INDEXER), ffn=MOE),
)


@given(tables(), exchanges)
def test_a_step_is_the_sum_of_its_layers(layout: Layout, exchange: Exchange) -> None:
    expected = [Flops()] * layout.num_ranks
    for layer in HYBRID:
        parts = layer_flops(layout, layer, HIDDEN, exchange)
        expected = [before + part for before, part in zip(expected, parts, strict=True)]
    assert list(step_flops(layout, model(*HYBRID), exchange)) == expected
    mixing = attn_res_sources(len(HYBRID), 2) * 6 * HIDDEN
    expected = [part + Flops(residual=rows * mixing) for part, rows in zip(expected, layout.row_counts, strict=True)]
    assert list(step_flops(layout, model(*HYBRID, attn_res_block=2), exchange)) == expected


@given(tables(), exchanges)
def test_cuts_move_work_but_only_summaries_folds_and_halos_add_any(layout: Layout, exchange: Exchange) -> None:
    whole = sum(step_flops(contiguous(layout.slices, 1), model(*HYBRID), exchange), Flops())
    cut = sum(step_flops(layout, model(*HYBRID), exchange), Flops())
    for part in ("kda_scan", "indexer", "attention", "ffn", "residual"):
        assert getattr(cut, part) == getattr(whole, part)
    assert whole.kda_summary == whole.kda_fold == 0
    assert cut.projection >= whole.projection
    assert cut.kda == cut.kda_scan + cut.kda_summary + cut.kda_fold
    assert cut.total == cut.kda + cut.indexer + cut.attention + cut.projection + cut.ffn + cut.residual


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_index_work_of_a_fresh_zigzag_is_exactly_even(num_ranks: int, pages: int, num_steps: int) -> None:
    step_tokens = 2 * num_ranks * pages * PAGE_TOKENS
    layouts = [
        zigzag([Slice(job=0, start=start, end=end)], num_ranks)
        for start, end in plan_steps(num_steps * step_tokens, step_tokens)
    ]
    for layout in layouts:
        assert imbalance(layout, model(*HYBRID)).indexer == 1.0
        assert imbalance(layout, model(*HYBRID), "relay").kda == 1.0
    assert imbalance(layouts, model(*HYBRID)).indexer == 1.0
    assert imbalance(layouts, model(LayerShape(mixer=mla(None), ffn=DENSE))).attention == 1.0


@pytest.mark.parametrize(
    ("num_ranks", "pages", "ratio"),
    [(2, 7, 1.020), (2, 9, 1.012), (2, 10, 1.100), (3, 5, 1.080), (3, 13, 1.012), (4, 15, 1.013), (5, 28, 1.040)],
)
def test_extra_pages_go_where_they_unbalance_least(num_ranks: int, pages: int, ratio: float) -> None:
    """The ratios are the best that an exhaustive search over all page counts within one of each other has found."""
    layout = zigzag([Slice(job=0, start=0, end=pages * PAGE_TOKENS)], num_ranks)
    assert imbalance(layout, model(*HYBRID)).indexer == pytest.approx(ratio, abs=2e-3)


@given(st.integers(1, 16), st.integers(1, 60))
def test_contiguous_index_work_tends_to_two_less_one_over_p(num_ranks: int, pages: int) -> None:
    tokens = pages * PAGE_TOKENS
    total = num_ranks * tokens
    ratio = imbalance(contiguous([Slice(job=0, start=0, end=total)], num_ranks), model(*HYBRID)).indexer
    last = tokens * (total - tokens) + tokens * (tokens + 1) // 2
    assert ratio == pytest.approx(last * num_ranks / (total * (total + 1) // 2), rel=1e-12)
    assert ratio == pytest.approx(2 - 1 / num_ranks, rel=1 / tokens)


def test_steps_that_take_turns_balance_each_other() -> None:
    rows = [
        Layout(
            num_ranks=2,
            slices=(Slice(job=0, start=0, end=64),),
            fragments=(Fragment(job=0, start=0, length=64, rank=rank, order=0),),
        )
        for rank in (0, 1)
    ]
    assert imbalance(rows[0], model(*HYBRID)).total == 2.0
    assert imbalance(rows, model(*HYBRID)) == (1.0, 1.0, 1.0, 1.0)


def test_a_model_without_a_kind_of_work_is_even_in_it() -> None:
    layout = contiguous([Slice(job=0, start=0, end=640)], 2)
    ratios = imbalance(layout, model(LayerShape(mixer=KDA, ffn=DENSE)))
    assert (ratios.indexer, ratios.attention) == (1.0, 1.0)


def test_figures_of_the_published_model() -> None:
    """DeepSeek-V3.2 shapes, one million tokens, 61 layers: 549 PF of index work and 36 PF of sparse attention."""
    indexer = IndexerShape(num_heads=64, head_dim=128, topk=2048)
    shape = MlaShape(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        row_bytes=788,
        indexer=indexer,
    )
    moe = MoeShape(num_experts=256, experts_per_token=8, intermediate=2048, shared_intermediate=2048, latent_dim=None)
    layout = zigzag([Slice(job=0, start=0, end=1 << 20)], 64)
    flops = sum(layer_flops(layout, LayerShape(mixer=shape, ffn=moe), 7168), Flops())
    assert round(61 * flops.indexer / 1e15) == 549
    assert round(61 * flops.attention / 1e15) == 36


def test_chain_roles() -> None:
    assert chain_role(0, 1) == (False, False)
    assert [chain_role(order, 4) for order in range(4)] == [(True, False), (True, True), (True, True), (False, False)]


def test_wrong_calls_are_refused() -> None:
    layout = zigzag([Slice(job=0, start=0, end=64)], 2)
    with pytest.raises(ValueError, match="one number of ranks"):
        imbalance([], model(*HYBRID))
    with pytest.raises(ValueError, match="one number of ranks"):
        imbalance([layout, zigzag(layout.slices, 3)], model(*HYBRID))
    with pytest.raises(ValueError, match="exchange='ring' is unknown: use all_gather, head_transposed, relay"):
        layer_flops(layout, HYBRID[0], HIDDEN, "ring")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"IndexerShape\.topk=-1"):
        IndexerShape(num_heads=1, head_dim=1, topk=-1)
    with pytest.raises(ValueError, match=r"IndexerShape\.pool=0"):
        IndexerShape(num_heads=1, head_dim=1, topk=1, pool=0)
    with pytest.raises(ValueError, match="attn_res_block=0"):
        model(attn_res_block=0)
