"""glm5_next: KDA with a bounded gate, DSA over pooled keys without positions, hyper-connections (GLM-5.3-Flash).

The text part of a published multimodal directory (`model_type` glm5_next: fields in `text_config` or flat, tensors
under `model.language_model.`), or a text model by itself (glm5_next_text). The vision tower is not read. Fields and
tensors are read as published and as transformers' Glm5NextTextConfig (5.23) has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from longprefill.workers.model.config import HyperConnectionConfig, KdaConfig, LayerConfig, ModelConfig
from longprefill.workers.model.families.base import Family, Location
from longprefill.workers.model.families.feed_forward import read_feed_forwards
from longprefill.workers.model.families.fields import Fields
from longprefill.workers.model.families.indexed_attention import (
    LAYER_TYPES,
    indexer_layers,
    read_indexer,
    read_mla,
    refuse_variants,
    with_selections,
)
from longprefill.workers.model.families.naming import PROJECTIONS, locate
from longprefill.workers.model.families.quantization import read_fp8_block

KDA_TYPE = "linear_attention"
DEFAULT_LOWER_BOUND = -5.0
MIN_LOWER_BOUND = -5.0
DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
}
"""Fields that a config.json may leave out, and what the published model code then takes."""
OUTER_FIELDS = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id")
"""Of a multimodal config.json: those that concern the text model too."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From the parsed config.json of a multimodal directory.

    Raises:
        ModelError: as `read_text_config`.
    """
    if raw.get("text_config") is None:
        return dataclasses.replace(read_text_config(raw), family="glm5_next")
    Fields(raw).section("text_config")
    outer = {name: raw[name] for name in OUTER_FIELDS if raw.get(name) is not None}
    # the inner tie_word_embeddings is a default that the whole model does not look at
    inner = {name: value for name, value in raw["text_config"].items() if name != "tie_word_embeddings"}
    return dataclasses.replace(read_text_config({**inner, **outer}), family="glm5_next")


def read_text_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From the fields of the text model.

    Raises:
        ModelError: a field is missing or out of range, or asks for what the published model code does not do.
    """
    fields = Fields({**DEFAULTS, **raw})
    refuse_variants(fields)
    num_layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    norm_eps = fields.number("rms_norm_eps")
    if fields.integer("qk_rope_head_dim", default=0, minimum=0):
        raise fields.error("qk_rope_head_dim", fields.integer("qk_rope_head_dim"), "0: attention without positions")
    for name in ("index_kpool_always_select_tail", "index_kpool_compress", "mla_use_nope", "mhc"):
        if not fields.flag(name, default=True):
            raise fields.error(name, False, "true: the published model code knows nothing else")
    indexer = read_indexer(fields, 0, None, pool=fields.integer("index_kpool", default=16, minimum=2))
    kda, mla = read_kda(fields, norm_eps), read_mla(fields, 0, None, 1.0, norm_eps)
    mixers = [kda if layer_is_kda else mla for layer_is_kda in kda_layers(fields, num_layers)]
    mixers = with_selections(mixers, indexer, indexer_layers(fields, num_layers))
    ffns = read_feed_forwards(
        fields,
        num_layers,
        activation="silu",
        first_dense=fields.integer("first_k_dense_replace", minimum=0),
        clamp=fields.number("swiglu_limit"),
    )
    bos_token_ids = fields.token_ids("bos_token_id", vocab_size=vocab_size)
    return ModelConfig(
        family="glm5_next_text",
        vocab_size=vocab_size,
        hidden=fields.integer("hidden_size"),
        layers=tuple(LayerConfig(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
        norm_eps=norm_eps,
        residual=HyperConnectionConfig(
            num_streams=fields.integer("hc_mult"),
            sinkhorn_iterations=fields.integer("hc_sinkhorn_iters"),
            eps=fields.number("hc_eps"),
            norm_eps=norm_eps,
        ),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_tokens=fields.integer("max_position_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size=vocab_size),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        fp8_block=read_fp8_block(fields),
    )


def read_kda(fields: Fields, norm_eps: float) -> KdaConfig:
    """The published sub-object `linear_attn_config`, or the flat spelling."""
    if fields.has("linear_attn_config"):
        linear = fields.section("linear_attn_config")
        head_dim, heads = linear.integer("head_dim"), linear.integer("num_heads")
        conv_width = linear.integer("short_conv_kernel_size", default=4, minimum=2)
        is_bounded = linear.flag("safe_gate", default=True) or not linear.says("gate_lower_bound")
        lower_bound = read_lower_bound(linear, "gate_lower_bound", is_bounded=is_bounded)
    else:
        head_dim, heads = fields.integer("linear_head_dim"), fields.integer("linear_num_heads")
        conv_width = fields.integer("linear_conv_kernel_dim", default=4, minimum=2)
        is_bounded = not fields.says("linear_lower_bound")
        lower_bound = read_lower_bound(fields, "linear_lower_bound", is_bounded=is_bounded)
    return KdaConfig(
        num_heads=heads,
        num_value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=conv_width,
        gate_rank=head_dim,
        lower_bound=lower_bound,
        output_gate_rank=head_dim,
        norm_eps=norm_eps,
    )


def read_lower_bound(fields: Fields, name: str, *, is_bounded: bool) -> float | None:
    """The gate's bound; null or absent: the default bound if `is_bounded`, else none (a softplus gate)."""
    if not fields.has(name):
        return DEFAULT_LOWER_BOUND if is_bounded else None
    bound = fields.number(name, above=-float("inf"))
    if not MIN_LOWER_BOUND <= bound < 0:
        raise fields.error(name, bound, "null or from -5 to below 0")
    return bound


def kda_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers are KDA: `layer_types`, or all but every fourth."""
    if not fields.has("layer_types"):
        return [index % 4 != 3 for index in range(num_layers)]
    types = fields.words("layer_types", among=(KDA_TYPE, *LAYER_TYPES), length=num_layers)
    return [word == KDA_TYPE for word in types]


def locate_weights(config: ModelConfig) -> dict[str, Location]:
    """Where each canonical parameter is in a glm5_next checkpoint."""
    return locate(config, PROJECTIONS)


FOREIGN_PREFIXES = ("model.visual.", "visual.")
FAMILY = Family(
    model_type="glm5_next",
    read_config=read_config,
    locate=locate_weights,
    body_prefixes=("model.language_model.", "language_model.model.", "language_model.", "model.", ""),
    foreign_prefixes=FOREIGN_PREFIXES,
)
TEXT_FAMILY = Family(
    model_type="glm5_next_text",
    read_config=read_text_config,
    locate=locate_weights,
    body_prefixes=("model.", "", "model.language_model.", "language_model.model.", "language_model."),
    foreign_prefixes=FOREIGN_PREFIXES,
)
