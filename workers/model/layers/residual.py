"""The residual stream of one step: plain, Block Attention Residuals or hyper-connections. Per token, no communication.

    T own rows, D hidden, Q AttnRes queries that share a block list, M residual streams, W mixing weights, F = M D

Block AttnRes (arXiv 2603.15031, the form of Kimi K3): sources of each sublayer's input are the finished block sums
(the first is the embedding) and the running partial; a block starts at layers 0, n, 2n, ... Softmax over sources of
query . rmsnorm(source); the values are not normalised.

Hyper-connections (mHC, arXiv 2512.24880, the form of GLM-5.3-Flash): M streams that begin as the embedding; every
sublayer
reads one mixture of them and writes to all, while they are mixed among each other by a nearly doubly stochastic matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from longprefill.kernels.backends import KernelTable
from longprefill.kernels.contracts import AttnResPhase1, HyperMix, NormKernels, ResidualKernels
from longprefill.workers.model.config import AttnResConfig, HyperConnectionConfig, ModelConfig

TWO_PHASE_BLOCKS = 4
"""From this many finished blocks on, phase 1 reads them once for all sublayers of the block; below it one phase costs
no more reads and needs no buffer of 2 block_layers x T x D fp32."""


class ResidualStream(Protocol):
    """Norms are the stream's, as most of them are one pass with what the scheme does before."""

    def mixer_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        """What the layer's mixer reads, [T, D]: through the RMS norm of this weight."""
        ...

    def ffn_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        """What the layer's feed-forward reads, [T, D], likewise."""
        ...

    def add(self, output_TD: torch.Tensor) -> None:
        """Takes a sublayer's output, which must stay as it is until the next input is asked for."""
        ...

    def final(self) -> torch.Tensor:
        """What the final norm reads, [T, D]."""
        ...


class PlainStream:
    def __init__(self, embedding_TD: torch.Tensor, norms: NormKernels, norm_eps: float) -> None:
        self.sum_TD = embedding_TD
        self.norms = norms
        self.norm_eps = norm_eps
        self._output_TD: torch.Tensor | None = None

    def mixer_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        return self._read(norm_D)

    def ffn_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        return self._read(norm_D)

    def add(self, output_TD: torch.Tensor) -> None:
        assert self._output_TD is None
        self._output_TD = output_TD

    def final(self) -> torch.Tensor:
        return self.sum_TD if self._output_TD is None else self.sum_TD + self._output_TD

    def _read(self, norm_D: torch.Tensor) -> torch.Tensor:
        output_TD, self._output_TD = self._output_TD, None
        if output_TD is None:
            return self.norms.rms_norm(self.sum_TD, norm_D, self.norm_eps)
        return self.norms.add_rms_norm(self.sum_TD, output_TD, norm_D, self.norm_eps)


class AttnResStream:
    """`queries` are query * norm weight, fp32 [D] each: {"layers.N.mixer_res", "layers.N.ffn_res", "final_res"}."""

    def __init__(
        self,
        embedding_TD: torch.Tensor,
        config: AttnResConfig,
        queries: dict[str, torch.Tensor],
        kernels: KernelTable,
        norm_eps: float,
    ) -> None:
        self.config = config
        self.queries = queries
        self.kernels = kernels.residual
        self.norms = kernels.norm
        self.norm_eps = norm_eps
        self.blocks: list[torch.Tensor] = []
        self.partial: torch.Tensor | None = embedding_TD
        self._phase1: AttnResPhase1 | None = None
        self._phase1_names: tuple[str, ...] = ()

    def mixer_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        mixed = self._mix(f"layers.{layer}.mixer_res")
        if layer % self.config.block_layers == 0:
            assert self.partial is not None
            self.blocks.append(self.partial)
            self.partial = None
            self._prepare(layer)
        return self.norms.rms_norm(mixed, norm_D, self.norm_eps)

    def ffn_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        return self.norms.rms_norm(self._mix(f"layers.{layer}.ffn_res"), norm_D, self.norm_eps)

    def add(self, output_TD: torch.Tensor) -> None:
        self.partial = output_TD if self.partial is None else self.partial + output_TD

    def final(self) -> torch.Tensor:
        return self._mix("final_res")

    def _prepare(self, layer: int) -> None:
        """Phase 1 for every sublayer that reads the block list as it is now."""
        if len(self.blocks) < TWO_PHASE_BLOCKS:
            return
        names = [f"layers.{layer}.ffn_res"]
        for following in range(layer + 1, layer + self.config.block_layers + 1):
            names.append(f"layers.{following}.mixer_res")
            if following < layer + self.config.block_layers:
                names.append(f"layers.{following}.ffn_res")
        present = [name for name in names if name in self.queries]
        if len(present) < len(names):
            present.append("final_res")
        self._phase1_names = tuple(present)
        stacked_QD = torch.stack([self.queries[name] for name in present])
        self._phase1 = self.kernels.prepare(self.blocks, stacked_QD, eps=self.config.eps)

    def _mix(self, name: str) -> torch.Tensor:
        query_D = self.queries[name]
        if self._phase1 is None:
            sources = self.blocks if self.partial is None else [*self.blocks, self.partial]
            return self.kernels.mix(sources, query_D, eps=self.config.eps)
        number = self._phase1_names.index(name)
        mixed = self.kernels.update(self.partial, self._phase1, number, query_D, eps=self.config.eps)
        return mixed.to(self.blocks[0].dtype)


