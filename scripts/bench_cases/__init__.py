"""Cases of scripts/bench_kernels by op. To add one: a function of the seed that yields `Case`s, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import indexer, kda, mla, moe, quant, residual
from .measure import Case

CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "kda_prefill": kda.prefill,
    "kda_summary": kda.summary,
    "kda_decode": kda.decode,
    "kda_inputs": kda.inputs,
    "indexer": indexer.bf16_keys,
    "indexer_mxfp8": indexer.mxfp8_keys,
    "indexer_pooled": indexer.pooled_keys,
    "indexer_decode": indexer.decode,
    "sparse_mla": mla.bf16_rows,
    "sparse_mla_fp8": mla.fp8_rows,
    "dense_mla": mla.dense,
    "mla_decode": mla.decode,
    "moe": moe.experts,
    "mxfp8_encode": quant.mxfp8_encode,
    "mxfp8_decode": quant.mxfp8_decode,
    "fp8_encode": quant.fp8_encode,
    "fp8_decode": quant.fp8_decode,
    "attn_res": residual.attn_res,
}
