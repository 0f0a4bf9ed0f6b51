"""kimi_linear: KDA layers with a softplus gate and dense MLA layers without positions (Kimi-Linear-48B-A3B).

Fields are read in the published spelling and in that of transformers' KimiLinearConfig (5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import KdaConfig, LayerConfig, MlaConfig, ModelConfig
from longprefill.workers.model.families.base import Family, Location
from longprefill.workers.model.families.feed_forward import read_feed_forwards
from longprefill.workers.model.families.fields import Fields
from longprefill.workers.model.families.naming import NUMBERED, locate
from longprefill.workers.model.families.quantization import read_fp8_block

LATENT_NORM_EPS = 1e-6
"""Of the norms of the query and key-value latents, whatever `rms_norm_eps` says: published codes leave it at this."""

K3_FIELDS = ("attn_res_block_size", "routed_expert_hidden_size")
"""Kimi K3 has this `model_type` in its text config too, with parts that this family lacks."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From a parsed config.json.

    Raises:
        ModelError: a field is missing or out of range, or asks for what the published model code does not do.
    """
    fields = Fields(raw)
    refuse_variants(fields)
    num_layers = fields.integer("num_hidden_layers")
    vocab_size = fields.integer("vocab_size")
    kda, mla = read_kda(fields), read_mla(fields)
    mixers = [kda if layer_is_kda else mla for layer_is_kda in kda_layers(fields, num_layers)]
    ffns = read_feed_forwards(fields, num_layers, activation="silu", first_dense=1)
    bos_token_ids = fields.token_ids("bos_token_id", vocab_size=vocab_size)
    return ModelConfig(
        family="kimi_linear",
        vocab_size=vocab_size,
        hidden=fields.integer("hidden_size"),
        layers=tuple(LayerConfig(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        residual=None,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_tokens=fields.integer("model_max_length", "max_position_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size=vocab_size),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        fp8_block=read_fp8_block(fields),
    )


def refuse_variants(fields: Fields) -> None:
    """Raise for values that would need maths which no published kimi_linear code has."""
    if not fields.flag("mla_use_nope", default=True):
        raise fields.error("mla_use_nope", False, "true: the published model code does not rotate")
    if fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias", True, "false: projections without bias")
    fields.choice("hidden_act", among=("silu",), default="silu")
    for name in K3_FIELDS:
        if fields.has(name):
            raise ModelError(f"config.json: {name} is set: kimi_linear has no such part, longprefill_hybrid has")
    if fields.flag("mla_use_output_gate", default=False):
        raise fields.error("mla_use_output_gate", True, "false: kimi_linear has no gated attention")
    heads = fields.integer("num_attention_heads")
    key_heads = fields.integer("num_key_value_heads", default=heads)
    if key_heads != heads:
        raise fields.error("num_key_value_heads", key_heads, f"num_attention_heads={heads}")


def read_kda(fields: Fields) -> KdaConfig:
    """The sub-object `linear_attn_config`, or the flat spelling."""
    if fields.has("linear_attn_config"):
        linear = fields.section("linear_attn_config")
        head_dim, heads = linear.integer("head_dim"), linear.integer("num_heads")
        conv_width = linear.integer("short_conv_kernel_size", default=4, minimum=2)
        for name in ("gate_lower_bound", "use_full_rank_gate"):
            if linear.has(name):
                raise ModelError(f"config.json: linear_attn_config.{name} is set: kimi_linear has no such gate")
    else:
        head_dim, heads = fields.integer("linear_head_dim"), fields.integer("linear_num_heads")
        conv_width = fields.integer("linear_conv_kernel_dim", default=4, minimum=2)
    return KdaConfig(
        num_heads=heads,
        num_value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=conv_width,
        gate_rank=head_dim,
        lower_bound=None,
        output_gate_rank=head_dim,
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
    )


def read_mla(fields: Fields) -> MlaConfig:
    """Dense MLA without rotation; the `rope` channels exist."""
    nope_dim = fields.integer("qk_nope_head_dim")
    rope_dim = fields.integer("qk_rope_head_dim", minimum=0)
    return MlaConfig(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer_or_none("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        rope=None,
        scale=(nope_dim + rope_dim) ** -0.5,
        q_norm_eps=LATENT_NORM_EPS,
        kv_norm_eps=LATENT_NORM_EPS,
        gated=False,
        indexer=None,
    )


def kda_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers are KDA. `layer_types` goes before the published lists, which count layers from 1."""
    if fields.has("layer_types"):
        types = fields.words("layer_types", among=("linear_attention", "full_attention"), length=num_layers)
        return [word == "linear_attention" for word in types]
    if not fields.has("linear_attn_config"):
        raise ModelError("config.json: field layer_types or linear_attn_config.kda_layers is missing: add one of them")
    linear = fields.section("linear_attn_config")
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(kda + full) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"config.json: linear_attn_config.kda_layers={kda} and full_attn_layers={full} are not allowed: "
            f"together they must name each layer from 1 to {num_layers} once"
        )
    return [index + 1 in kda for index in range(num_layers)]


def locate_weights(config: ModelConfig) -> dict[str, Location]:
    """Where each canonical parameter is in a kimi_linear checkpoint."""
    return locate(config, NUMBERED)


FAMILY = Family(model_type="kimi_linear", read_config=read_config, locate=locate_weights)
