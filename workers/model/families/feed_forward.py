"""Feed-forward fields that the families share: which layers are dense, and the mixture of experts."""

from __future__ import annotations

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import DenseConfig, MoeConfig
from longprefill.workers.model.families.fields import Fields

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Spellings of the number of routed experts."""


def read_feed_forwards(
    fields: Fields, num_layers: int, *, activation: str, first_dense: int, clamp: float | None = None
) -> list[DenseConfig | MoeConfig]:
    """The feed-forward of every layer. `first_dense` is the default of `first_k_dense_replace`, `clamp` cuts gates.

    Raises:
        ModelError: a field is missing or out of range.
    """
    is_dense = dense_layers(fields, num_layers, first_dense)
    dense = moe = None
    if any(is_dense) or fields.has("intermediate_size"):
        intermediate = fields.integer("intermediate_size")
        dense = DenseConfig(intermediate=intermediate, activation=activation, activation_clamp=clamp)
    if not all(is_dense) or fields.has(*NUM_EXPERTS):
        moe = read_moe(fields, activation, clamp)
    kinds = [dense if layer_is_dense else moe for layer_is_dense in is_dense]
    return [kind for kind in kinds if kind is not None]


def dense_layers(fields: Fields, num_layers: int, first_dense: int) -> list[bool]:
    """Which layers are dense: `mlp_layer_types`; or the first k, and then all but every `moe_layer_freq`-th; or all."""
    num_dense = fields.integer("first_k_dense_replace", default=first_dense, minimum=0)
    frequency = fields.integer("moe_layer_freq", default=1)
    if fields.has("mlp_layer_types"):
        words = fields.words("mlp_layer_types", among=("dense", "sparse"), length=num_layers)
        return [word == "dense" for word in words]
    if not fields.has(*NUM_EXPERTS):
        if fields.has("first_k_dense_replace", "moe_intermediate_size"):
            raise ModelError("config.json: field num_experts is missing, and other fields ask for experts: add it")
        return [True] * num_layers
    return [index < num_dense or index % frequency != 0 for index in range(num_layers)]


def read_moe(fields: Fields, activation: str, clamp: float | None = None) -> MoeConfig:
    """Router, experts, shared experts and the width that the experts work at."""
    num_experts = fields.integer(*NUM_EXPERTS)
    num_groups = fields.integer("num_expert_group", "n_group", default=1)
    group_size = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and group_size < 2):
        allowed = f"a divisor of num_experts={num_experts} that leaves 2 or more experts a group"
        raise fields.error("num_expert_group", num_groups, allowed)
    topk_groups = fields.integer("topk_group", default=1, maximum=num_groups)
    intermediate = fields.integer("moe_intermediate_size")
    num_shared = fields.integer("num_shared_experts", "n_shared_experts", default=0, minimum=0)
    topk = fields.integer("num_experts_per_token", "num_experts_per_tok", maximum=topk_groups * group_size)
    scoring = fields.choice("moe_router_activation_func", among=("sigmoid", "softmax"), default="sigmoid")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=topk,
        intermediate=intermediate,
        shared_intermediate=intermediate * num_shared,
        latent_dim=fields.integer_or_none("routed_expert_hidden_size"),
        scoring="softmax" if scoring == "softmax" else "sigmoid",
        has_bias=fields.flag("moe_router_bias", default=True),
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalize_weights=fields.flag("moe_renormalize", "norm_topk_prob", default=True),
        weight_scale=fields.number("routed_scaling_factor", default=1.0),
        activation=activation,
        activation_clamp=clamp,
    )
