"""Flops of one row of each part of a layer, from its shape alone: what `work` and `operations` add up over layouts."""

from __future__ import annotations

from typing import NamedTuple

from longprefill.partition.shapes import DenseShape, KdaShape, MlaShape, ModelShape, MoeShape


class MlaFlops(NamedTuple):
    """Projections of an MLA layer, flops a row. With tensor parallelism `rows` and `own_query` are for own rows."""

    rows: int
    """Latent, and index key with its pooling gate."""
    own_query: int
    """The low-rank query, and the indexer's queries and head weights."""
    query: int
    absorption: int
    """Queries into the latent space and outputs back: sparse attention only."""
    output: int
    """With the gate of gated MLA."""


class FfnFlops(NamedTuple):
    """A feed-forward, flops a row."""

    dense: int = 0
    route: int = 0
    experts: int = 0
    """With the projections of a latent mixture."""
    shared: int = 0


def residual_flops(model: ModelShape, sources: int) -> int:
    """Flops a row of mixing `sources` sources of Attention Residuals, or of one layer's two sites of hyper-connections.

    A source costs a norm's sum of squares, a logit and its share of the weighted sum: 2D each. A site of M streams: the
    norm of all of them, (2 + M) M mixing weights, the weighted sum read, the streams mixed and the output added.
    """
    streams, hidden = model.hyper_streams, model.hidden
    return sources * 6 * hidden + 4 * streams * hidden * (streams * streams + 3 * streams + 3) * (streams > 0)


def kda_row_flops(kda: KdaShape) -> tuple[int, int]:
    """(scan, summary) of one row, all value heads."""
    heads, key, value = kda.num_value_heads, kda.key_dim, kda.value_dim
    scan = heads * (6 * key * value + 2 * kda.tile * (key + value))
    return scan, heads * (4 * key * value + 4 * key * key)


def kda_projection_flops(kda: KdaShape, hidden: int) -> int:
    """All projections of one row, the conv's taps among them."""
    heads = kda.num_value_heads
    weights = hidden * kda.conv_channels
    weights += hidden * kda.gate_rank + kda.gate_rank * heads * kda.key_dim + hidden * heads
    return 2 * (weights + kda.conv_width * kda.conv_channels) + kda_output_flops(kda, hidden)


def kda_output_flops(kda: KdaShape, hidden: int) -> int:
    """The output gate and projection of one row: a part of `kda_projection_flops`."""
    value_width = kda.num_value_heads * kda.value_dim
    if kda.output_gate_rank is None:
        return 2 * (value_width * hidden + hidden * value_width)
    return 2 * (value_width * hidden + hidden * kda.output_gate_rank + kda.output_gate_rank * value_width)


def expansion_row_flops(mla: MlaShape) -> int:
    """Keys and values of one row from its latent, all heads."""
    return 2 * mla.kv_lora_rank * mla.num_heads * (mla.nope_dim + mla.value_dim)


def mla_projection_flops(mla: MlaShape, hidden: int) -> MlaFlops:
    """Projections of one row by what they are for."""
    query_width, value_width = mla.num_heads * (mla.nope_dim + mla.rope_dim), mla.num_heads * mla.value_dim
    query_input = hidden if mla.q_lora_rank is None else mla.q_lora_rank
    rows, own_query, absorption = hidden * (mla.kv_lora_rank + mla.rope_dim), 0, 0
    if mla.q_lora_rank is not None:
        own_query += hidden * mla.q_lora_rank
    if mla.indexer is not None:
        indexer = mla.indexer
        rows += hidden * indexer.head_dim * (1 + (indexer.pool > 1))
        own_query += query_input * indexer.num_heads * indexer.head_dim + hidden * indexer.num_heads
        absorption = mla.num_heads * mla.kv_lora_rank * (mla.nope_dim + mla.value_dim)
    output = value_width * hidden * (1 + mla.is_gated)
    return MlaFlops(2 * rows, 2 * own_query, 2 * query_input * query_width, 2 * absorption, 2 * output)


def ffn_flops(ffn: DenseShape | MoeShape, hidden: int) -> FfnFlops:
    """One row of a feed-forward by its parts."""
    if isinstance(ffn, DenseShape):
        return FfnFlops(dense=6 * hidden * ffn.intermediate)
    width = hidden if ffn.latent_dim is None else ffn.latent_dim
    experts = ffn.experts_per_token * 3 * width * ffn.intermediate
    if ffn.latent_dim is not None:
        experts += 2 * hidden * ffn.latent_dim
    return FfnFlops(
        route=2 * hidden * ffn.num_experts, experts=2 * experts, shared=6 * hidden * ffn.shared_intermediate
    )
