"""Counted bytes of whole meshes are what the ranks' ledgers say, operation by operation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from longprefill.comms.group import Group
from longprefill.comms.thread_group import run_ranks
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import generate
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.ledger import step_ledger
from longprefill.partition.steps import plan_steps
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.prefill import StepPlan

from .mesh_support import Mesh, make_rank, whole_model

SETTINGS = ClusterSettings(model_dir="", dtype="fp32")
BY_ROUTING = ("expert_dispatch", "expert_combine")
"""Follow from the routing."""


@pytest.mark.parametrize(
    ("family", "mesh", "tokens", "step_tokens"),
    [
        ("longprefill_hybrid", Mesh(cp=2, tp=2, ep=True), 333, 192),
        ("glm5_next", Mesh(cp=2, tp=2), 321, 192),
        ("kimi_linear", Mesh(cp=1, tp=2), 200, 128),
        ("deepseek_v32", Mesh(cp=3, tp=1, ep=True), 321, 320),
        ("glm_moe_dsa", Mesh(cp=2, tp=2), 200, 192),
    ],
    ids=str,
)
def test_counted_bytes_are_those_of_the_ledgers(family: str, mesh: Mesh, tokens: int, step_tokens: int) -> None:
    whole = whole_model(RAW_CONFIGS[family, "mesh" if family == "longprefill_hybrid" else "tiny"])
    num_pages = -(-tokens // PAGE_TOKENS)
    prompt_T = torch.arange(tokens) % whole.config.vocab_size
    steps = plan_steps(tokens, step_tokens)

    def on_rank(group: Group) -> Counter[str]:
        rank = make_rank(whole, group, num_pages, mesh)
        rank.open_job(0, prompt_T, tuple(range(num_pages)))
        for step in steps:
            ending = (0,) if step.end == tokens else ()
            piece = Slice(job=0, start=step.start, end=step.end)
            rank.run_step(StepPlan(slices=(piece,), layout="zigzag", exchange="all_gather", logits_of=ending))
        return Counter({op: count.bytes for op, count in group.ledger.ops.items()})

    sent = sum(run_ranks(mesh.size, on_rank, timeout_s=100.0), Counter())
    shape = model_shape(whole.config, SETTINGS)
    counted: Counter[str] = Counter()
    for step in steps:
        layout = generate("zigzag", [Slice(job=0, start=step.start, end=step.end)], mesh.cp)
        counted += Counter(
            step_ledger(layout, shape, num_tp=mesh.tp, is_expert_parallel=mesh.ep, num_ending=int(step.end == tokens))
        )
    assert {op: size for op, size in sent.items() if op not in BY_ROUTING} == dict(counted)
