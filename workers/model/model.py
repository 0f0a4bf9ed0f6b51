"""A model on one rank: embedding, layers, final norm and head over this rank's rows of a step.

S own rows, J jobs, V vocabulary, D hidden
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from longprefill.partition.shards import even_ranges
from longprefill.workers.model.config import DenseConfig, KdaConfig, LayerConfig, MlaConfig, ModelConfig
from longprefill.workers.model.layers.attention import AttentionLayer
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.feed_forward import DenseLayer, MoeLayer
from longprefill.workers.model.layers.kda import KdaLayer
from longprefill.workers.model.layers.residual import ResidualScheme


class Model:
    """`weights` are canonical tensors (parameters.py) in the compute dtype; the model keeps them and may fuse some."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.embed = weights["embed"]
        self.head = weights["embed"] if config.tie_embeddings else weights["head"]
        self.final_norm = weights["final_norm"]
        self.layers = tuple(
            _Layer(n, spec, config, _scope(weights, f"layers.{n}.")) for n, spec in enumerate(config.layers)
        )
        self.residual = ResidualScheme(config, weights)

    def forward(self, token_ids_S: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """All layers over this rank's own rows; returns what the final norm reads, [S, D]. Caches and states are
        updated in `ctx`."""
        stream = self.residual.start(self.embed[token_ids_S], ctx.kernels)
        for n, layer in enumerate(self.layers):
            with ctx.tracer.span(layer.name, "layer", layer=n):
                x_SD = stream.mixer_input(n, layer.mixer_norm)
                ctx.observe(n, "mixer input", x_SD)
                out_SD = layer.mixer.forward(x_SD, ctx)
                ctx.observe(n, "mixer output", out_SD)
                stream.add(out_SD)
                x_SD = stream.ffn_input(n, layer.ffn_norm)
                ctx.observe(n, "feed-forward input", x_SD)
                out_SD = layer.ffn.forward(x_SD, ctx)
                ctx.observe(n, "feed-forward output", out_SD)
                stream.add(out_SD)
        hidden_SD = stream.final()
        ctx.observe(len(self.layers), "final hidden", hidden_SD)
        return hidden_SD

    def logits(self, hidden_JD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """fp32 logits [J, V] of rows of `forward`'s result, the same rows on every rank of the TP group, each of which
        has a part of the head."""
        linear = ctx.kernels.linear.linear
        normed = ctx.kernels.norm.rms_norm(hidden_JD, self.final_norm, self.config.norm_eps)
        if ctx.mesh.tp.size == 1:
            return linear(normed, self.head).float()
        parts = even_ranges(self.config.vocab_size, ctx.mesh.tp.size)
        own = parts[ctx.mesh.tp.rank]
        # tied embeddings are whole on every rank, a head of its own is not
        head = self.embed[own.start : own.stop] if self.config.tie_embeddings else self.head
        part_JV = linear(normed, head).float()
        counts = [len(part) for part in parts]
        return ctx.mesh.tp.all_gather_rows(part_JV.T.contiguous(), counts, op="logits").T.contiguous()

    @property
    def largest_pool(self) -> int:
        """Tokens of the largest k-pool of any layer: 1 without pooling."""
        mixers = [layer.mixer for layer in self.config.layers]
        indexers = [mixer.indexer for mixer in mixers if isinstance(mixer, MlaConfig) and mixer.indexer is not None]
        return max((indexer.pool for indexer in indexers), default=1)


class _Layer:
    def __init__(self, index: int, spec: LayerConfig, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.mixer_norm = weights["mixer_norm"]
        self.ffn_norm = weights["ffn_norm"]
        if isinstance(spec.mixer, KdaConfig):
            self.name = "kda"
            self.mixer = KdaLayer(index, spec.mixer, weights)
        else:
            self.name = "mla" if spec.mixer.selection is None else "dsa"
            self.mixer = AttentionLayer(index, spec.mixer, weights)
        if isinstance(spec.ffn, DenseConfig):
            self.ffn = DenseLayer(spec.ffn, weights)
        else:
            self.ffn = MoeLayer(index, spec.ffn, weights)


def _scope(weights: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
