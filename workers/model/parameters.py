"""The canonical parameters of a model: name and shape, by `ModelConfig`. Torch-free.

Families map published names onto these; layers read these and nothing else. Legend: D hidden, H q/k heads, G value
heads, K key dim, V value dim, C conv channels (q | k | v), E experts.
"""

from __future__ import annotations

from longprefill.workers.model.config import (
    AttnResConfig,
    DenseConfig,
    HyperConnectionConfig,
    IndexerConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)

Shape = tuple[int, ...]

FP32_PARAMETERS = (
    "kda.a_log", "kda.dt_bias", "moe.bias", "res.query", "res.norm", "indexer.pool_bias", "hc.projection", "hc.base",
    "hc.scale",
)  # fmt: skip
"""Name endings of parameters that stay fp32 whatever the compute dtype."""


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter of the whole model, in load order."""
    shapes: dict[str, Shape] = {"embed": (config.vocab_size, config.hidden)}
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        shapes[prefix + "mixer_norm"] = (config.hidden,)
        mixer = layer.mixer
        parts = kda_shapes(mixer, config.hidden) if isinstance(mixer, KdaConfig) else mla_shapes(mixer, config.hidden)
        shapes |= {prefix + name: shape for name, shape in parts.items()}
        shapes[prefix + "ffn_norm"] = (config.hidden,)
        parts = (
            dense_shapes(layer.ffn, config.hidden)
            if isinstance(layer.ffn, DenseConfig)
            else moe_shapes(layer.ffn, config.hidden)
        )
        shapes |= {prefix + name: shape for name, shape in parts.items()}
        shapes |= {prefix + name: shape for name, shape in residual_shapes(config.residual, config.hidden).items()}
    if isinstance(config.residual, AttnResConfig):
        shapes["final_res.query"] = (config.hidden,)
        shapes["final_res.norm"] = (config.hidden,)
    shapes["final_norm"] = (config.hidden,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden)
    return shapes


def residual_shapes(residual: AttnResConfig | HyperConnectionConfig | None, hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for site in ("mixer", "ffn"):
        if isinstance(residual, AttnResConfig):
            shapes[f"{site}_res.query"] = (hidden,)
            shapes[f"{site}_res.norm"] = (hidden,)
        elif isinstance(residual, HyperConnectionConfig):
            shapes[f"{site}_hc.projection"] = (residual.num_weights, residual.num_streams * hidden)
            shapes[f"{site}_hc.base"] = (residual.num_weights,)
            shapes[f"{site}_hc.scale"] = (3,)
    return shapes


def kda_shapes(kda: KdaConfig, hidden: int) -> dict[str, Shape]:
    q_width, v_width = kda.num_heads * kda.key_dim, kda.num_value_heads * kda.value_dim
    gate_width = kda.num_value_heads * kda.key_dim
    shapes: dict[str, Shape] = {
        "kda.q_proj": (q_width, hidden),
        "kda.k_proj": (q_width, hidden),
        "kda.v_proj": (v_width, hidden),
        "kda.conv": (kda.conv_channels, kda.conv_width),
        "kda.f_a": (kda.gate_rank, hidden),
        "kda.f_b": (gate_width, kda.gate_rank),
        "kda.dt_bias": (gate_width,),
        "kda.a_log": (kda.num_value_heads,),
        "kda.b_proj": (kda.num_value_heads, hidden),
    }
    if kda.output_gate_rank is None:
        shapes["kda.g_proj"] = (v_width, hidden)
    else:
        shapes["kda.g_a"] = (kda.output_gate_rank, hidden)
        shapes["kda.g_b"] = (v_width, kda.output_gate_rank)
    return shapes | {"kda.o_norm": (kda.value_dim,), "kda.o_proj": (hidden, v_width)}


def mla_shapes(mla: MlaConfig, hidden: int) -> dict[str, Shape]:
    query_width = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    shapes: dict[str, Shape] = {}
    if mla.q_lora_rank is None:
        shapes["mla.q_proj"] = (query_width, hidden)
    else:
        shapes["mla.q_a"] = (mla.q_lora_rank, hidden)
        shapes["mla.q_a_norm"] = (mla.q_lora_rank,)
        shapes["mla.q_b"] = (query_width, mla.q_lora_rank)
    shapes["mla.kv_a"] = (mla.kv_lora_rank + mla.rope_dim, hidden)
    shapes["mla.kv_a_norm"] = (mla.kv_lora_rank,)
    shapes["mla.kv_b"] = (mla.num_heads * (mla.nope_dim + mla.value_dim), mla.kv_lora_rank)
    if mla.gated:
        shapes["mla.g_proj"] = (mla.num_heads * mla.value_dim, hidden)
    shapes["mla.o_proj"] = (hidden, mla.num_heads * mla.value_dim)
    if mla.indexer is not None:
        shapes |= indexer_shapes(mla.indexer, mla, hidden)
    return shapes


def indexer_shapes(indexer: IndexerConfig, mla: MlaConfig, hidden: int) -> dict[str, Shape]:
    query_input = hidden if mla.q_lora_rank is None else mla.q_lora_rank
    shapes: dict[str, Shape] = {
        "indexer.wq_b": (indexer.num_heads * indexer.head_dim, query_input),
        "indexer.wk": (indexer.head_dim, hidden),
        "indexer.k_norm.weight": (indexer.head_dim,),
        "indexer.k_norm.bias": (indexer.head_dim,),
        "indexer.weights_proj": (indexer.num_heads, hidden),
    }
    if indexer.pool > 1:
        shapes["indexer.pool_gate"] = (indexer.head_dim, hidden)
        shapes["indexer.pool_bias"] = (indexer.pool, indexer.head_dim)
    return shapes


def dense_shapes(dense: DenseConfig, hidden: int) -> dict[str, Shape]:
    return {"ffn.gate_up": (2 * dense.intermediate, hidden), "ffn.down": (hidden, dense.intermediate)}


def moe_shapes(moe: MoeConfig, hidden: int) -> dict[str, Shape]:
    width = hidden if moe.latent_dim is None else moe.latent_dim
    shapes: dict[str, Shape] = {"moe.gate": (moe.num_experts, hidden)}
    if moe.has_bias:
        shapes["moe.bias"] = (moe.num_experts,)
    shapes["moe.gate_up"] = (moe.num_experts, 2 * moe.intermediate, width)
    shapes["moe.down"] = (moe.num_experts, width, moe.intermediate)
    if moe.latent_dim is not None:
        shapes["moe.latent_in"] = (moe.latent_dim, hidden)
        shapes["moe.latent_out"] = (hidden, moe.latent_dim)
    if moe.shared_intermediate:
        shapes["moe.shared_gate_up"] = (2 * moe.shared_intermediate, hidden)
        shapes["moe.shared_down"] = (hidden, moe.shared_intermediate)
    return shapes
