"""One sparse attention layer against transformers' DeepseekV32Attention, over ranks and steps, far beyond the top-k.

The class keeps every score and mask; ours reads paged caches. Its selections are replayed in ours, where each
difference must be a near tie. Outputs at every position, latents and index keys agree.

Legend: T tokens, D hidden, K selected positions.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch

from longprefill.partition.generators import LayoutKind
from longprefill.workers.cache.pages import CacheFormats
from longprefill.workers.choices import Record
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.layers.attention import AttentionLayer
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.model import Model
from longprefill.workers.model.parameters import parameter_shapes
from tests.distributed.engine_support import (
    TOLERANCE,
    WHOLE,
    Engine,
    Job,
    Outcome,
    assert_equal_outcomes,
    hybrid,
    run,
    steps_of,
)

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as oracle  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "odd, top-k of 5, more index heads": {
        "hidden_size": 43, "q_lora_rank": 27, "kv_lora_rank": 21, "qk_nope_head_dim": 11, "qk_rope_head_dim": 6,
        "v_head_dim": 13, "num_attention_heads": 3, "index_n_heads": 40, "index_head_dim": 9, "index_topk": 5,
    },
    "index keys that rotate whole": {"index_head_dim": 8, "index_topk": 32},
}  # fmt: skip
LENGTH = 700
NORM_EPS = 1e-12


class Case(NamedTuple):
    """transformers' layer, what it does with the input, and its selections."""

    config: Any
    module: Any
    x_TD: torch.Tensor
    outcome: Outcome
    record: Record


@functools.cache
def case_of(name: str) -> Case:
    fields: dict[str, Any] = {
        "hidden_size": 48, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "num_attention_heads": 4, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 16,
    }  # fmt: skip
    fields |= SHAPES[name]
    config = transformers.DeepseekV32Config(
        **fields, num_key_value_heads=fields["num_attention_heads"], num_hidden_layers=1, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
    )  # fmt: skip
    module = oracle.DeepseekV32Attention(config, layer_idx=0).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(normal * 0.3 + (0 if parameter_name.endswith("bias") else 1))
            else:
                gain = 2.0 if parameter_name.startswith("q_b_proj") else 1.0
                parameter.copy_(gain / math.sqrt(parameter.shape[1]) * normal)
    x_TD = torch.randn(LENGTH, config.hidden_size, generator=generator)
    x_TD *= (x_TD.square().mean(dim=1, keepdim=True) + NORM_EPS).rsqrt()
    found: list[torch.Tensor] = []
    hook = module.indexer.register_forward_hook(lambda module, args, output: found.append(output[0].clone()))
    cache = transformers.DynamicCache(config=config)
    rotary = oracle.DeepseekV32RotaryEmbedding(config)
    position_T = torch.arange(LENGTH)
    future_TT = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    with torch.no_grad():
        out_TD = module(
            x_TD[None], rotary(x_TD[None], position_T[None]), future_TT[None, None], past_key_values=cache,
            position_ids=position_T[None],
        )[0][0]  # fmt: skip
    hook.remove()
    seen_TK = torch.where(found[0] <= position_T[:, None], found[0], LENGTH).sort(dim=1).values
    record = {("positions", 0, 0, 0): torch.where(seen_TK < LENGTH, seen_TK, -1).to(torch.int32)}
    entry = cache.layers[0]
    # the class keeps rotated pairs as two halves, ours in the checkpoint's order
    rope_TP = torch.stack(entry.values[0, 0].chunk(2, dim=1), dim=2).flatten(1)
    outcome = {
        "output": out_TD,
        "latent": torch.cat((entry.keys[0, 0], rope_TP), dim=1),
        "index_key": entry.indexer_keys[0],
    }
    return Case(config, module, x_TD, outcome, record)


def our_engine(case: Case) -> Engine:
    """A model of one sparse layer with the module's weights, whose mixer reads the case's input: token t embeds to row
    t, and the norm before the mixer finds it normalised."""
    names = (
        "hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "num_attention_heads", "index_n_heads", "index_head_dim", "index_topk",
    )  # fmt: skip
    raw = hybrid("dsa", vocab_size=LENGTH, attn_res_block_size=None, rms_norm_eps=NORM_EPS)
    config = config_from(raw | {name: getattr(case.config, name) for name in names})
    module = case.module
    layer = {
        "mla.q_a": module.q_a_proj.weight, "mla.q_a_norm": module.q_a_layernorm.weight,
        "mla.q_b": module.q_b_proj.weight, "mla.kv_a": module.kv_a_proj_with_mqa.weight,
        "mla.kv_a_norm": module.kv_a_layernorm.weight, "mla.kv_b": module.kv_b_proj.weight,
        "mla.o_proj": module.o_proj.weight, "indexer.wq_b": module.indexer.wq_b.weight,
        "indexer.wk": module.indexer.wk.weight, "indexer.k_norm.weight": module.indexer.k_norm.weight,
        "indexer.k_norm.bias": module.indexer.k_norm.bias, "indexer.weights_proj": module.indexer.weights_proj.weight,
        "mixer_norm": torch.ones(case.config.hidden_size),
    }  # fmt: skip
    weights = {name: initial_parameter(name, shape, config, 0) for name, shape in parameter_shapes(config).items()}
    weights["embed"] = case.x_TD
    for name, weight in layer.items():
        assert weights[f"layers.0.{name}"].shape == weight.shape
        weights[f"layers.0.{name}"] = weight.detach().clone()
    formats = CacheFormats(latent="fp32", index_key="fp32")
    return Engine(config=config, model=Model(config, weights), dtype=torch.float32, formats=formats)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("cp", "step_tokens"), [(1, WHOLE), (1, 192), (3, WHOLE), (3, 448)])
@pytest.mark.parametrize("name", SHAPES)
def test_layer_equals_transformers(
    name: str, cp: int, step_tokens: int, layout: LayoutKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(name)
    engine = our_engine(case)
    written_T = torch.zeros(LENGTH, dtype=torch.int64)
    output_TD = torch.full_like(case.x_TD, torch.nan)
    forward = AttentionLayer.forward

    def kept(layer: AttentionLayer, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        torch.testing.assert_close(x_SD, case.x_TD[ctx.own_positions_S], rtol=1e-6, atol=1e-6)
        out_SD = forward(layer, x_SD, ctx)
        written_T[ctx.own_positions_S] += 1
        output_TD[ctx.own_positions_S] = out_SD
        return out_SD

    monkeypatch.setattr(AttentionLayer, "forward", kept)
    job = Job(number=0, tokens=torch.arange(LENGTH))
    found = run(engine, [job], steps_of([job], step_tokens), cp=cp, layout=layout, record=case.record)
    assert torch.equal(written_T, torch.ones_like(written_T)), "each row on one rank"
    assert found.rows == LENGTH - case.config.index_topk
    assert found.worst <= TOLERANCE
    outcome = {name: found.outcomes[0][f"layers.0.{name}"] for name in ("latent", "index_key")}
    assert_equal_outcomes(outcome | {"output": output_TD}, case.outcome)
