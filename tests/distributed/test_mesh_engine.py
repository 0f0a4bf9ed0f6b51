"""One result on every CP x TP x EP mesh: every point of every layer, states, rows, logits (fp32, 1e-5)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.comms.solo import SoloGroup
from longprefill.partition.errors import UserError
from longprefill.partition.layout import Slice
from longprefill.workers.cache.states import BoundaryState, KdaState, PoolTail, merge_states, shard_state
from longprefill.workers.mesh import Mesh as RankMesh
from longprefill.workers.model.config import KdaConfig
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.sharding import check_tp
from longprefill.workers.model.sizes import RAW_CONFIGS

from .engine_support import WHOLE, Job, prompt
from .mesh_support import Mesh, Whole, assert_agrees, mesh_config, one_rank, rows_of, run_mesh, whole_model

WHOLE_MODEL = whole_model(mesh_config())
MESHES = [Mesh(cp=cp, tp=tp, ep=ep) for cp, tp in ((1, 2), (2, 2), (3, 2), (1, 4), (4, 2)) for ep in (False, True)]


@pytest.mark.parametrize(("length", "step_tokens"), [(1, 64), (65, WHOLE), (511, WHOLE), (511, 192)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh(mesh: Mesh, length: int, step_tokens: int) -> None:
    """10 experts, 509 words, 97 columns: nothing but heads divides. With 65 tokens most ranks have none."""
    assert_agrees(rows_of(WHOLE_MODEL, [length], step_tokens, mesh))


@pytest.mark.parametrize("mesh", [Mesh(cp=2, tp=2, ep=True), Mesh(cp=1, tp=4), Mesh(cp=3, tp=1, ep=True)], ids=str)
def test_own_choices(mesh: Mesh) -> None:
    """Nothing is replayed: differences must be near ties, and rows that no swap reaches agree."""
    assert_agrees(rows_of(WHOLE_MODEL, [511], 192, mesh, replay=False))


@pytest.mark.parametrize("num_experts", [1, 3, 10])
@pytest.mark.parametrize("mesh", [Mesh(cp=4, tp=2, ep=True), Mesh(cp=2, tp=2, ep=True), Mesh(cp=5, ep=True)], ids=str)
def test_any_number_of_experts(num_experts: int, mesh: Mesh) -> None:
    """More ranks than experts, and 10 over 4; ranks without rows, ranks without experts."""
    whole = whole_model(mesh_config(num_experts=num_experts, num_experts_per_token=min(2, num_experts)))
    assert_agrees(rows_of(whole, [65], WHOLE, mesh))
    assert_agrees(rows_of(whole, [200], 128, mesh))


PARTS: dict[str, dict[str, Any]] = {
    "k-pool of 4": mesh_config(index_kpool=4),
    "k-pool of 16, no positions": mesh_config(index_kpool=16, index_topk=48, rope_parameters=None),
    "gated attention, no query latent, full output gate": mesh_config(
        mla_use_output_gate=True, q_lora_rank=None, linear={"use_full_rank_gate": True}
    ),
    "latent experts, softmax": mesh_config(routed_expert_hidden_size=24, moe_router_activation_func="softmax"),
    "grouped experts, none shared": mesh_config(num_experts=8, num_expert_group=4, topk_group=2, num_shared_experts=0),
    "odd dims": mesh_config(
        hidden_size=45, q_lora_rank=11, kv_lora_rank=13, qk_nope_head_dim=5, qk_rope_head_dim=6, v_head_dim=9,
        index_n_heads=17, index_head_dim=9, index_topk=13, moe_intermediate_size=19, vocab_size=131,
        linear={"head_dim": 7, "value_head_dim": 11},
    ),
    "fewer columns than ranks": mesh_config(intermediate_size=1, moe_intermediate_size=1),
    "convolution of 9": mesh_config(linear={"short_conv_kernel_size": 9}),
    "plain residual, tied embedding": mesh_config(attn_res_block_size=None, tie_word_embeddings=True),
    "deepseek_v32": dict(RAW_CONFIGS["deepseek_v32", "tiny"]),
    "glm_moe_dsa": dict(RAW_CONFIGS["glm_moe_dsa", "tiny"]),
    "glm5_next": dict(RAW_CONFIGS["glm5_next", "tiny"]),
    "kimi_linear": dict(RAW_CONFIGS["kimi_linear", "tiny"]),
}  # fmt: skip


@pytest.mark.parametrize("raw", PARTS.values(), ids=PARTS)
def test_every_part(raw: dict[str, Any]) -> None:
    whole = whole_model(raw)
    assert_agrees(rows_of(whole, [300], 192, Mesh(cp=2, tp=2, ep=True)))
    assert_agrees(rows_of(whole, [130, 70], WHOLE, Mesh(cp=1, tp=2)))


@pytest.mark.parametrize("mesh", [Mesh(cp=3, tp=2, ep=True), Mesh(cp=1, tp=4)], ids=str)
def test_jobs_in_one_step(mesh: Mesh) -> None:
    assert_agrees(rows_of(WHOLE_MODEL, [300, 1, 65, 130], 320, mesh))


def test_jobs_at_different_places() -> None:
    steps = [
        [Slice(job=0, start=0, end=192), Slice(job=1, start=0, end=100)],
        [Slice(job=2, start=0, end=2), Slice(job=1, start=100, end=103)],
        [Slice(job=2, start=2, end=65), Slice(job=0, start=192, end=400), Slice(job=1, start=103, end=200)],
    ]
    whole = whole_model(mesh_config(index_kpool=4))
    assert_agrees(rows_of(whole, [400, 200, 65], steps, Mesh(cp=2, tp=2, ep=True)))


@settings(max_examples=10)
@given(
    lengths=st.lists(st.sampled_from((1, 2, 62, 65, 128, 190, 300)), min_size=1, max_size=3),
    cp=st.integers(1, 3), tp=st.sampled_from((1, 2, 4)), ep=st.booleans(), step_pages=st.integers(1, 5),
    layout=st.sampled_from(("zigzag", "contiguous")),
)  # fmt: skip
def test_any_mesh(lengths: list[int], cp: int, tp: int, ep: bool, step_pages: int, layout: str) -> None:
    assert_agrees(rows_of(WHOLE_MODEL, lengths, 64 * step_pages, Mesh(cp=cp, tp=tp, ep=ep), layout=layout))


@pytest.mark.parametrize("pool", [1, 4])
def test_ragged_resume_on_other_meshes(pool: int, tmp_path: Path) -> None:
    whole = whole_model(mesh_config(index_kpool=pool))
    length, borders = 400, (0, 100, 192, 291)
    meshes = (Mesh(cp=2, tp=1), Mesh(cp=1, tp=2, ep=True), Mesh(cp=3, tp=2))
    job = Job(number=0, tokens=prompt(length, 0, whole.config.vocab_size))
    record = one_rank(whole, length).record
    for n, (mesh, (start, end)) in enumerate(zip(meshes, pairwise(borders), strict=True)):
        folder = tmp_path / str(n)
        folder.mkdir()
        run_mesh(whole, [job], [[Slice(job=0, start=start, end=end)]], mesh, record=record, export_to=folder)
        job = Job(number=0, tokens=job.tokens, snapshot=folder / "0.safetensors")
    assert job.snapshot is not None
    rows = rows_of(whole, [length], WHOLE, Mesh(cp=1, tp=4), snapshots=[job.snapshot], starts={0: borders[-1]})
    assert_agrees(rows)


# ---- states, heads, refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tp", [1, 2, 4])
def test_states_survive_sharding(num_tp: int) -> None:
    config = config_from(mesh_config(index_kpool=4, linear={"value_head_dim": 11, "head_dim": 7}))
    generator = torch.Generator().manual_seed(3)
    start = BoundaryState.start(config, torch.float32, torch.device("cpu"))
    whole = BoundaryState(
        position=66,
        kda={
            n: KdaState(
                state_GKV=torch.randn(s.state_GKV.shape, generator=generator),
                conv_tail_WC=torch.randn(s.conv_tail_WC.shape, generator=generator),
            )
            for n, s in start.kda.items()
        },
        pool_tails={n: PoolTail(key_nX=torch.randn(2, 16), gate_nX=torch.randn(2, 16)) for n in start.pool_tails},
    )
    parts = [shard_state(whole, config, rank, num_tp) for rank in range(num_tp)]
    merged = merge_states(parts, config)
    assert torch.equal(merged.pack(), whole.pack())
    kda = config.layers[0].mixer
    assert isinstance(kda, KdaConfig)
    width = whole.kda[0].conv_tail_WC.shape[1]
    for rank, part in enumerate(parts):
        assert part.kda[0].state_GKV.shape[0] == kda.num_value_heads // num_tp
        assert torch.equal(part.kda[0].state_GKV[0], whole.kda[0].state_GKV[rank * kda.num_value_heads // num_tp])
        assert part.kda[0].conv_tail_WC.shape[1] == width // num_tp
        # the last block is v: its last channels belong to the last rank
        first = 2 * kda.num_heads * kda.key_dim + rank * kda.num_value_heads * kda.value_dim // num_tp
        share = kda.num_value_heads * kda.value_dim // num_tp
        assert torch.equal(part.kda[0].conv_tail_WC[:, -share:], whole.kda[0].conv_tail_WC[:, first : first + share])


@pytest.mark.parametrize(
    ("raw", "num_tp", "message"),
    [
        (mesh_config(), 3, r"--tp 3 does not divide the 4 KDA heads of layer 0: use 1, 2, 4"),
        (mesh_config(num_attention_heads=6), 4, r"--tp 4 does not divide the 6 MLA heads of layer 1: use 1, 2, 3, 6"),
        (dict(RAW_CONFIGS["kimi_linear", "tiny"]), 4, r"--tp 4 does not divide the 2 KDA heads of layer 0: use 1, 2"),
    ],
)
def test_heads_that_do_not_divide_are_refused(raw: dict[str, Any], num_tp: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_tp(config_from(raw), num_tp)


def test_a_world_that_is_no_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tp=2 does not divide the 1 ranks"):
        RankMesh.over(SoloGroup(), 2)


# ---- bf16 -----------------------------------------------------------------------------------------------------------

LENGTHS = (300, 511, 200)
FORMATS = {"bf16": ("bf16", "bf16"), "quantized": ("fp8", "mxfp8")}


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("mesh", [Mesh(cp=2, tp=2, ep=True), Mesh(cp=1, tp=4)], ids=str)
def test_bf16_errs_no_more_on_a_mesh(mesh: Mesh, formats: tuple[str, str]) -> None:
    """The growth rule, over all lengths together."""
    from longprefill.orchestrator.align.compare import compare, pooled

    latent, index_key = formats
    rounded = bf16_model(latent, index_key)
    runs = []
    for length in LENGTHS:
        job = Job(number=0, tokens=prompt(length, 0, rounded.config.vocab_size))
        expected = one_rank(WHOLE_MODEL, length)
        whole_step = [[Slice(job=0, start=0, end=length)]]
        base = run_mesh(rounded, [job], whole_step, Mesh(), record=expected.record)[0]
        found = run_mesh(rounded, [job], whole_step, mesh, record=expected.record)[0]
        runs.append(compare(rounded.config, expected, found, base=base))
    rows = pooled(runs)
    assert_agrees(rows)
    logits = next(row for row in rows if row.what == "logits")
    assert 1e-3 < logits.rms < 0.5, "bf16 shows and does not drown the result"


def bf16_model(latent: str, index_key: str) -> Whole:
    return whole_model(mesh_config(), dtype=torch.bfloat16, latent=latent, index_key=index_key)
