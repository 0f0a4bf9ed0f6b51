"""Cases of scripts/bench_kernels by op. To add one: a function of the seed that yields `Case`s, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import kda, residual
from .measure import Case

CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "kda_prefill": kda.prefill,
    "kda_summary": kda.summary,
    "kda_decode": kda.decode,
    "attn_res": residual.attn_res,
}
