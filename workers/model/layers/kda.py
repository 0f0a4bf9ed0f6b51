"""Kimi Delta Attention under context parallelism, exact for any layout.

    T local rows, S own rows, D hidden, C conv channels (q | k | v), W conv width, H q/k heads, G value heads, K key
    dim, V value dim, N local fragments

1. halo: the last W - 1 normed input rows before each fragment travel and the receiver projects them again; before the
   step's start the projected rows come from the boundary state;
2. projections; conv + SiLU, l2 norm and gates in one pass; the state-independent part of every tile;
3. fragments that know their incoming state scan at once, middle fragments make their summary [E | M];
4. exchange of summaries; every other fragment folds its incoming state;
5. scan from the true incoming state, gated output norm, output projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longprefill.kernels.contracts import KdaInputs, Summary
from longprefill.workers.cache.states import KdaState
from longprefill.workers.model.config import KdaConfig
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.state_exchange import EXCHANGES, publishes


class KdaLayer:
    """`weights` are this layer's tensors, `kda.*` of parameters.py."""

    def __init__(self, index: int, config: KdaConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights
        self.qkv_CD = torch.cat((weights["kda.q_proj"], weights["kda.k_proj"], weights["kda.v_proj"]))
        for name in ("kda.q_proj", "kda.k_proj", "kda.v_proj"):
            del weights[name]  # now in qkv_CD
        self.a_log_G = weights["kda.a_log"].float()
        self.dt_bias_GK = weights["kda.dt_bias"].float().view(config.num_value_heads, config.key_dim)

    def forward(self, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [S, D] are the normed own rows; returns the mixer's output for them."""
        config = self.config
        x_TD = ctx.gather_rows(x_SD, op="tp_gather")
        with ctx.tracer.span("kda.project"):
            halo = Halo(x_TD, config.conv_width - 1, ctx)
            raw_TC = ctx.kernels.linear.linear(x_TD, self.qkv_CD)
            history_NWC = halo.history(raw_TC, self.qkv_CD, self.index)
        with ctx.tracer.span("kda.conv"):
            inputs = self._inputs(x_TD, raw_TC, history_NWC, ctx)
        out_TGV = self._recurrence(inputs, ctx)
        self._keep_conv_tails(raw_TC, history_NWC, ctx)
        with ctx.tracer.span("kda.output"):
            normed = ctx.kernels.norm.gated_rms_norm(
                out_TGV, self._output_gate(x_TD, ctx), self.weights["kda.o_norm"], config.norm_eps
            )
            mixed_TD = ctx.kernels.linear.linear(normed.flatten(1), self.weights["kda.o_proj"])
        return ctx.scatter_sum(mixed_TD, op="tp_scatter_sum")

    def _inputs(
        self, x_TD: torch.Tensor, raw_TC: torch.Tensor, history_NWC: torch.Tensor, ctx: StepContext
    ) -> KdaInputs:
        config, linear = self.config, ctx.kernels.linear.linear
        low_TR = linear(x_TD, self.weights["kda.f_a"])
        decay_TF = linear(low_TR, self.weights["kda.f_b"])
        return ctx.kernels.kda.make_inputs(
            raw_TC,
            self.weights["kda.conv"],
            decay_TF.unflatten(1, (config.num_value_heads, config.key_dim)),
            linear(x_TD, self.weights["kda.b_proj"]),
            offsets=ctx.offsets,
            history_NWC=history_NWC,
            num_heads=config.num_heads,
            a_log_G=self.a_log_G,
            dt_bias_GK=self.dt_bias_GK,
            lower_bound=config.lower_bound,
            largest_beta=2.0 if config.allow_neg_eigval else 1.0,
        )

    def _output_gate(self, x_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        linear = ctx.kernels.linear.linear
        if self.config.output_gate_rank is None:
            gate_TF = linear(x_TD, self.weights["kda.g_proj"])
        else:
            gate_TF = linear(linear(x_TD, self.weights["kda.g_a"]), self.weights["kda.g_b"])
        return gate_TF.unflatten(1, (self.config.num_value_heads, self.config.value_dim))

    def _recurrence(self, inputs: KdaInputs, ctx: StepContext) -> torch.Tensor:
        """[T, G, V]. Fragments are scanned in two rounds: those that start their chain, then those that wait for
        states."""
        kernels, scale = ctx.kernels.kda, self.config.key_dim**-0.5
        out_TGV = inputs.v_TGV.new_empty(inputs.v_TGV.shape)

        def prepare(numbers: list[int]):
            offsets = [0]
            for n in numbers:
                offsets.append(offsets[-1] + ctx.local[n].length)
            return kernels.prepare(*_rows_of(inputs, numbers, ctx), offsets=offsets, scale=scale)

        def keep(numbers: list[int], out_RGV: torch.Tensor, states_GKV: Sequence[torch.Tensor]) -> None:
            row = 0
            for n, state_GKV in zip(numbers, states_GKV, strict=True):
                fragment = ctx.local[n]
                out_TGV[ctx.offsets[n] : ctx.offsets[n + 1]] = out_RGV[row : row + fragment.length]
                row += fragment.length
                if ctx.is_last(fragment):
                    self._keep_state(fragment.job, state_GKV, ctx)

        def scan_first(numbers: list[int]) -> Sequence[torch.Tensor]:
            """States after the fragments that start their chain; where all are one token, as in decode, by `step`."""
            before_GKV = [ctx.jobs[ctx.local[n].job].before.kda[self.index].state_GKV for n in numbers]
            if all(ctx.local[n].length == 1 for n in numbers):
                out_RGV, states_GKV = kernels.step(*_rows_of(inputs, numbers, ctx), before_GKV, scale=scale)
            else:
                out_RGV, states_NGKV, _ = kernels.scan(prepare(numbers), torch.stack(before_GKV))
                states_GKV = states_NGKV.unbind()
            keep(numbers, out_RGV, states_GKV)
            return states_GKV

        published: dict = {}
        first = [n for n, fragment in enumerate(ctx.local) if fragment.order == 0]
        later = [n for n, fragment in enumerate(ctx.local) if fragment.order > 0]
        if first:
            with ctx.tracer.span("kda.scan_first"):
                states_GKV = scan_first(first)
            for state_GKV, n in zip(states_GKV, first, strict=True):
                if publishes(ctx.layout, ctx.local[n]):
                    published[ctx.local[n]] = Summary(state_GKV, None)
        prepared = None
        if later:
            with ctx.tracer.span("kda.summarize"):
                prepared = prepare(later)
                for i, n in enumerate(later):
                    if publishes(ctx.layout, ctx.local[n]):
                        published[ctx.local[n]] = kernels.summarize(prepared, i)
        incoming = EXCHANGES[ctx.exchange](self.config, published, ctx)
        if later:
            with ctx.tracer.span("kda.scan"):
                result = kernels.scan(prepared, torch.stack([incoming[ctx.local[n]] for n in later]))
                keep(later, result.out_TGV, result.state_NGKV.unbind())
        return out_TGV

    def _keep_state(self, job: int, state_GKV: torch.Tensor, ctx: StepContext) -> None:
        # the conv tail follows when it is known (_keep_conv_tails)
        tail = ctx.jobs[job].before.kda[self.index].conv_tail_WC
        ctx.jobs[job].after.kda[self.index] = KdaState(state_GKV=state_GKV, conv_tail_WC=tail)

    def _keep_conv_tails(self, raw_TC: torch.Tensor, history_NWC: torch.Tensor, ctx: StepContext) -> None:
        width = self.config.conv_width - 1
        for n, fragment in enumerate(ctx.local):
            if ctx.is_last(fragment):
                rows_TC = raw_TC[ctx.offsets[n] : ctx.offsets[n + 1]][-width:] if width else raw_TC[:0]
                missing = width - rows_TC.shape[0]
                tail_WC = torch.cat((history_NWC[n, width - missing :], rows_TC))
                ctx.jobs[fragment.job].after.kda[self.index].conv_tail_WC = tail_WC


def _rows_of(inputs: KdaInputs, numbers: list[int], ctx: StepContext) -> KdaInputs:
    """The rows of some local fragments, one after the other; a view if all are wanted or only one is."""
    if len(numbers) == len(ctx.local):
        return inputs
    rows = [slice(ctx.offsets[n], ctx.offsets[n + 1]) for n in numbers]
    if len(rows) == 1:
        return KdaInputs(*(stream[rows[0]] for stream in inputs))
    return KdaInputs(*(torch.cat([stream[r] for r in rows]) for stream in inputs))


class Halo:
    """The `width` input rows before each local fragment: sent by the constructor, projected by `history`."""

    def __init__(self, x_TD: torch.Tensor, width: int, ctx: StepContext) -> None:
        self.ctx = ctx
        self.width = width
        self.plan = ctx.halo_plan(width)
        hidden = x_TD.shape[1]
        self.received = {}
        if ctx.mesh.cp.size > 1:
            with ctx.tracer.span("kda.halo", "collective"):
                self.received = ctx.mesh.cp.exchange(
                    {peer: x_TD[list(rows)] for peer, rows in self.plan.sends.items()},
                    {peer: (len(slots), hidden) for peer, slots in self.plan.receives.items()},
                    dtype=x_TD.dtype,
                    op="kda_halo",
                )

    def history(self, raw_TC: torch.Tensor, weight_CD: torch.Tensor, layer: int) -> torch.Tensor:
        """Raw projected rows before each local fragment, [N, width, C]; zeros before a job's first token."""
        ctx, plan = self.ctx, self.plan
        history_NWC = raw_TC.new_zeros(len(ctx.local), self.width, raw_TC.shape[1])
        for peer, slots in plan.receives.items():
            projected = ctx.kernels.linear.linear(self.received[peer], weight_CD)
            for row_C, (n, slot) in zip(projected, slots, strict=True):
                history_NWC[n, slot] = row_C
        for local_row, (n, slot) in plan.local:
            history_NWC[n, slot] = raw_TC[local_row]
        for job, tail_row, (n, slot) in plan.tails:
            history_NWC[n, slot] = ctx.jobs[job].before.kda[layer].conv_tail_WC[tail_row]
        return history_NWC
