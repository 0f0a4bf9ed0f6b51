"""The models that a calibration measures in the place of a whole one: a rank's share, and one layer of every kind."""

from __future__ import annotations

from dataclasses import replace

from longprefill.partition.shards import even_ranges
from longprefill.workers.model.config import DenseConfig, LayerConfig, ModelConfig
from longprefill.workers.model.sharding import MeshPlace, local_config


def rank_share(config: ModelConfig, num_tp: int) -> ModelConfig:
    """A model of its own whose sizes are what the fullest of `num_tp` tensor-parallel ranks holds: its heads, its
    columns of feed-forward layers and of the vocabulary.

    Raises:
        UserError: `num_tp` does not divide the heads.
    """
    place = MeshPlace(num_cp=1, num_tp=num_tp, cp_rank=0, tp_rank=0, expert_parallel=False)
    local = local_config(config, place)
    layers = tuple(_with_columns(layer, num_tp) for layer in local.layers)
    return replace(local, layers=layers, vocab_size=_largest(config.vocab_size, num_tp))


def reduced(config: ModelConfig) -> ModelConfig:
    """One layer of every kind, in the order of their first appearance (a layer that reuses a selection follows one that
    makes it), on a plain residual stream: residual schemes depend on a layer's place and are measured apart."""
    kinds: list[LayerConfig] = []
    for layer in config.layers:
        if layer not in kinds:
            kinds.append(layer)
    return replace(config, layers=tuple(kinds), residual=None)


def _with_columns(layer: LayerConfig, num_tp: int) -> LayerConfig:
    ffn = layer.ffn
    if isinstance(ffn, DenseConfig):
        return replace(layer, ffn=replace(ffn, intermediate=_largest(ffn.intermediate, num_tp)))
    return replace(layer, ffn=replace(ffn, shared_intermediate=_largest(ffn.shared_intermediate, num_tp)))


def _largest(size: int, num_tp: int) -> int:
    return max(map(len, even_ranges(size, num_tp)))
