"""Dense and mixture-of-experts feed-forward. Per token, so context parallelism needs no exchange here.

T local rows, D hidden, E experts, A experts a token, F intermediate
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longprefill.workers.model.config import DenseConfig, MoeConfig
from longprefill.workers.model.layers.context import StepContext

ROW_BLOCK = 2048
"""Rows at a time, so that the intermediate of a dense layer stays small next to the step's activations."""


def gated_mlp(x_TD: torch.Tensor, gate_up_JD: torch.Tensor, down_DF: torch.Tensor, activation: str) -> torch.Tensor:
    """down(act(gate x) * up x); `gate_up` holds the gate rows first."""
    function = {"silu": F.silu, "gelu": F.gelu}[activation]
    outputs: list[torch.Tensor] = []
    for rows in x_TD.split(ROW_BLOCK):
        gate, up = F.linear(rows, gate_up_JD).chunk(2, dim=-1)
        outputs.append(F.linear(function(gate) * up, down_DF))
    return torch.cat(outputs) if outputs else torch.empty_like(x_TD)


class DenseLayer:
    def __init__(self, config: DenseConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights

    def forward(self, x_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x is normed; [T, D]."""
        with ctx.tracer.span("ffn.dense"):
            return gated_mlp(x_TD, self.weights["ffn.gate_up"], self.weights["ffn.down"], self.config.activation)


class MoeLayer:
    """Routed experts, optionally on a latent of the hidden row, plus shared experts."""

    def __init__(self, index: int, config: MoeConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights

    def forward(self, x_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x is normed; [T, D]."""
        config, weights = self.config, self.weights
        with ctx.tracer.span("moe.route"):
            logits_TE = F.linear(x_TD.float(), weights["moe.gate"].float())
            routing = ctx.kernels.moe.route(
                logits_TE,
                weights.get("moe.bias"),
                topk=config.experts_per_token,
                scoring=config.scoring,
                num_groups=config.num_groups,
                topk_groups=config.topk_groups,
                normalize=config.normalize_weights,
                scale=config.weight_scale,
            )
            if ctx.choices is not None:
                routing = ctx.choices.experts(self.index, config, ctx, logits_TE, routing)
        with ctx.tracer.span("moe.experts"):
            inner_TW = x_TD if config.latent_dim is None else F.linear(x_TD, weights["moe.latent_in"])
            out_TW = ctx.kernels.moe.experts(
                inner_TW, routing, weights["moe.gate_up"], weights["moe.down"], activation=config.activation
            )
            out_TD = out_TW if config.latent_dim is None else F.linear(out_TW, weights["moe.latent_out"])
        if config.shared_intermediate:
            with ctx.tracer.span("moe.shared"):
                shared = gated_mlp(x_TD, weights["moe.shared_gate_up"], weights["moe.shared_down"], config.activation)
                out_TD = out_TD + shared
        return out_TD