class HyperWeights(NamedTuple):
    """Of one sublayer: what `kernels.residual.hyper_mix` takes."""

    projection_WF: torch.Tensor
    base_W: torch.Tensor
    scale_3: torch.Tensor


class HyperStream:
    """`weights` by site: {"layers.N.mixer_hc", "layers.N.ffn_hc"}."""

    def __init__(
        self,
        embedding_TD: torch.Tensor,
        config: HyperConnectionConfig,
        weights: dict[str, HyperWeights],
        kernels: ResidualKernels,
        norm_eps: float,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.norm_eps = norm_eps
        self.streams_TMD = embedding_TD.unsqueeze(1).repeat(1, config.num_streams, 1)
        self._mix: HyperMix | None = None
        self._output_TD: torch.Tensor | None = None

    def mixer_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        return self._read(f"layers.{layer}.mixer_hc", norm_D)

    def ffn_input(self, layer: int, norm_D: torch.Tensor) -> torch.Tensor:
        return self._read(f"layers.{layer}.ffn_hc", norm_D)

    def add(self, output_TD: torch.Tensor) -> None:
        assert self._mix is not None and self._output_TD is None
        self._output_TD = output_TD

    def final(self) -> torch.Tensor:
        if self._mix is None or self._output_TD is None:
            return self.streams_TMD.mean(dim=1)
        return self.kernels.hyper_final(self.streams_TMD, self._output_TD, self._mix.post_TM, self._mix.comb_TMM)

    def _read(self, site: str, norm_D: torch.Tensor) -> torch.Tensor:
        """The output that was added and the next input in one pass over the streams."""
        config, mix, output_TD = self.config, self._mix, self._output_TD
        numbers = {
            "iterations": config.sinkhorn_iterations,
            "eps": config.eps,
            "norm_eps": config.norm_eps,
            "input_norm_D": norm_D,
            "input_eps": self.norm_eps,
        }
        if mix is None or output_TD is None:
            self._mix = self.kernels.hyper_mix(self.streams_TMD, *self.weights[site], **numbers)
        else:
            self._mix = self.kernels.hyper_update_mix(
                self.streams_TMD, output_TD, mix.post_TM, mix.comb_TMM, *self.weights[site], **numbers
            )
        self._output_TD = None
        return self._mix.input_TD


class ResidualScheme:
    """Makes the stream of a step; holds what the model's scheme needs of its weights (canonical names)."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config.residual
        self.norm_eps = config.norm_eps
        self.queries: dict[str, torch.Tensor] = {}
        self.hyper: dict[str, HyperWeights] = {}
        for name, tensor in weights.items():
            if name.endswith("_res.query"):
                norm_D = weights[name.removesuffix("query") + "norm"]
                self.queries[name.removesuffix(".query")] = tensor.float() * norm_D.float()
            elif name.endswith("_hc.projection"):
                site = name.removesuffix(".projection")
                self.hyper[site] = HyperWeights(tensor, weights[site + ".base"], weights[site + ".scale"])

    def start(self, embedding_TD: torch.Tensor, kernels: KernelTable) -> ResidualStream:
        """The stream before the first layer; it may write over the embedding."""
        if isinstance(self.config, AttnResConfig):
            return AttnResStream(embedding_TD, self.config, self.queries, kernels, self.norm_eps)
        if isinstance(self.config, HyperConnectionConfig):
            return HyperStream(embedding_TD, self.config, self.hyper, kernels.residual, self.norm_eps)
        return PlainStream(embedding_TD, kernels.norm, self.norm_eps)
