"""Dense and mixture-of-experts feed-forward.

    S own rows, T local rows, D hidden, E experts, A experts a token, F intermediate

Per token, so context parallelism needs no exchange. Under tensor parallelism dense layers and shared experts have their
columns split over the group and read all local rows; routed experts read own rows, and with expert parallelism live
anywhere in the mesh (`expert_exchange.py`).
"""

from __future__ import annotations

import torch

from longprefill.kernels.contracts import LinearKernels, Routing
from longprefill.workers.model.config import DenseConfig, MoeConfig
from longprefill.workers.model.layers.context import ExpertChoice, StepContext
from longprefill.workers.model.layers.expert_exchange import run_experts
from longprefill.workers.model.sharding import expert_ranges

BLOCK_BYTES = 64 << 20
"""Of the rows of a dense layer's intermediate at a time; fewer rows cost a product its speed, as each call packs the
weights again."""
FEWEST_ROWS = 1024
"""Of them, however wide the layer is."""


def gated_mlp(
    x_TD: torch.Tensor, gate_up_JD: torch.Tensor, down_DF: torch.Tensor, kernels: LinearKernels, *, activation: str,
    clamp: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """down(act(gate x) * up x); `gate_up` holds the gate rows first. With `clamp` the gate is cut above it and up
    beyond it on both sides, before the activation."""
    out_TD = x_TD.new_empty(len(x_TD), len(down_DF))
    row_bytes = max(len(gate_up_JD), 1) * x_TD.itemsize  # a rank may hold no column
    num_rows = max(FEWEST_ROWS, BLOCK_BYTES // row_bytes)
    for rows_LD, out_LD in zip(x_TD.split(num_rows), out_TD.split(num_rows), strict=True):
        hidden_LF = kernels.gated(kernels.linear(rows_LD, gate_up_JD), activation=activation, clamp=clamp)
        kernels.linear(hidden_LF, down_DF, out_TE=out_LD)
    return out_TD


def _on_all_rows(
    x_SD: torch.Tensor, gate_up_JD: torch.Tensor, down_DF: torch.Tensor, config: DenseConfig | MoeConfig,
    ctx: StepContext, *, span: str,
) -> torch.Tensor:  # fmt: skip
    """`gated_mlp` with the columns of this rank over the rows of its tensor-parallel group; [S, D] of own rows."""
    x_TD = ctx.gather_rows(x_SD, op="tp_gather")
    with ctx.tracer.span(span):
        out_TD = gated_mlp(
            x_TD, gate_up_JD, down_DF, ctx.kernels.linear, activation=config.activation, clamp=config.activation_clamp
        )
    return ctx.scatter_sum(out_TD, op="tp_scatter_sum")


class DenseLayer:
    def __init__(self, config: DenseConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights

    def forward(self, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x are the normed own rows; [S, D]."""
        weights = self.weights
        return _on_all_rows(x_SD, weights["ffn.gate_up"], weights["ffn.down"], self.config, ctx, span="ffn.dense")


class MoeLayer:
    """Routed experts, optionally on a latent of the hidden row, plus shared experts. With fewer experts in `weights`
    than in the config the others are elsewhere in the mesh."""

    def __init__(self, index: int, config: MoeConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights

    def forward(self, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x are the normed own rows; [S, D]."""
        config, weights, linear = self.config, self.weights, ctx.kernels.linear.linear
        routing = self._route(x_SD, ctx)
        with ctx.tracer.span("moe.experts"):
            inner_SW = x_SD if config.latent_dim is None else linear(x_SD, weights["moe.latent_in"])
            out_SW = self._experts(inner_SW, routing, ctx)
            out_SD = out_SW if config.latent_dim is None else linear(out_SW, weights["moe.latent_out"])
        if config.shared_intermediate:
            gate_up_JD, down_DF = weights["moe.shared_gate_up"], weights["moe.shared_down"]
            out_SD = out_SD + _on_all_rows(x_SD, gate_up_JD, down_DF, config, ctx, span="moe.shared")
        return out_SD

    def _route(self, x_SD: torch.Tensor, ctx: StepContext) -> Routing:
        config, weights = self.config, self.weights
        bias_E = weights.get("moe.bias")
        with ctx.tracer.span("moe.route"):
            logits_SE = ctx.kernels.linear.linear_fp32(x_SD, weights["moe.gate"])
            routing = ctx.kernels.moe.route(
                logits_SE,
                bias_E,
                topk=config.experts_per_token,
                scoring=config.scoring,
                num_groups=config.num_groups,
                topk_groups=config.topk_groups,
                normalize=config.normalize_weights,
                scale=config.weight_scale,
            )
        if ctx.choices is not None:
            choice = ExpertChoice(layer=self.index, config=config, logits_TE=logits_SE, bias_E=bias_E, routing=routing)
            routing = ctx.choices.experts(choice, ctx)
        return routing

    def _experts(self, x_SW: torch.Tensor, routing: Routing, ctx: StepContext) -> torch.Tensor:
        config, weights = self.config, self.weights

        def compute(x_NW: torch.Tensor, local: Routing) -> torch.Tensor:
            return ctx.kernels.moe.experts(
                x_NW,
                local,
                weights["moe.gate_up"],
                weights["moe.down"],
                activation=config.activation,
                clamp=config.activation_clamp,
                out_dtype=torch.float32,
            )

        if not ctx.expert_parallel:
            return compute(x_SW, routing).to(x_SW.dtype)
        held = expert_ranges(config.num_experts, ctx.mesh.world.size)
        return run_experts(x_SW, routing, held, ctx.mesh.world, compute).to(x_SW.dtype)
