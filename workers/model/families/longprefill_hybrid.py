"""longprefill_hybrid: KDA, DSA and dense MLA layers in any order, with Attention Residuals or a plain residual stream.

Our own family, for the architecture that no public checkpoint has yet. Fields keep the names of published configs where
there is one; `docs/guide/models.md` lists them all. Unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.config import (
    AttnResConfig,
    IndexerConfig,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    RopeConfig,
)
from longprefill.workers.model.families.base import Family, Location
from longprefill.workers.model.families.feed_forward import read_feed_forwards
from longprefill.workers.model.families.fields import Fields
from longprefill.workers.model.families.naming import PROJECTIONS, locate
from longprefill.workers.model.families.quantization import read_fp8_block
from longprefill.workers.model.families.rope import read_rotation

IGNORED_FIELDS = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "pad_token_id")
"""Fields that other tools write or read and that change nothing here."""
ACTIVATIONS = ("silu", "gelu")
LATENT_NORM_EPS = 1e-6
MIN_LOWER_BOUND = -5.0


class Positions(NamedTuple):
    """RoPE of the attention and of the indexer, None for none, and the factor on the softmax scale."""

    attention: RopeConfig | None
    indexer: RopeConfig | None
    attention_scale: float


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From a parsed config.json.

    Raises:
        ModelError: a field is missing, unknown or out of range.
    """
    fields = Fields(raw)
    hidden, vocab_size = fields.integer("hidden_size"), fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers")
    norm_eps = fields.number("rms_norm_eps", default=1e-5)
    types = fields.words("layer_types", among=("kda", "dsa", "mla"), length=num_layers)
    mixers: dict[str, KdaConfig | MlaConfig] = {}
    if "kda" in types or fields.has("linear_attn_config"):
        mixers["kda"] = read_kda(fields.section("linear_attn_config"), norm_eps)
    if "dsa" in types or "mla" in types or fields.has("kv_lora_rank"):
        mixers |= read_attention(fields, types)
    activation = fields.choice("hidden_act", among=ACTIVATIONS, default="silu")
    ffns = read_feed_forwards(fields, num_layers, activation=activation, first_dense=0)
    block_layers = fields.integer_or_none("attn_res_block_size")
    res_eps = fields.number("attn_res_eps", default=norm_eps)
    bos_token_ids = fields.token_ids("bos_token_id", vocab_size=vocab_size)
    config = ModelConfig(
        family="longprefill_hybrid",
        vocab_size=vocab_size,
        hidden=hidden,
        layers=tuple(LayerConfig(mixer=mixers[kind], ffn=ffn) for kind, ffn in zip(types, ffns, strict=True)),
        norm_eps=norm_eps,
        residual=None if block_layers is None else AttnResConfig(block_layers=block_layers, eps=res_eps),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_tokens=fields.integer("max_position_embeddings", "model_max_length"),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size=vocab_size),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        fp8_block=read_fp8_block(fields),
    )
    fields.refuse_unread(IGNORED_FIELDS)
    return config


def read_kda(linear: Fields, norm_eps: float) -> KdaConfig:
    """The object `linear_attn_config`."""
    heads, key_dim = linear.integer("num_heads"), linear.integer("head_dim")
    value_heads = linear.integer("num_value_heads", default=heads)
    if value_heads % heads:
        raise linear.error("num_value_heads", value_heads, f"a multiple of num_heads={heads}")
    value_dim = linear.integer("value_head_dim", default=key_dim)
    lower_bound = None
    if linear.has("gate_lower_bound"):
        lower_bound = linear.number("gate_lower_bound", above=-float("inf"))
        if not MIN_LOWER_BOUND <= lower_bound < 0:
            raise linear.error("gate_lower_bound", lower_bound, "null (softplus gate) or from -5 to below 0")
    full_rank = linear.flag("use_full_rank_gate", default=False)
    output_gate_rank = linear.integer("output_gate_rank", default=value_dim)
    stored_heads(linear, value_heads)
    kda = KdaConfig(
        num_heads=heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=linear.integer("short_conv_kernel_size", default=4, minimum=2),
        gate_rank=linear.integer("gate_rank", default=value_dim),
        lower_bound=lower_bound,
        output_gate_rank=None if full_rank else output_gate_rank,
        norm_eps=linear.number("norm_eps", default=norm_eps),
        allow_neg_eigval=linear.flag("allow_neg_eigval", default=False),
    )
    linear.refuse_unread()
    return kda


