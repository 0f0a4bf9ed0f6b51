"""The lightning indexer of one DSA layer: its cache rows, its queries and its choice.

    S own rows, T local rows, I indexer heads, X indexer dim, K selected positions (top-k, and with k-pool the tail), Q
    query latent, D hidden

Under tensor parallelism neither heads nor scores are split: each rank answers its own query rows with all index heads,
and the selections (int32) are gathered inside the group.
Source: DeepSeek-V3.2-Exp report; k-pool as in GLM-5.3-Flash (kernels/dsa/README.md).
"""

from __future__ import annotations

import torch

from longprefill.partition.layout import Fragment
from longprefill.workers.cache.states import PoolTail
from longprefill.workers.model.config import IndexerConfig
from longprefill.workers.model.layers.context import PositionChoice, StepContext
from longprefill.workers.model.layers.rotation import rope_frequencies, rotate


def num_dense_rows(run: Fragment, topk: int | None) -> int:
    """Rows of a run that see at most top-k rows, so that there is nothing to choose; all without an indexer."""
    return run.length if topk is None else min(max(topk - run.start, 0), run.length)


class Indexer:
    def __init__(self, index: int, config: IndexerConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights
        self.inv_freq = rope_frequencies(config.rope, config.rope_dim)

    @property
    def selection_width(self) -> int:
        """Most positions that a query selects: top-k, and the tokens of an incomplete pool."""
        return self.config.topk + self.config.pool - 1

    def key_rows(self, x_SD: torch.Tensor, ctx: StepContext) -> list[torch.Tensor]:
        """Encoded key rows of each run: one a token, or one a pool that the run completes."""
        weights = self.weights
        key_SX = ctx.kernels.norm.layer_norm(
            ctx.kernels.linear.linear(x_SD, weights["indexer.wk"]),
            weights["indexer.k_norm.weight"],
            weights["indexer.k_norm.bias"],
            self.config.norm_eps,
        )
        key_SX = self._rotate(key_SX[:, None], ctx)[:, 0]
        if self.config.pool == 1:
            ctx.observe(self.index, "index key rows", key_SX)
            row_format = ctx.pool.kind_of[self.index, "index_key"].format
            return list(row_format.encode(key_SX).split([run.length for run in ctx.runs]))
        gate_SX = ctx.kernels.linear.linear(x_SD, weights["indexer.pool_gate"])
        return [self._pooled_rows(n, run, key_SX, gate_SX, ctx) for n, run in enumerate(ctx.runs)]

    def _pooled_rows(
        self, n: int, run: Fragment, key_SX: torch.Tensor, gate_SX: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        rows = slice(ctx.run_offsets[n], ctx.run_offsets[n + 1])
        key_TX, gate_TX = key_SX[rows].float(), gate_SX[rows].float()
        if ctx.unpooled_keys is not None:
            ctx.unpooled_keys.setdefault(self.index, []).append((run.job, run.start, key_TX.clone()))
        job = ctx.jobs[run.job]
        if ctx.is_first(run):
            # cuts lie on multiples of the pool, so only a step's ragged start continues one
            tail = job.before.pool_tails[self.index]
            key_TX, gate_TX = torch.cat((tail.key_nX, key_TX)), torch.cat((tail.gate_nX, gate_TX))
        complete = key_TX.shape[0] // self.config.pool * self.config.pool
        if ctx.is_last(run):
            job.after.pool_tails[self.index] = PoolTail(
                key_nX=key_TX[complete:].clone(), gate_nX=gate_TX[complete:].clone()
            )
        pooled = ctx.kernels.indexer.pool_keys(key_TX[:complete], gate_TX[:complete], self.weights["indexer.pool_bias"])
        if ctx.probe is not None:
            ctx.probe.keep(self.index, "index key rows", run.job, run.start // self.config.pool, pooled)
        return ctx.pool.kind_of[self.index, "index_key"].format.encode(pooled)

    def queries(
        self, x_SD: torch.Tensor, latent_q_SQ: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(q [S, I, X], head weights fp32 [S, I], which hold both scale factors)."""
        config, kernels = self.config, ctx.kernels.linear
        query_SF = kernels.linear(latent_q_SQ, self.weights["indexer.wq_b"])
        query_SIX = query_SF.view(-1, config.num_heads, config.head_dim)
        weight_SI = kernels.linear_fp32(x_SD, self.weights["indexer.weights_proj"])
        return self._rotate(query_SIX, ctx), weight_SI * (config.num_heads * config.head_dim) ** -0.5

    def choose(self, query_SIX: torch.Tensor, weight_SI: torch.Tensor, ctx: StepContext) -> list[torch.Tensor]:
        """For each local fragment what its rows after the dense ones attend to: int32 [rows, K], ascending, then -1."""
        chosen: list[torch.Tensor] = []
        for n, run in enumerate(ctx.runs):
            first = num_dense_rows(run, self.config.topk)
            rows = slice(ctx.run_offsets[n] + first, ctx.run_offsets[n + 1])
            chosen.append(self._select(run, first, query_SIX[rows], weight_SI[rows], ctx))
        if ctx.mesh.tp.size == 1:
            return chosen
        own_SK = torch.full((ctx.run_offsets[-1], self.selection_width), -1, dtype=torch.int32)
        for n, selected in enumerate(chosen):
            end = ctx.run_offsets[n + 1]
            own_SK[end - selected.shape[0] : end] = selected
        local_TK = ctx.gather_rows(own_SK, op="tp_selection")
        return [
            local_TK[ctx.offsets[n] + num_dense_rows(fragment, self.config.topk) : ctx.offsets[n + 1]]
            for n, fragment in enumerate(ctx.local)
        ]

    def _select(
        self, run: Fragment, first_row: int, q_TIX: torch.Tensor, w_TI: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        config = self.config
        if first_row == run.length:
            return torch.empty(0, self.selection_width, dtype=torch.int32)
        start = run.start + first_row
        keys = ctx.jobs[run.job].cache.rows(self.index, "index_key", run.end)
        with ctx.tracer.span("indexer", job=run.job):
            if config.pool == 1:
                chosen_TK = ctx.kernels.indexer.select(q_TIX, w_TI, keys, start=start, topk=config.topk)
            else:
                chosen_TK = ctx.kernels.indexer.select_pooled(
                    q_TIX, w_TI, keys, start=start, topk=config.topk, pool=config.pool
                )
        if ctx.choices is not None:
            choice = PositionChoice(
                layer=self.index,
                run=run,
                first_row=first_row,
                chosen_TS=chosen_TK,
                query_TIX=q_TIX,
                weight_TI=w_TI,
                keys=keys,
                pool=config.pool,
            )
            chosen_TK = ctx.choices.positions(choice, ctx)
        return chosen_TK

    def _rotate(self, x_SHX: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        rope = self.config.rope
        if self.inv_freq is None or rope is None:
            return x_SHX
        first, rest = x_SHX[..., : self.config.rope_dim], x_SHX[..., self.config.rope_dim :]
        return torch.cat((rotate(first, ctx.own_positions_S, self.inv_freq, rope, ctx.kernels.rope), rest), dim=-1)
