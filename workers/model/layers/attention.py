"""MLA and DSA under context parallelism: every rank gathers the step's cache rows, then answers its own queries.

    T local rows, S own rows, H heads, N nope dim, P rope dim, R latent rank, V value dim, I indexer heads, X indexer
    dim, S selected

1. cache rows of the own tokens at global positions, encoded at once to the cache format;
2. one packed gather of the step's rows over the whole mesh, hidden behind the query-side projections;
3. all rows written to pages in sequence order (replicated cache);
4. own queries that see more than top-k rows select theirs; the selections are gathered inside the TP group;
5. per local fragment, with this rank's heads: queries that see at most top-k rows take the dense form, the others the
   sparse one.

Every query reads the cached row, its own included, so nothing depends on who computed a row.
Source: DeepSeek-V3.2-Exp report, sections on MLA and DSA; positions are global throughout.
"""

from __future__ import annotations

import torch

from longprefill.partition.layout import Fragment
from longprefill.workers.cache.pages import Kind
from longprefill.workers.model.config import MlaConfig
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.indexer import Indexer, num_dense_rows
from longprefill.workers.model.layers.rotation import rope_frequencies, rotate


class AttentionLayer:
    """`weights` are this layer's tensors, `mla.*` and `indexer.*` of parameters.py."""

    def __init__(self, index: int, config: MlaConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights
        kv_b_HFR = weights["mla.kv_b"].view(config.num_heads, config.nope_dim + config.value_dim, config.kv_lora_rank)
        self.w_uk_HNR = kv_b_HFR[:, : config.nope_dim]
        self.w_uv_HVR = kv_b_HFR[:, config.nope_dim :]
        self.inv_freq = rope_frequencies(config.rope, config.rope_dim)
        self.indexer = None if config.indexer is None else Indexer(index, config.indexer, weights)

    def forward(self, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [S, D] are the normed own rows; returns the mixer's output for them."""
        with ctx.tracer.span("cache_rows"):
            latent_SB = self._latent_rows(x_SD, ctx)
            keys = None if self.indexer is None else self.indexer.key_rows(x_SD, ctx)
        gather = _RowGather(self, latent_SB, keys, ctx)
        with ctx.tracer.span("query"):
            latent_q_SQ = self._query_latent(x_SD, ctx)
            query_THQ = self._queries(ctx.gather_rows(latent_q_SQ, op="tp_gather"), ctx)
            index_query = None if self.indexer is None else self.indexer.queries(x_SD, latent_q_SQ, ctx)
        with ctx.tracer.span("cache_rows.wait", "wait"):
            gather.finish()
        chosen: list[torch.Tensor] = []
        if self.indexer is not None and index_query is not None:
            chosen = self.indexer.choose(*index_query, ctx)
            if self.indexer.config.is_reused:
                ctx.selection = chosen
        elif self.config.shared_selection is not None:
            chosen = ctx.selection
        outputs = [self._attend(n, fragment, query_THQ, chosen, ctx) for n, fragment in enumerate(ctx.local)]
        width = self.config.num_heads * self.config.value_dim
        mixed_TF = torch.cat(outputs).flatten(1) if outputs else query_THQ.new_empty(0, width)
        with ctx.tracer.span("output"):
            linear = ctx.kernels.linear.linear
            if self.config.gated:
                x_TD = ctx.gather_rows(x_SD, op="tp_gather")
                mixed_TF = mixed_TF * torch.sigmoid(linear(x_TD, self.weights["mla.g_proj"]))
            mixed_TD = linear(mixed_TF, self.weights["mla.o_proj"])
        return ctx.scatter_sum(mixed_TD, op="tp_scatter_sum")

    def _latent_rows(self, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        config = self.config
        projected_SL = ctx.kernels.linear.linear(x_SD, self.weights["mla.kv_a"])
        latent_SR, k_rope_SP = projected_SL.split((config.kv_lora_rank, config.rope_dim), dim=1)
        latent_SR = ctx.kernels.norm.rms_norm(latent_SR, self.weights["mla.kv_a_norm"], config.kv_norm_eps)
        if self.inv_freq is not None and config.rope is not None:
            k_rope_SHP = k_rope_SP[:, None]
            k_rope_SHP = rotate(k_rope_SHP, ctx.own_positions_S, self.inv_freq, config.rope, ctx.kernels.rope)
            k_rope_SP = k_rope_SHP[:, 0]
        row_SL = torch.cat((latent_SR, k_rope_SP), dim=1)
        ctx.observe(self.index, "latent rows", row_SL)
        return ctx.pool.kind_of[self.index, "latent"].format.encode(row_SL)

    def _query_latent(self, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """What q_b and the indexer's wq_b read: the normed q latent, or x itself without a q latent."""
        if self.config.q_lora_rank is None:
            return x_SD
        latent_SQ = ctx.kernels.linear.linear(x_SD, self.weights["mla.q_a"])
        return ctx.kernels.norm.rms_norm(latent_SQ, self.weights["mla.q_a_norm"], self.config.q_norm_eps)

    def _queries(self, latent_q_TQ: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, H, N + P], the last P rotated."""
        config = self.config
        weight = self.weights["mla.q_proj" if config.q_lora_rank is None else "mla.q_b"]
        query_TF = ctx.kernels.linear.linear(latent_q_TQ, weight)
        query_THQ = query_TF.view(-1, config.num_heads, config.nope_dim + config.rope_dim)
        if self.inv_freq is None or config.rope is None:
            return query_THQ
        nope_THN, rope_THP = query_THQ.split((config.nope_dim, config.rope_dim), dim=-1)
        rope_THP = rotate(rope_THP, ctx.positions_T, self.inv_freq, config.rope, ctx.kernels.rope)
        return torch.cat((nope_THN, rope_THP), dim=-1)

    def _attend(
        self, n: int, fragment: Fragment, query_THQ: torch.Tensor, chosen: list[torch.Tensor], ctx: StepContext
    ) -> torch.Tensor:
        """Attention output [fragment rows, H, V] before o_proj. `chosen[n]`: what the rows after the dense ones
        selected."""
        query_THQ = query_THQ[ctx.offsets[n] : ctx.offsets[n + 1]]
        latents = ctx.jobs[fragment.job].cache.rows(self.index, "latent", fragment.end)
        topk = None if self.config.selection is None else self.config.selection.topk
        num_dense = num_dense_rows(fragment, topk)
        parts: list[torch.Tensor] = []
        if num_dense:
            with ctx.tracer.span("attention.dense", job=fragment.job):
                dense_THV = ctx.kernels.mla.dense(
                    query_THQ[:num_dense],
                    latents,
                    self.w_uk_HNR,
                    self.w_uv_HVR,
                    start=fragment.start,
                    scale=self.config.scale,
                )
            parts.append(dense_THV)
        if num_dense < fragment.length:
            with ctx.tracer.span("attention.sparse", job=fragment.job):
                sparse_THV = ctx.kernels.mla.selected(
                    query_THQ[num_dense:],
                    latents,
                    chosen[n],
                    self.w_uk_HNR,
                    self.w_uv_HVR,
                    start=fragment.start + num_dense,
                    scale=self.config.scale,
                )
            parts.append(sparse_THV)
        return torch.cat(parts)


class _RowGather:
    """The packed exchange of one layer's cache rows: started at once, written to pages by `finish`.

    A rank's message is, run by run, its latent rows and then its index key rows, as bytes.
    """

    def __init__(
        self, layer: AttentionLayer, latent_SB: torch.Tensor, keys: list[torch.Tensor] | None, ctx: StepContext
    ) -> None:
        self.layer = layer
        self.ctx = ctx
        parts: list[torch.Tensor] = []
        for n in range(len(ctx.runs)):
            parts.append(latent_SB[ctx.run_offsets[n] : ctx.run_offsets[n + 1]].reshape(-1))
            if keys is not None:
                parts.append(keys[n].reshape(-1))
        local_B = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        counts = [
            sum(size for run in ctx.shards.runs(rank) for *_, size in self._regions(run))
            for rank in range(ctx.shards.num_world)
        ]
        self.pending = ctx.mesh.world.start_all_gather_rows(local_B, counts, op="cache_rows")

    def _regions(self, run: Fragment) -> list[tuple[Kind, int, int, int, int]]:
        """(kind, first cache row, rows, row bytes, bytes) of a run, in message order."""
        kinds: tuple[Kind, ...] = ("latent",) if self.layer.indexer is None else ("latent", "index_key")
        regions: list[tuple[Kind, int, int, int, int]] = []
        for kind in kinds:
            geometry = self.ctx.pool.kind_of[self.layer.index, kind]
            first, last = geometry.num_rows(run.start), geometry.num_rows(run.end)
            row_bytes = geometry.format.row_bytes
            regions.append((kind, first, last - first, row_bytes, (last - first) * row_bytes))
        return regions

    def finish(self) -> None:
        """Waits for all rows and writes them to the jobs' pages."""
        gathered_B = self.pending.wait()
        offset = 0
        for rank in range(self.ctx.shards.num_world):
            for run in self.ctx.shards.runs(rank):
                cache = self.ctx.jobs[run.job].cache
                for kind, first, num_rows, row_bytes, size in self._regions(run):
                    rows_TB = gathered_B[offset : offset + size].view(num_rows, row_bytes)
                    cache.write(self.layer.index, kind, first, rows_TB)
                    offset += size
