"""The config.json of models that `make_checkpoint` writes, tiny to bench; mesh is for many ranks, peer are the shapes
that other engines were measured with (scripts/bench_prefill). Torch-free."""

from __future__ import annotations

from typing import Any

MAX_TOKENS = 8 << 20

_HYBRID: dict[str, Any] = {
    "architectures": ["LongprefillHybridForCausalLM"],
    "model_type": "longprefill_hybrid",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": False,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}

_KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
}

_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}

_GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "indexer_rope_interleave": True,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}

_GLM_NEXT_TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "qk_rope_head_dim": 0,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}

_LARGE_ATTENTION: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
}

_SMALL: dict[str, Any] = _LARGE_ATTENTION | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 256,
}

_PEER: dict[str, Any] = _LARGE_ATTENTION | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 256,
}
"""Every feed-forward dense, as wide as the published numbers of parameters leave room for."""

_BENCH: dict[str, Any] = _LARGE_ATTENTION | {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 512,
}


def _kimi_layers(num_layers: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    """Every fourth layer is full attention; both lists count from 1."""
    full = list(range(4, num_layers + 1, 4))
    return {
        "full_attn_layers": full,
        "kda_layers": [number for number in range(1, num_layers + 1) if number not in full],
        "head_dim": head_dim,
        "num_heads": num_heads,
        "short_conv_kernel_size": 4,
    }


def _published(raw: dict[str, Any]) -> dict[str, Any]:
    """The same sizes in the spelling of DeepSeek and GLM."""
    spelling = {"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok"}
    renamed = {spelling.get(name, name): value for name, value in raw.items()}
    return renamed | {"num_key_value_heads": raw["num_attention_heads"]}


def _glm_next(text: dict[str, Any], num_heads: int, head_dim: int) -> dict[str, Any]:
    """A multimodal config without a vision tower; every fourth layer is DSA, the first feed-forward dense."""
    num_layers = text["num_hidden_layers"]
    dsa = [index for index in range(num_layers) if index % 4 == 3]
    types = ["deepseek_sparse_attention" if index in dsa else "linear_attention" for index in range(num_layers)]
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "text_config": _published(_GLM_NEXT_TEXT | text)
        | {
            "qk_rope_head_dim": 0,
            "layer_types": types,
            "mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1),
            "linear_attn_config": {
                "num_heads": num_heads,
                "head_dim": head_dim,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "kda_layers": [index for index in range(num_layers) if index not in dsa],
                "full_attn_layers": dsa,
            },
        },
    }


_TINY_INDEXER = {"q_lora_rank": 48, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 32}
_SMALL_INDEXER = {"q_lora_rank": 256, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 256}
_PEER_INDEXER = {"q_lora_rank": 256, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 512}
_BENCH_INDEXER = {"q_lora_rank": 512, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 512}

RAW_CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    ("longprefill_hybrid", "tiny"): _HYBRID
    | _TINY
    | {
        "layer_types": ["kda", "kda", "kda", "dsa"],
        "linear_attn_config": {
            "num_heads": 2,
            "num_value_heads": 4,
            "head_dim": 16,
            "value_head_dim": 24,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 48,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 32,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 2,
    },
    ("longprefill_hybrid", "mesh"): _HYBRID
    | _TINY
    | {
        # heads for four tensor-parallel ranks; vocabulary, columns and experts that four do not divide
        "vocab_size": 509,
        "intermediate_size": 97,
        "moe_intermediate_size": 31,
        "num_experts": 10,
        "num_experts_per_token": 3,
        "layer_types": ["kda", "dsa", "kda", "dsa"],
        "linear_attn_config": {
            "num_heads": 4,
            "num_value_heads": 8,
            "head_dim": 16,
            "value_head_dim": 24,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 48,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 32,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 2,
    },
    ("longprefill_hybrid", "small"): _HYBRID
    | _SMALL
    | {
        "layer_types": ["kda", "kda", "kda", "dsa"],
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 256,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 256,
        "first_k_dense_replace": 0,
        "attn_res_block_size": 2,
    },
    ("longprefill_hybrid", "bench"): _HYBRID
    | _BENCH
    | {
        "layer_types": ["kda", "kda", "kda", "dsa"] * 2,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 512,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 4,
    },
    ("kimi_linear", "tiny"): _KIMI
    | _TINY
    | {"num_key_value_heads": 4, "q_lora_rank": None, "linear_attn_config": _kimi_layers(4, 2, 16)},
    ("kimi_linear", "small"): _KIMI
    | _SMALL
    | {
        "intermediate_size": 1408,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "linear_attn_config": _kimi_layers(4, 4, 128),
    },
    ("kimi_linear", "bench"): _KIMI
    | _BENCH
    | {"num_key_value_heads": 16, "q_lora_rank": None, "linear_attn_config": _kimi_layers(8, 8, 128)},
    ("kimi_linear", "peer"): _KIMI
    | _PEER
    | {
        "num_hidden_layers": 8,
        "intermediate_size": 1664,
        "first_k_dense_replace": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "linear_attn_config": _kimi_layers(8, 8, 128),
    },
    ("deepseek_v32", "tiny"): _published(_DEEPSEEK | _TINY | _TINY_INDEXER)
    | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
    ("deepseek_v32", "small"): _published(_DEEPSEEK | _SMALL | _SMALL_INDEXER)
    | {"intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    ("deepseek_v32", "bench"): _published(_DEEPSEEK | _BENCH | _BENCH_INDEXER)
    | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    ("deepseek_v32", "peer"): _published(_DEEPSEEK | _PEER | _PEER_INDEXER)
    | {
        "num_hidden_layers": 4,
        "intermediate_size": 1024,
        "first_k_dense_replace": 4,
        "n_group": 4,
        "topk_group": 2,
    },
    ("glm_moe_dsa", "tiny"): _published(_GLM | _TINY | _TINY_INDEXER)
    | {"first_k_dense_replace": 1, "indexer_types": ["full", "full", "shared", "shared"]},
    ("glm_moe_dsa", "small"): _published(_GLM | _SMALL | _SMALL_INDEXER)
    | {"intermediate_size": 1408, "first_k_dense_replace": 1, "indexer_types": ["full", "full", "shared", "full"]},
    ("glm_moe_dsa", "bench"): _published(_GLM | _BENCH | _BENCH_INDEXER) | {"first_k_dense_replace": 1},
    ("glm5_next", "tiny"): _glm_next(_TINY | _TINY_INDEXER, 4, 16),
    ("glm5_next", "small"): _glm_next(_SMALL | _SMALL_INDEXER | {"intermediate_size": 1408}, 4, 128),
    ("glm5_next", "bench"): _glm_next(_BENCH | _BENCH_INDEXER, 8, 128),
}
"""By (family, size)."""
