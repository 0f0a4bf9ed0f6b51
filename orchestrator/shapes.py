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
from longprefill.workers.model.config import (
    AttnResConfig,
    DenseConfig,
    HyperConnectionConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from longprefill.workers.model.sharding import ALONE, MeshPlace, local_config


def model_shape(config: ModelConfig, settings: ClusterSettings, place: MeshPlace = ALONE) -> ModelShape:
    """All layers as one rank holds them: at `place`, or all of the model (context parallelism splits no weights).

    Raises:
        UserError: the place's tensor parallelism does not divide the heads.
    """
    local = local_config(config, place).layers
    shapes = {
        layer: LayerShape(
            mixer=_kda(layer.mixer) if isinstance(layer.mixer, KdaConfig) else _mla(layer.mixer, settings),
            ffn=_ffn(layer.ffn, place),
        )
        for layer in dict.fromkeys(local)
    }
    layers = tuple(shapes[layer] for layer in local)
    residual = config.residual
    return ModelShape(
        hidden=config.hidden,
        layers=layers,
        element_bytes=settings.item_bytes,
        attn_res_block=residual.block_layers if isinstance(residual, AttnResConfig) else None,
        hyper_streams=residual.num_streams if isinstance(residual, HyperConnectionConfig) else 0,
        vocab_size=-(-config.vocab_size // place.num_tp),
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


def _ffn(ffn: DenseConfig | MoeConfig, place: MeshPlace) -> DenseShape | MoeShape:
    """Columns are split over tensor parallelism, the widest share counts; experts over the mesh."""
    if isinstance(ffn, DenseConfig):
        return DenseShape(intermediate=-(-ffn.intermediate // place.num_tp))
    return MoeShape(
        num_experts=ffn.num_experts,
        experts_per_token=ffn.experts_per_token,
        intermediate=ffn.intermediate,
        shared_intermediate=-(-ffn.shared_intermediate // place.num_tp),
        latent_dim=ffn.latent_dim,
        held_experts=-(-ffn.num_experts // place.num_world) if place.expert_parallel else None,
    )
