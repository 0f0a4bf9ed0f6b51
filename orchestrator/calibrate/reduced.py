"""The smallest model that runs every kind of layer of another: what a calibration measures in its place."""

from __future__ import annotations

from dataclasses import replace

from longprefill.workers.model.config import LayerConfig, ModelConfig


def reduced(config: ModelConfig) -> ModelConfig:
    """One layer of every kind, in the order of their first appearance (a layer that reuses a selection follows one that
    makes it), on a plain residual stream: residual schemes depend on a layer's place and are measured apart."""
    kinds: list[LayerConfig] = []
    for layer in config.layers:
        if layer not in kinds:
            kinds.append(layer)
    return replace(config, layers=tuple(kinds), residual=None)
