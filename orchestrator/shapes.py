"""From a `ModelConfig` to the plain integers that the work model counts with."""

from __future__ import annotations

from longprefill.orchestrator.plan import ClusterSettings, key_row_bytes, latent_row_bytes
from longprefill.partition.shapes import (
    DenseShape,
    IndexerShape,
    KdaShape,
    LayerShape,
    MlaShape,
    ModelShape,
    MoeShape,
)
from longprefill.workers.model.config import AttnResConfig, DenseConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig


def model_shape(config: ModelConfig, settings: ClusterSettings) -> ModelShape:
    """All layers as one rank holds them (context parallelism splits no weights)."""
    layers = tuple(
        LayerShape(
            mixer=_kda(layer.mixer) if isinstance(layer.mixer, KdaConfig) else _mla(layer.mixer, settings),
            ffn=_ffn(layer.ffn),
        )
        for layer in config.layers
    )
    return ModelShape(
        hidden=config.hidden,
        layers=layers,
        element_bytes=settings.item_bytes,
        attn_res_block=config.residual.block_layers if isinstance(config.residual, AttnResConfig) else None,
    )


def _kda(kda: KdaConfig) -> KdaShape:
    return KdaShape(
        num_heads=kda.num_heads,
        num_value_heads=kda.num_value_heads,
        key_dim=kda.key_dim,
        value_dim=kda.value_dim,
        conv_width=kda.conv_width,
        gate_rank=kda.gate_rank,
        output_gate_rank=kda.output_gate_rank,
    )


def _mla(mla: MlaConfig, settings: ClusterSettings) -> MlaShape:
    row_bytes = latent_row_bytes(settings.latent, mla.kv_lora_rank, mla.rope_dim)
    indexer = None
    if mla.indexer is not None:
        indexer = IndexerShape(
            num_heads=mla.indexer.num_heads,
            head_dim=mla.indexer.head_dim,
            topk=mla.indexer.topk,
            pool=mla.indexer.pool,
            key_bytes=key_row_bytes(settings.index, mla.indexer.head_dim),
        )
    elif mla.shared_selection is not None:
        # attends to a selection that cost nothing here: an indexer without heads
        indexer = IndexerShape(num_heads=0, head_dim=0, topk=mla.shared_selection.topk, pool=mla.shared_selection.pool)
    return MlaShape(
        num_heads=mla.num_heads,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        nope_dim=mla.nope_dim,
        rope_dim=mla.rope_dim,
        value_dim=mla.value_dim,
        row_bytes=row_bytes,
        indexer=indexer,
        is_gated=mla.gated,
    )


def _ffn(ffn: DenseConfig | MoeConfig) -> DenseShape | MoeShape:
    if isinstance(ffn, DenseConfig):
        return DenseShape(intermediate=ffn.intermediate)
    return MoeShape(
        num_experts=ffn.num_experts,
        experts_per_token=ffn.experts_per_token,
        intermediate=ffn.intermediate,
        shared_intermediate=ffn.shared_intermediate,
        latent_dim=ffn.latent_dim,
    )
