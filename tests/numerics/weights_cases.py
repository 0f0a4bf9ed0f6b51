"""Models for the tests of loading: a hybrid with every optional part, its tensors by name, small directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longprefill.workers.model.checkpoint import write_checkpoint
from longprefill.workers.model.sizes import RAW_CONFIGS

FULL_RAW: dict[str, Any] = {
    "model_type": "longprefill_hybrid", "vocab_size": 24, "hidden_size": 10, "intermediate_size": 14,
    "num_hidden_layers": 2, "layer_types": ["kda", "dsa"], "max_position_embeddings": 1 << 22,
    "linear_attn_config": {
        "num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 3, "use_full_rank_gate": True,
        "gate_rank": 5, "num_stored_heads": 7,
    },
    "num_attention_heads": 2, "q_lora_rank": 9, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 5, "mla_use_output_gate": True, "index_n_heads": 3, "index_head_dim": 7, "index_topk": 8,
    "index_kpool": 4, "mlp_layer_types": ["dense", "sparse"], "num_experts": 3, "num_experts_per_token": 2,
    "moe_intermediate_size": 6, "num_shared_experts": 2, "routed_expert_hidden_size": 4, "attn_res_block_size": 1,
}  # fmt: skip
"""Every optional part of the hybrid at once."""

L0, L1 = "model.layers.0.", "model.layers.1."
FULL_TENSORS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (24, 10), "model.norm.weight": (10,), "lm_head.weight": (24, 10),
    "model.final_res.query": (10,), "model.final_res.norm.weight": (10,),
    L0 + "input_layernorm.weight": (10,), L0 + "post_attention_layernorm.weight": (10,),
    L0 + "mixer_res.query": (10,), L0 + "mixer_res.norm.weight": (10,), L0 + "ffn_res.query": (10,),
    L0 + "ffn_res.norm.weight": (10,),
    L0 + "self_attn.q_proj.weight": (12, 10), L0 + "self_attn.k_proj.weight": (12, 10),
    L0 + "self_attn.v_proj.weight": (12, 10), L0 + "self_attn.q_conv1d.weight": (12, 1, 4),
    L0 + "self_attn.k_conv1d.weight": (12, 1, 4), L0 + "self_attn.v_conv1d.weight": (12, 1, 4),
    L0 + "self_attn.f_a_proj.weight": (5, 10), L0 + "self_attn.f_b_proj.weight": (24, 5),
    L0 + "self_attn.dt_bias": (24,), L0 + "self_attn.A_log": (7,), L0 + "self_attn.b_proj.weight": (4, 10),
    L0 + "self_attn.g_proj.weight": (12, 10), L0 + "self_attn.o_norm.weight": (3,),
    L0 + "self_attn.o_proj.weight": (10, 12),
    L0 + "mlp.gate_proj.weight": (14, 10), L0 + "mlp.up_proj.weight": (14, 10), L0 + "mlp.down_proj.weight": (10, 14),
    L1 + "input_layernorm.weight": (10,), L1 + "post_attention_layernorm.weight": (10,),
    L1 + "mixer_res.query": (10,), L1 + "mixer_res.norm.weight": (10,), L1 + "ffn_res.query": (10,),
    L1 + "ffn_res.norm.weight": (10,),
    L1 + "self_attn.q_a_proj.weight": (9, 10), L1 + "self_attn.q_a_layernorm.weight": (9,),
    L1 + "self_attn.q_b_proj.weight": (12, 9), L1 + "self_attn.kv_a_proj_with_mqa.weight": (10, 10),
    L1 + "self_attn.kv_a_layernorm.weight": (8,), L1 + "self_attn.kv_b_proj.weight": (18, 8),
    L1 + "self_attn.g_proj.weight": (10, 10), L1 + "self_attn.o_proj.weight": (10, 10),
    L1 + "self_attn.indexer.wq_b.weight": (21, 9), L1 + "self_attn.indexer.wk.weight": (7, 10),
    L1 + "self_attn.indexer.k_norm.weight": (7,), L1 + "self_attn.indexer.k_norm.bias": (7,),
    L1 + "self_attn.indexer.weights_proj.weight": (3, 10),
    L1 + "self_attn.indexer.index_kpool_compress_gate": (7, 10),
    L1 + "self_attn.indexer.index_kpool_compress_ape": (4, 7),
    L1 + "mlp.gate.weight": (3, 10), L1 + "mlp.gate.e_score_correction_bias": (3,),
    L1 + "mlp.latent_in_proj.weight": (4, 10), L1 + "mlp.latent_out_proj.weight": (10, 4),
    L1 + "mlp.shared_experts.gate_proj.weight": (12, 10), L1 + "mlp.shared_experts.up_proj.weight": (12, 10),
    L1 + "mlp.shared_experts.down_proj.weight": (10, 12),
}  # fmt: skip
for expert in range(3):
    FULL_TENSORS[f"{L1}mlp.experts.{expert}.gate_proj.weight"] = (6, 4)
    FULL_TENSORS[f"{L1}mlp.experts.{expert}.up_proj.weight"] = (6, 4)
    FULL_TENSORS[f"{L1}mlp.experts.{expert}.down_proj.weight"] = (4, 6)


def hand_made() -> dict[str, torch.Tensor]:
    """Random tensors under the published names of `FULL_RAW`, spelt out above."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in FULL_TENSORS.items()}


def save_model(directory: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A model directory with one file."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_tiny(directory: Path) -> Path:
    """A hybrid checkpoint in three files with an index."""
    write_checkpoint(directory, RAW_CONFIGS["longprefill_hybrid", "tiny"], 0, torch.bfloat16, num_files=3)
    return directory


def copy_model(source: Path, target: Path) -> Path:
    """A copy of a model directory, to change."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target
