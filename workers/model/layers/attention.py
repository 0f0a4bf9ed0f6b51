"""MLA and DSA under context parallelism: every rank gathers the step's cache rows, then answers its own queries.

    T local rows, H heads, N nope dim, P rope dim, R latent rank, V value dim, I indexer heads, X indexer dim, S
    selected

1. cache rows of the local tokens at global positions, encoded at once to the cache format;
2. one packed gather of the step's rows, hidden behind the query-side projections;
3. all rows written to pages in sequence order (replicated cache);
4. per local fragment: queries that see at most top-k rows take the dense form, the others index, select and attend.

Every query reads the cached row, its own included, so nothing depends on who computed a row.
Source: DeepSeek-V3.2-Exp report, sections on MLA and DSA; positions are global throughout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longprefill.kernels.rope.frequencies import inverse_frequencies
from longprefill.partition.layout import Fragment
from longprefill.workers.cache.pages import Kind
from longprefill.workers.cache.states import PoolTail
from longprefill.workers.model.config import IndexerConfig, MlaConfig, RopeConfig
from longprefill.workers.model.layers.context import StepContext


class AttentionLayer:
    """`weights` are this layer's tensors, `mla.*` and `indexer.*` of parameters.py."""

    def __init__(self, index: int, config: MlaConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights
        kv_b_HFR = weights["mla.kv_b"].view(config.num_heads, config.nope_dim + config.value_dim, config.kv_lora_rank)
        self.w_uk_HNR = kv_b_HFR[:, : config.nope_dim]
        self.w_uv_HVR = kv_b_HFR[:, config.nope_dim :]
        self.inv_freq = _frequencies(config.rope, config.rope_dim)
        self.indexer = None if config.indexer is None else Indexer(index, config.indexer, weights)

    def forward(self, x_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x is normed; returns the mixer's output [T, D]."""
        with ctx.tracer.span("cache_rows"):
            latent_TB = self._latent_rows(x_TD, ctx)
            keys = None if self.indexer is None else self.indexer.key_rows(x_TD, ctx)
        gather = _RowGather(self, latent_TB, keys, ctx)
        with ctx.tracer.span("query"):
            latent_q_TQ = self._query_latent(x_TD, ctx)
            query_THQ = self._queries(latent_q_TQ, ctx)
            index_query = None if self.indexer is None else self.indexer.queries(x_TD, latent_q_TQ, ctx)
        with ctx.tracer.span("cache_rows.wait", "wait"):
            gather.finish()
        outputs = [self._attend(n, fragment, query_THQ, index_query, ctx) for n, fragment in enumerate(ctx.local)]
        mixed_TF = (
            torch.cat(outputs).flatten(1) if outputs else query_THQ.new_empty(0, self.weights["mla.o_proj"].shape[1])
        )
        with ctx.tracer.span("output"):
            if self.config.gated:
                mixed_TF = mixed_TF * torch.sigmoid(F.linear(x_TD, self.weights["mla.g_proj"]))
            return F.linear(mixed_TF, self.weights["mla.o_proj"])

    def _latent_rows(self, x_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        config = self.config
        projected_TW = F.linear(x_TD, self.weights["mla.kv_a"])
        latent_TR = ctx.kernels.norm.rms_norm(
            projected_TW[:, : config.kv_lora_rank], self.weights["mla.kv_a_norm"], config.kv_norm_eps
        )
        k_rope_TP = projected_TW[:, config.kv_lora_rank :]
        if self.inv_freq is not None and config.rope is not None:
            k_rope_TP = ctx.kernels.rope.rotate(
                k_rope_TP[:, None], ctx.positions_T, self.inv_freq, config.rope.pairing
            )[:, 0]
        row_format = ctx.pool.kind_of[self.index, "latent"].format
        return row_format.encode(torch.cat((latent_TR, k_rope_TP), dim=1))

    def _query_latent(self, x_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """What q_b and the indexer's wq_b read: the normed q latent, or x itself without a q latent."""
        if self.config.q_lora_rank is None:
            return x_TD
        return ctx.kernels.norm.rms_norm(
            F.linear(x_TD, self.weights["mla.q_a"]), self.weights["mla.q_a_norm"], self.config.q_norm_eps
        )

    def _queries(self, latent_q_TQ: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, H, N + P], the last P rotated."""
        config = self.config
        weight = self.weights["mla.q_proj" if config.q_lora_rank is None else "mla.q_b"]
        query_THQ = F.linear(latent_q_TQ, weight).view(-1, config.num_heads, config.nope_dim + config.rope_dim)
        if self.inv_freq is None or config.rope is None:
            return query_THQ
        nope, rope = query_THQ[..., : config.nope_dim], query_THQ[..., config.nope_dim :]
        return torch.cat(
            (nope, ctx.kernels.rope.rotate(rope, ctx.positions_T, self.inv_freq, config.rope.pairing)), dim=-1
        )

    def _attend(
        self,
        n: int,
        fragment: Fragment,
        query_THQ: torch.Tensor,
        index_query: tuple[torch.Tensor, torch.Tensor] | None,
        ctx: StepContext,
    ) -> torch.Tensor:
        """Attention output [fragment rows, H, V] before o_proj."""
        rows = slice(ctx.offsets[n], ctx.offsets[n + 1])
        query_THQ = query_THQ[rows]
        cache = ctx.jobs[fragment.job].cache
        latents = cache.rows(self.index, "latent", fragment.end)
        num_dense = fragment.length
        if self.indexer is not None:
            num_dense = min(max(self.indexer.config.topk - fragment.start, 0), fragment.length)
        parts: list[torch.Tensor] = []
        if num_dense:
            with ctx.tracer.span("attention.dense", job=fragment.job):
                parts.append(
                    ctx.kernels.mla.dense(
                        query_THQ[:num_dense],
                        latents,
                        self.w_uk_HNR,
                        self.w_uv_HVR,
                        start=fragment.start,
                        scale=self.config.scale,
                    )
                )
        if num_dense < fragment.length:
            assert self.indexer is not None and index_query is not None
            q_TIX, w_TI = (tensor[rows][num_dense:] for tensor in index_query)
            chosen_TS = self.indexer.select(fragment, num_dense, q_TIX, w_TI, ctx)
            with ctx.tracer.span("attention.sparse", job=fragment.job):
                parts.append(self._sparse(query_THQ[num_dense:], chosen_TS, latents, ctx))
        return torch.cat(parts)

    def _sparse(self, query_THQ: torch.Tensor, chosen_TS: torch.Tensor, latents, ctx: StepContext) -> torch.Tensor:
        config = self.config
        nope_HTN = query_THQ[..., : config.nope_dim].transpose(0, 1)
        absorbed_THR = torch.bmm(nope_HTN, self.w_uk_HNR).transpose(0, 1)
        query_THL = torch.cat((absorbed_THR, query_THQ[..., config.nope_dim :]), dim=-1)
        latent_THR = ctx.kernels.mla.sparse(
            query_THL, latents, chosen_TS, scale=config.scale, latent_rank=config.kv_lora_rank
        )
        return torch.bmm(latent_THR.transpose(0, 1), self.w_uv_HVR.transpose(1, 2)).transpose(0, 1)


class Indexer:
    """The lightning indexer of one DSA layer: its cache rows, its queries and its choice."""

    def __init__(self, index: int, config: IndexerConfig, weights: dict[str, torch.Tensor]) -> None:
        self.index = index
        self.config = config
        self.weights = weights
        self.inv_freq = _frequencies(config.rope, config.rope_dim)

    def key_rows(self, x_TD: torch.Tensor, ctx: StepContext) -> list[torch.Tensor]:
        """Encoded key rows of each local fragment: one a token, or one a pool that the fragment completes."""
        weights = self.weights
        key_TX = ctx.kernels.norm.layer_norm(
            F.linear(x_TD, weights["indexer.wk"]),
            weights["indexer.k_norm.weight"],
            weights["indexer.k_norm.bias"],
            self.config.norm_eps,
        )
        key_TX = self._rotate(key_TX[:, None], ctx)[:, 0]
        if self.config.pool == 1:
            row_format = ctx.pool.kind_of[self.index, "index_key"].format
            return list(row_format.encode(key_TX).split([fragment.length for fragment in ctx.local]))
        gate_TX = F.linear(x_TD, weights["indexer.pool_gate"])
        return [self._pooled_rows(n, fragment, key_TX, gate_TX, ctx) for n, fragment in enumerate(ctx.local)]

    def _pooled_rows(
        self, n: int, fragment: Fragment, key_TX: torch.Tensor, gate_TX: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        rows = slice(ctx.offsets[n], ctx.offsets[n + 1])
        key_TX, gate_TX = key_TX[rows].float(), gate_TX[rows].float()
        if ctx.unpooled_keys is not None:
            ctx.unpooled_keys.setdefault(self.index, []).append((fragment.job, fragment.start, key_TX.clone()))
        job = ctx.jobs[fragment.job]
        if fragment.order == 0:
            # cuts lie on pages and pools divide pages, so only a step's ragged start continues a pool
            tail = job.before.pool_tails[self.index]
            key_TX, gate_TX = torch.cat((tail.key_nX, key_TX)), torch.cat((tail.gate_nX, gate_TX))
        complete = key_TX.shape[0] // self.config.pool * self.config.pool
        if ctx.is_last(fragment):
            job.after.pool_tails[self.index] = PoolTail(
                key_nX=key_TX[complete:].clone(), gate_nX=gate_TX[complete:].clone()
            )
        pooled = ctx.kernels.indexer.pool_keys(key_TX[:complete], gate_TX[:complete], self.weights["indexer.pool_bias"])
        return ctx.pool.kind_of[self.index, "index_key"].format.encode(pooled)

    def queries(
        self, x_TD: torch.Tensor, latent_q_TQ: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(q [T, I, X], head weights fp32 [T, I], which hold both scale factors)."""
        config = self.config
        query_TIX = F.linear(latent_q_TQ, self.weights["indexer.wq_b"]).view(-1, config.num_heads, config.head_dim)
        weight_TI = F.linear(x_TD.float(), self.weights["indexer.weights_proj"].float())
        return self._rotate(query_TIX, ctx), weight_TI * (config.num_heads * config.head_dim) ** -0.5

    def select(
        self, fragment: Fragment, first_row: int, q_TIX: torch.Tensor, w_TI: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        """Positions of the rows that the fragment's rows first_row, ... attend to: int32 [T, S], then -1."""
        config = self.config
        start = fragment.start + first_row
        keys = ctx.jobs[fragment.job].cache.rows(self.index, "index_key", fragment.end)
        with ctx.tracer.span("indexer", job=fragment.job):
            if config.pool == 1:
                chosen_TS = ctx.kernels.indexer.select(q_TIX, w_TI, keys, start=start, topk=config.topk)
            else:
                chosen_TS = ctx.kernels.indexer.select_pooled(
                    q_TIX, w_TI, keys, start=start, topk=config.topk, pool=config.pool
                )
        if ctx.choices is not None:
            chosen_TS = ctx.choices.positions(
                self.index, fragment, first_row, chosen_TS, q_TIX, w_TI, keys, config.pool, ctx
            )
        return chosen_TS

    def _rotate(self, x_THX: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        rope = self.config.rope
        if self.inv_freq is None or rope is None:
            return x_THX
        first, rest = x_THX[..., : self.config.rope_dim], x_THX[..., self.config.rope_dim :]
        return torch.cat((ctx.kernels.rope.rotate(first, ctx.positions_T, self.inv_freq, rope.pairing), rest), dim=-1)


class _RowGather:
    """The packed exchange of one layer's cache rows: started at once, written to pages by `finish`.

    A rank's message is, fragment by fragment, its latent rows and then its index key rows, as bytes.
    """

    def __init__(
        self, layer: AttentionLayer, latent_TB: torch.Tensor, keys: list[torch.Tensor] | None, ctx: StepContext
    ) -> None:
        self.layer = layer
        self.ctx = ctx
        parts: list[torch.Tensor] = []
        for n in range(len(ctx.local)):
            parts.append(latent_TB[ctx.offsets[n] : ctx.offsets[n + 1]].reshape(-1))
            if keys is not None:
                parts.append(keys[n].reshape(-1))
        local = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        counts = [
            sum(size for fragment in ctx.layout.local(rank) for *_, size in self._regions(fragment))
            for rank in range(ctx.layout.num_ranks)
        ]
        self.pending = ctx.group.start_all_gather_rows(local, counts, op="cache_rows")

    def _regions(self, fragment: Fragment) -> list[tuple[Kind, int, int, int, int]]:
        """(kind, first cache row, rows, row bytes, bytes) of a fragment, in message order."""
        kinds: tuple[Kind, ...] = ("latent",) if self.layer.indexer is None else ("latent", "index_key")
        regions: list[tuple[Kind, int, int, int, int]] = []
        for kind in kinds:
            geometry = self.ctx.pool.kind_of[self.layer.index, kind]
            first, last = geometry.num_rows(fragment.start), geometry.num_rows(fragment.end)
            row_bytes = geometry.format.row_bytes
            regions.append((kind, first, last - first, row_bytes, (last - first) * row_bytes))
        return regions

    def finish(self) -> None:
        gathered = self.pending.wait()
        offset = 0
        for rank in range(self.ctx.layout.num_ranks):
            for fragment in self.ctx.layout.local(rank):
                cache = self.ctx.jobs[fragment.job].cache
                for kind, first, num_rows, row_bytes, size in self._regions(fragment):
                    cache.write(
                        self.layer.index, kind, first, gathered[offset : offset + size].view(num_rows, row_bytes)
                    )
                    offset += size


def _frequencies(rope: RopeConfig | None, dim: int) -> torch.Tensor | None:
    if rope is None or dim == 0:
        return None
    return torch.tensor(inverse_frequencies(rope.theta, dim, rope.inv_freq_scale), dtype=torch.float64)
