"""Tensor names that the published checkpoints of these families share, and the spellings of transformers' classes.

Every canonical parameter gets a `Location`. Where two spellings exist, both are accepted; a family only says which of
them its own checkpoints use.
"""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.workers.model.config import DenseConfig, KdaConfig, ModelConfig, MoeConfig
from longprefill.workers.model.families.base import Alternative, Location, Part
from longprefill.workers.model.parameters import Shape, parameter_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNaming:
    """How a family's checkpoints spell their experts; the other spellings are accepted too."""

    block: str
    """Module of a MoE layer."""
    gate: str
    up: str
    down: str


PROJECTIONS = MoeNaming(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
"""mlp.experts.3.gate_proj.weight"""
NUMBERED = MoeNaming(block="block_sparse_moe", gate="w1", up="w3", down="w2")
"""block_sparse_moe.experts.3.w1.weight"""

WHOLE_NAMES: dict[str, tuple[str, ...]] = {
    "mixer_norm": ("input_layernorm.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "kda.q_proj": ("self_attn.q_proj.weight",),
    "kda.k_proj": ("self_attn.k_proj.weight",),
    "kda.v_proj": ("self_attn.v_proj.weight",),
    "kda.f_a": ("self_attn.f_a_proj.weight", "self_attn.forget_gate.f_a_proj.weight"),
    "kda.f_b": ("self_attn.f_b_proj.weight", "self_attn.forget_gate.f_b_proj.weight"),
    "kda.dt_bias": ("self_attn.dt_bias", "self_attn.forget_gate.dt_bias"),
    "kda.a_log": ("self_attn.A_log", "self_attn.forget_gate.A_log"),
    "kda.b_proj": ("self_attn.b_proj.weight",),
    "kda.g_proj": ("self_attn.g_proj.weight",),
    "kda.g_a": ("self_attn.g_a_proj.weight",),
    "kda.g_b": ("self_attn.g_b_proj.weight",),
    "kda.o_norm": ("self_attn.o_norm.weight",),
    "kda.o_proj": ("self_attn.o_proj.weight",),
    "mla.q_proj": ("self_attn.q_proj.weight",),
    "mla.q_a": ("self_attn.q_a_proj.weight",),
    "mla.q_a_norm": ("self_attn.q_a_layernorm.weight",),
    "mla.q_b": ("self_attn.q_b_proj.weight",),
    "mla.kv_a": ("self_attn.kv_a_proj_with_mqa.weight",),
    "mla.kv_a_norm": ("self_attn.kv_a_layernorm.weight",),
    "mla.kv_b": ("self_attn.kv_b_proj.weight",),
    "mla.g_proj": ("self_attn.g_proj.weight",),
    "mla.o_proj": ("self_attn.o_proj.weight",),
    "indexer.wq_b": ("self_attn.indexer.wq_b.weight",),
    "indexer.wk": ("self_attn.indexer.wk.weight",),
    "indexer.k_norm.weight": ("self_attn.indexer.k_norm.weight",),
    "indexer.k_norm.bias": ("self_attn.indexer.k_norm.bias",),
    "indexer.weights_proj": ("self_attn.indexer.weights_proj.weight",),
    "indexer.pool_gate": ("self_attn.indexer.index_kpool_compress_gate",),
    "indexer.pool_bias": ("self_attn.indexer.index_kpool_compress_ape",),
    "mixer_res.query": ("mixer_res.query",),
    "mixer_res.norm": ("mixer_res.norm.weight",),
    "ffn_res.query": ("ffn_res.query",),
    "ffn_res.norm": ("ffn_res.norm.weight",),
    "mixer_hc.projection": ("hc_attn_fn", "attn_hc.fn"),
    "mixer_hc.base": ("hc_attn_base", "attn_hc.base"),
    "mixer_hc.scale": ("hc_attn_scale", "attn_hc.scale"),
    "ffn_hc.projection": ("hc_ffn_fn", "ffn_hc.fn"),
    "ffn_hc.base": ("hc_ffn_base", "ffn_hc.base"),
    "ffn_hc.scale": ("hc_ffn_scale", "ffn_hc.scale"),
}
"""Parameters of a layer that are one tensor: canonical name without `layers.N.` to names without `model.layers.N.`."""

MODEL_NAMES: dict[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "final_res.query": ("model.final_res.query",),
    "final_res.norm": ("model.final_res.norm.weight",),
    "head": ("lm_head.weight",),
}
"""The same outside the layers, with full names."""


def locate(config: ModelConfig, naming: MoeNaming) -> dict[str, Location]:
    """A `Location` for every canonical parameter, in the order of `parameter_shapes`."""
    locations: dict[str, Location] = {}
    for name, shape in parameter_shapes(config).items():
        if name in MODEL_NAMES:
            whole = Part(names=MODEL_NAMES[name], shape=shape, row=0)
            locations[name] = Location(shape=shape, alternatives=((whole,),))
            continue
        _, index, local = name.split(".", 2)
        layer = config.layers[int(index)]
        prefix = f"model.layers.{index}."
        if local == "kda.conv" and isinstance(layer.mixer, KdaConfig):
            alternatives = conv_parts(layer.mixer, shape, prefix)
        elif local in ("ffn.gate_up", "ffn.down") and isinstance(layer.ffn, DenseConfig):
            alternatives = dense_parts(layer.ffn, local, shape, prefix)
        elif local.startswith("moe.") and isinstance(layer.ffn, MoeConfig):
            alternatives = moe_parts(layer.ffn, local, shape, prefix, naming)
        else:
            names = tuple(prefix + stored for stored in WHOLE_NAMES[local])
            alternatives = ((Part(names=names, shape=shape, row=0, can_be_longer=local == "kda.a_log"),),)
        locations[name] = Location(shape=shape, alternatives=alternatives)
    return locations


def conv_parts(kda: KdaConfig, shape: Shape, prefix: str) -> tuple[Alternative, ...]:
    """Channels q | k | v: three tensors [channels, 1, width], or one."""
    widths = (kda.num_heads * kda.key_dim, kda.num_heads * kda.key_dim, kda.num_value_heads * kda.value_dim)
    separate, row = [], 0
    for letter, width in zip("qkv", widths, strict=True):
        names = (f"{prefix}self_attn.{letter}_conv1d.weight",)
        separate.append(Part(names=names, shape=(width, shape[1]), row=row))
        row += width
    return tuple(separate), (Part(names=(f"{prefix}self_attn.conv1d.weight",), shape=shape, row=0),)


def dense_parts(dense: DenseConfig, local: str, shape: Shape, prefix: str) -> tuple[Alternative, ...]:
    """A dense feed-forward; transformers' save_pretrained writes those of kimi_linear as `block_sparse_moe.*`."""

    def names(projection: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{block}.{projection}.weight" for block in ("mlp", "block_sparse_moe"))

    if local == "ffn.down":
        return ((Part(names=names("down_proj"), shape=shape, row=0),),)
    half = (dense.intermediate, shape[1])
    return ((Part(names=names("gate_proj"), shape=half, row=0), Part(names=names("up_proj"), shape=half, row=half[0])),)


def moe_parts(moe: MoeConfig, local: str, shape: Shape, prefix: str, naming: MoeNaming) -> tuple[Alternative, ...]:
    """Router, experts (one by one or fused) and shared experts, in both spellings."""
    other = NUMBERED if naming is PROJECTIONS else PROJECTIONS
    blocks = tuple(prefix + spelling.block + "." for spelling in (naming, other))

    def whole(stored: str) -> tuple[Alternative, ...]:
        return ((Part(names=tuple(block + stored for block in blocks), shape=shape, row=0),),)

    def expert(number: int, projection: str, rows: Shape, row: int) -> Part:
        words = (getattr(naming, projection), getattr(other, projection))
        names = tuple(f"{block}experts.{number}.{word}.weight" for block in blocks for word in words)
        return Part(names=names, shape=rows, row=row, expert=number)

    if local == "moe.gate_up":
        half = (moe.intermediate, shape[2])
        split = [expert(e, p, half, r) for e in range(moe.num_experts) for p, r in (("gate", 0), ("up", half[0]))]
        return tuple(split), *whole("experts.gate_up_proj")
    if local == "moe.down":
        split = [expert(e, "down", shape[1:], 0) for e in range(moe.num_experts)]
        return tuple(split), *whole("experts.down_proj")
    if local == "moe.shared_gate_up":
        half = (moe.shared_intermediate, shape[1])
        parts = []
        for projection, row in (("gate_proj", 0), ("up_proj", half[0])):
            names = tuple(f"{block}shared_experts.{projection}.weight" for block in blocks)
            parts.append(Part(names=names, shape=half, row=row))
        return (tuple(parts),)
    stored = {
        "moe.gate": "gate.weight",
        "moe.bias": "gate.e_score_correction_bias",
        "moe.shared_down": "shared_experts.down_proj.weight",
        "moe.latent_in": "latent_in_proj.weight",
        "moe.latent_out": "latent_out_proj.weight",
    }
    return whole(stored[local])
