"""MLA with a lightning indexer as published DSA models spell it: what deepseek_v32, glm_moe_dsa and glm5_next share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longprefill.partition.errors import ModelError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.config import IndexerConfig, LayerConfig, MlaConfig, ModelConfig, RopeConfig
from longprefill.workers.model.families.feed_forward import read_feed_forwards
from longprefill.workers.model.families.fields import Fields
from longprefill.workers.model.families.quantization import read_fp8_block
from longprefill.workers.model.families.rope import Rotation, read_published_rotation

LATENT_NORM_EPS = 1e-6
"""Of the norms of the query and key-value latents where published codes leave it at this, whatever `rms_norm_eps`."""
INDEX_NORM_EPS = 1e-6
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention", "full_attention")
"""Words for a DSA layer in `layer_types`."""
SCHEDULE_FIELDS = ("indexer_types", "index_topk_pattern", "index_topk_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedFamily:
    """What distinguishes the families whose layers are all DSA."""

    model_type: str
    indexer_interleaves: bool
    """Default of `indexer_rope_interleave`: which dims of the indexer rotate together."""
    shares_selections: bool
    """Layers may reuse the selection of an earlier one."""
    defaults: Mapping[str, Any]
    """Fields that a config.json may leave out, and what the published model code then takes."""

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """From a parsed config.json.

        Raises:
            ModelError: a field is missing or out of range, or asks for what the published model code does not do.
        """
        fields = Fields({**self.defaults, **raw})
        refuse_variants(fields)
        num_layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
        if fields.has("layer_types"):
            fields.words("layer_types", among=LAYER_TYPES, length=num_layers)
        rope_dim = fields.integer("qk_rope_head_dim", minimum=2)
        if rope_dim % 2:
            raise fields.error("qk_rope_head_dim", rope_dim, "even")
        rotation = read_published_rotation(fields, rope_dim)
        indexer = read_indexer(fields, rope_dim, self._rope(rotation, self._indexer_interleaves(fields)))
        mla = read_mla(fields, rope_dim, self._rope(rotation, True), rotation.attention_scale, LATENT_NORM_EPS)
        if not self.shares_selections and any(fields.has(name) for name in SCHEDULE_FIELDS):
            raise ModelError(f"config.json: {self.model_type} has no shared indexers: remove indexer_types")
        full = indexer_layers(fields, num_layers) if self.shares_selections else [True] * num_layers
        mixers = with_selections([mla] * num_layers, indexer, full)
        ffns = read_feed_forwards(
            fields, num_layers, activation="silu", first_dense=fields.integer("first_k_dense_replace", minimum=0)
        )
        bos_token_ids = fields.token_ids("bos_token_id", vocab_size=vocab_size)
        return ModelConfig(
            family=self.model_type,
            vocab_size=vocab_size,
            hidden=fields.integer("hidden_size"),
            layers=tuple(LayerConfig(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
            norm_eps=fields.number("rms_norm_eps"),
            residual=None,
            tie_embeddings=fields.flag("tie_word_embeddings", default=False),
            max_tokens=fields.integer("max_position_embeddings"),
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size=vocab_size),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            fp8_block=read_fp8_block(fields),
        )

    def _indexer_interleaves(self, fields: Fields) -> bool:
        return fields.flag("indexer_rope_interleave", default=self.indexer_interleaves)

    def _rope(self, rotation: Rotation, interleaved: bool) -> RopeConfig:
        return RopeConfig(
            theta=rotation.theta,
            pairing="interleaved" if interleaved else "half",
            inv_freq_scale=rotation.inv_freq_scale,
            magnitude=rotation.magnitude,
        )


def refuse_variants(fields: Fields) -> None:
    """Raise for values that would need maths which the published model code does not have."""
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, default=False):
            raise fields.error(name, True, "false: projections without bias")
    if not fields.flag("rope_interleave", default=True):
        raise fields.error("rope_interleave", False, "true: the attention rotates dims (0, 1), (2, 3), ...")
    fields.choice("hidden_act", among=("silu",), default="silu")
    fields.choice("scoring_func", among=("sigmoid",), default="sigmoid")
    fields.choice("topk_method", among=("noaux_tc",), default="noaux_tc")
    heads = fields.integer("num_attention_heads")
    key_heads = fields.integer("num_key_value_heads", default=heads)
    if key_heads != heads:
        raise fields.error("num_key_value_heads", key_heads, f"num_attention_heads={heads}")


def read_mla(
    fields: Fields, rope_dim: int, rope: RopeConfig | None, attention_scale: float, latent_norm_eps: float
) -> MlaConfig:
    """The attention of a DSA layer, still without its selection. `attention_scale` multiplies the softmax scale."""
    nope_dim = fields.integer("qk_nope_head_dim")
    return MlaConfig(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * attention_scale,
        q_norm_eps=latent_norm_eps,
        kv_norm_eps=latent_norm_eps,
        gated=False,
        indexer=None,
    )


def read_indexer(fields: Fields, rope_dim: int, rope: RopeConfig | None, pool: int = 1) -> IndexerConfig:
    """The `index_*` fields; the first `rope_dim` dims rotate. `pool` tokens share a key."""
    head_dim, topk = fields.integer("index_head_dim"), fields.integer("index_topk")
    if head_dim < rope_dim:
        raise fields.error("index_head_dim", head_dim, f"at least qk_rope_head_dim={rope_dim}")
    if PAGE_TOKENS % pool:
        raise fields.error("index_kpool", pool, f"a divisor of the page size {PAGE_TOKENS}: 1, 2, 4, 8, 16, 32 or 64")
    if topk % pool:
        raise fields.error("index_topk", topk, f"a multiple of index_kpool={pool}")
    return IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        topk=topk,
        pool=pool,
        rope_dim=rope_dim,
        rope=rope,
        norm_eps=INDEX_NORM_EPS,
    )


def indexer_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers run an indexer: `indexer_types`; or `index_topk_pattern`, as "FSSF"; or one of `index_topk_freq`
    layers after the first `index_skip_topk_offset`; else all."""
    if fields.has("indexer_types"):
        types = fields.words("indexer_types", among=("full", "shared"), length=num_layers)
        return [word == "full" for word in types]
    if fields.has("index_topk_pattern"):
        pattern = fields.pattern("index_topk_pattern", among=("F", "S", "full", "shared"), length=num_layers)
        return [word in ("F", "full") for word in pattern]
    frequency = fields.integer("index_topk_freq", default=1, minimum=0) or 1
    offset = fields.integer("index_skip_topk_offset", default=2, minimum=0)
    return [max(index - offset + 1, 0) % frequency == 0 for index in range(num_layers)]


def with_selections(mixers: Sequence[Any], indexer: IndexerConfig, full: Sequence[bool]) -> list[Any]:
    """The mixers of all layers, attention with its own indexer where `full`, else with that of the attention layer
    before it; other mixers as they are.

    Raises:
        ModelError: the first attention layer has no indexer.
    """
    attention = [index for index, mixer in enumerate(mixers) if isinstance(mixer, MlaConfig)]
    if attention and not full[attention[0]]:
        raise ModelError(
            f"config.json: indexer_types[{attention[0]}]='shared' is not allowed: "
            "the first attention layer has nothing to share, it must be full"
        )
    result = list(mixers)
    for place, index in enumerate(attention):
        is_reused = any(not full[following] for following in attention[place + 1 : place + 2])
        own = dataclasses.replace(indexer, is_reused=is_reused)
        selection = {"indexer": own} if full[index] else {"shared_selection": indexer}
        result[index] = dataclasses.replace(mixers[index], **selection)
    return result