def stored_heads(linear: Fields, value_heads: int) -> int:
    """Heads that the checkpoint stores `A_log` for; only the first `num_value_heads` are live."""
    return linear.integer("num_stored_heads", default=value_heads, minimum=value_heads)


def read_attention(fields: Fields, types: list[str]) -> dict[str, MlaConfig]:
    """The mixers of the `mla` and `dsa` layers: the same MLA, without and with an indexer."""
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim", minimum=0)
    positions = read_positions(fields, rope_dim)
    scale = fields.number("attention_scale", default=(nope_dim + rope_dim) ** -0.5 * positions.attention_scale)
    shared: dict[str, Any] = {
        "num_heads": fields.integer("num_attention_heads"),
        "q_lora_rank": fields.integer_or_none("q_lora_rank"),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "value_dim": fields.integer("v_head_dim"),
        "rope": positions.attention,
        "scale": scale,
        "q_norm_eps": fields.number("q_norm_eps", default=LATENT_NORM_EPS),
        "kv_norm_eps": fields.number("kv_norm_eps", default=LATENT_NORM_EPS),
        "gated": fields.flag("mla_use_output_gate", default=False),
    }
    mixers = {"mla": MlaConfig(**shared, indexer=None)}
    if "dsa" in types or fields.has("index_topk"):
        mixers["dsa"] = MlaConfig(**shared, indexer=read_indexer(fields, rope_dim, positions.indexer))
    return mixers


def read_positions(fields: Fields, rope_dim: int) -> Positions:
    """`rope_parameters` (null: none) and which dims rotate together in the attention and in the indexer."""
    in_attention = fields.flag("rope_interleave", default=True)
    in_indexer = fields.flag("indexer_rope_interleave", default=False)
    if not fields.has("rope_parameters"):
        return Positions(None, None, 1.0)
    if rope_dim == 0 or rope_dim % 2:
        raise fields.error("qk_rope_head_dim", rope_dim, "even and above 0 with rope_parameters, or set those to null")
    rotation = read_rotation(fields.section("rope_parameters"), rope_dim)

    def rope(interleaved: bool) -> RopeConfig:
        pairing = "interleaved" if interleaved else "half"
        return RopeConfig(theta=rotation.theta, pairing=pairing, inv_freq_scale=rotation.inv_freq_scale)

    return Positions(rope(in_attention), rope(in_indexer), rotation.attention_scale)


def read_indexer(fields: Fields, rope_dim: int, rope: RopeConfig | None) -> IndexerConfig:
    """The `index_*` fields. The indexer rotates with the frequencies of the attention: all of its dims or none."""
    head_dim, topk = fields.integer("index_head_dim"), fields.integer("index_topk")
    pool = fields.integer("index_kpool", default=1)
    if PAGE_TOKENS % pool:
        raise fields.error("index_kpool", pool, f"a divisor of the page size {PAGE_TOKENS}: 1, 2, 4, 8, 16, 32 or 64")
    if topk % pool:
        raise fields.error("index_topk", topk, f"a multiple of index_kpool={pool}")
    index_rope_dim = fields.integer("index_rope_head_dim", default=0 if rope is None else rope_dim, minimum=0)
    if index_rope_dim not in (0, rope_dim) or index_rope_dim > head_dim or (rope is None and index_rope_dim):
        dims = "0 without rope_parameters" if rope is None else f"0, or qk_rope_head_dim={rope_dim}"
        allowed = f"{dims}, and up to index_head_dim={head_dim}"
        raise fields.error("index_rope_head_dim", index_rope_dim, allowed)
    return IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        topk=topk,
        pool=pool,
        rope_dim=index_rope_dim,
        rope=rope if index_rope_dim else None,
        norm_eps=fields.number("index_norm_eps", default=1e-6),
    )


def locate_weights(config: ModelConfig) -> dict[str, Location]:
    """Where each canonical parameter is in a longprefill_hybrid checkpoint."""
    return locate(config, PROJECTIONS)


FAMILY = Family(model_type="longprefill_hybrid", read_config=read_config, locate=locate_weights)
