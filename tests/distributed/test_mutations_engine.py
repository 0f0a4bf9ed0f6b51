"""The tests can fail: each fault, put into the engine alone, turns the comparison of the invariant tests red.

The reference is from the sound engine. Every case also runs without its fault first, so that red means the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from longprefill.kernels.backends import resolve
from longprefill.kernels.contracts import KdaInputs, Routing, Summary
from longprefill.kernels.paged import PagedRows
from longprefill.partition.layout import Fragment
from longprefill.workers.cache.pages import JobCache
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.model.config import KdaConfig
from longprefill.workers.model.layers import state_exchange
from longprefill.workers.model.layers.attention import AttentionLayer
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.kda import Halo, KdaLayer
from longprefill.workers.prefill import PrefillRank

from .engine_support import WHOLE, Engine, check_against_reference, hybrid, make_engine

Patch = pytest.MonkeyPatch
KERNELS = resolve("cpu")
"""The modules that the engine calls: a fault is put into them."""
LAYERS = ("kda", "dsa", "kda", "dsa")
HYBRID = make_engine(hybrid(*LAYERS))
POOLED = make_engine(hybrid(*LAYERS, index_kpool=4))
SQUARE = make_engine(hybrid(*LAYERS, linear={"value_head_dim": 16}))
ONE_KDA = make_engine(hybrid("kda", "dsa"))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken, and a run that it must show in."""

    apply: Callable[[Patch], None]
    engine: Engine = HYBRID
    lengths: tuple[int, ...] = (511,)
    step_tokens: int = WHOLE
    cp: int = 2
    fill: int = 0xFF

    def check(self) -> None:
        check_against_reference(self.engine, self.lengths, self.step_tokens, cp=self.cp, fill=self.fill)


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function by what `make` makes of it."""
    patch.setattr(owner, name, make(getattr(owner, name)))


# ---- the recurrence across fragments and steps ----------------------------------------------------------------------


def transpose_folded(patch: Patch) -> None:
    wrap(patch, state_exchange, "fold", lambda fold: lambda *args: fold(*args).transpose(1, 2).contiguous())


def reinterpret_folded(patch: Patch) -> None:
    """The bytes of [V, K] read as [K, V]."""
    wrap(
        patch, state_exchange, "fold",
        lambda fold: lambda *args: fold(*args).transpose(1, 2).reshape(fold(*args).shape),
    )  # fmt: skip


def fold_without_transition(patch: Patch) -> None:
    def fold(summaries: list[Summary], initial: torch.Tensor | None) -> torch.Tensor:
        return summaries[-1].state_GKV if initial is None else summaries[-1].state_GKV + initial

    patch.setattr(state_exchange, "fold", fold)


def double_initial_state(patch: Patch) -> None:
    wrap(patch, KERNELS.kda, "scan", lambda scan: lambda prepared, initial: scan(prepared, 2 * initial))


def boundary_state_of(ctx: StepContext, job: int) -> torch.Tensor:
    """Of the only KDA layer."""
    (state,) = ctx.jobs[job].before.kda.values()
    return state.state_GKV


def boundary_state_in_summaries(patch: Patch) -> None:
    """Middle fragments start their summary from the boundary state: it is counted once more a fragment."""
    exchange = state_exchange.EXCHANGES["all_gather"]

    def broken(config: KdaConfig, published: Mapping[Fragment, Summary], ctx: StepContext) -> Any:
        changed = dict(published)
        for fragment, summary in published.items():
            if summary.transition_GKK is not None:
                carried = torch.bmm(summary.transition_GKK, boundary_state_of(ctx, fragment.job))
                changed[fragment] = Summary(summary.state_GKV + carried, summary.transition_GKK)
        return exchange(config, changed, ctx)

    patch.setitem(state_exchange.EXCHANGES, "all_gather", broken)


def boundary_state_in_incoming(patch: Patch) -> None:
    """Added by the exchange although the first fragment's state already holds it."""
    exchange = state_exchange.EXCHANGES["all_gather"]

    def broken(config: KdaConfig, published: Mapping[Fragment, Summary], ctx: StepContext) -> Any:
        incoming = exchange(config, published, ctx)
        return {f: state + boundary_state_of(ctx, f.job) for f, state in incoming.items()}

    patch.setitem(state_exchange.EXCHANGES, "all_gather", broken)


def swap_incoming_states(patch: Patch) -> None:
    """The two fragments of a rank get each other's."""
    exchange = state_exchange.EXCHANGES["all_gather"]

    def broken(config: KdaConfig, published: Mapping[Fragment, Summary], ctx: StepContext) -> Any:
        incoming = exchange(config, published, ctx)
        return dict(zip(incoming, reversed(incoming.values()), strict=True))

    patch.setitem(state_exchange.EXCHANGES, "all_gather", broken)


def stale_state_on_other_ranks(patch: Patch) -> None:
    """The boundary state reaches its owner only."""

    def make(replicate: Callable[..., dict[int, BoundaryState]]) -> Callable[..., dict[int, BoundaryState]]:
        def broken(rank: PrefillRank, ctx: StepContext) -> dict[int, BoundaryState]:
            states = replicate(rank, ctx)
            return {
                job: state
                if ctx.layout.chain(job)[-1].rank == rank.group.rank
                else replace(ctx.jobs[job].before, position=state.position)
                for job, state in states.items()
            }

        return broken

    wrap(patch, PrefillRank, "_replicate_states", make)


# ---- the convolution's history --------------------------------------------------------------------------------------


def history_of_the_other_fragment(patch: Patch) -> None:
    wrap(patch, Halo, "history", lambda history: lambda *args: history(*args).roll(1, dims=0))


def history_backwards(patch: Patch) -> None:
    wrap(patch, Halo, "history", lambda history: lambda *args: history(*args).flip(1))


def no_history(patch: Patch) -> None:
    wrap(patch, Halo, "history", lambda history: lambda *args: torch.zeros_like(history(*args)))


def conv_tail_of_the_step_before(patch: Patch) -> None:
    wrap(patch, KdaLayer, "_keep_conv_tails", lambda keep: lambda *args: None)


# ---- gates, positions, residuals, experts ---------------------------------------------------------------------------


def future_gate(patch: Patch) -> None:
    def shifted(inputs: KdaInputs) -> KdaInputs:
        return inputs._replace(g_TGK=inputs.g_TGK.roll(-1, dims=0))

    wrap(patch, KERNELS.kda, "make_inputs", lambda make: lambda *args, **options: shifted(make(*args, **options)))


def other_pairing(patch: Patch) -> None:
    other = {"interleaved": "half", "half": "interleaved"}
    wrap(patch, KERNELS.rope, "rotate", lambda rotate: lambda x, at, freq, pairing: rotate(x, at, freq, other[pairing]))


def local_positions(patch: Patch) -> None:
    wrap(
        patch, KERNELS.rope, "rotate",
        lambda rotate: lambda x, at, freq, pairing: rotate(x, torch.arange(len(at)), freq, pairing),
    )  # fmt: skip


def normalised_values(patch: Patch) -> None:
    def make(mix: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(sources: list[torch.Tensor], query: torch.Tensor, *, eps: float) -> torch.Tensor:
            scaled = [x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() for x in sources]
            return mix(scaled, query, eps=eps)

        return broken

    wrap(patch, KERNELS.residual, "mix", make)


def biased_expert_weights(patch: Patch) -> None:
    """The right experts with wrong weights."""

    def make(route: Callable[..., Routing]) -> Callable[..., Routing]:
        def broken(logits: torch.Tensor, bias: torch.Tensor, **options: Any) -> Routing:
            routing = route(logits, bias, **options)
            return Routing(routing.expert_TA, routing.weight_TA + bias[routing.expert_TA])

        return broken

    wrap(patch, KERNELS.moe, "route", make)


def no_bias_in_the_routing(patch: Patch) -> None:
    wrap(patch, KERNELS.moe, "route", lambda route: lambda logits, bias, **options: route(logits, None, **options))


# ---- indexer, attention, caches -------------------------------------------------------------------------------------


def no_relu(patch: Patch) -> None:
    def select(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int) -> torch.Tensor:
        k_LX = keys.read(0, start + len(q_TIX), torch.float32)
        score_TL = torch.einsum("tix,lx,ti->tl", q_TIX, k_LX, w_TI)
        future_TL = torch.arange(len(k_LX)) > torch.arange(start, start + len(q_TIX))[:, None]
        return score_TL.masked_fill(future_TL, -torch.inf).topk(topk).indices.sort().values.to(torch.int32)

    patch.setattr(KERNELS.indexer, "select", select)


def no_prefix_in_the_indexer(patch: Patch) -> None:
    wrap(
        patch,
        KERNELS.indexer,
        "select",
        lambda select: lambda q, w, keys, *, start, topk: select(q, w, keys, start=0, topk=topk),
    )


def one_key_too_few(patch: Patch) -> None:
    """A query does not see its own key."""
    wrap(
        patch, KERNELS.indexer, "select",
        lambda select: lambda q, w, keys, *, start, topk: select(q, w, keys, start=start - 1, topk=topk),
    )  # fmt: skip


def no_prefix_in_dense_attention(patch: Patch) -> None:
    wrap(patch, KERNELS.mla, "dense", lambda dense: lambda *args, start, scale: dense(*args, start=0, scale=scale))


def no_tail_of_the_pool(patch: Patch) -> None:
    """The tokens of an incomplete pool are not selected."""

    def make(select: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(
            q: torch.Tensor, w: torch.Tensor, keys: PagedRows, *, start: int, topk: int, pool: int
        ) -> torch.Tensor:
            chosen_TS = select(q, w, keys, start=start, topk=topk, pool=pool)
            first_TS = (torch.arange(start + 1, start + len(q) + 1) // pool * pool)[:, None]
            return chosen_TS.masked_fill(chosen_TS >= first_TS, -1)

        return broken

    wrap(patch, KERNELS.indexer, "select_pooled", make)


def pool_starts_with_the_step(patch: Patch) -> None:
    """The keys of the incomplete pool are lost between steps."""
    wrap(
        patch, KERNELS.indexer, "pool_keys",
        lambda pool_keys: lambda key, gate, bias: pool_keys(key.roll(1, dims=0), gate.roll(1, dims=0), bias),
    )  # fmt: skip


def swapped_fragments(patch: Patch) -> None:
    """The outputs of a rank's two fragments change places."""
    wrap(patch, AttentionLayer, "forward", lambda forward: lambda *args: forward(*args).roll(128, dims=0))


def write_rows(change: Callable[[str, int, torch.Tensor], tuple[int, torch.Tensor]]) -> Callable[[Patch], None]:
    """A fault of `JobCache.write`: (kind, first row, rows) to what is written where."""

    def make(write: Callable[..., None]) -> Callable[..., None]:
        def broken(cache: JobCache, layer: int, kind: Any, first_row: int, bytes_TB: torch.Tensor) -> None:
            write(cache, layer, kind, *change(kind, first_row, bytes_TB))

        return broken

    return lambda patch: wrap(patch, JobCache, "write", make)


def keys_in_order_of_arrival(kind: str, first_row: int, bytes_TB: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Zigzag over two ranks: 0, 3 | 1, 2; the fragments behind the first shift by one place."""
    places = {0: 0, 128: 256, 256: 384, 384: 128}
    return (places.get(first_row, first_row) if kind == "index_key" else first_row), bytes_TB


def keys_one_row_late(kind: str, first_row: int, bytes_TB: torch.Tensor) -> tuple[int, torch.Tensor]:
    return first_row, bytes_TB.roll(1, dims=0) if kind == "index_key" else bytes_TB


def one_page_not_written(kind: str, first_row: int, bytes_TB: torch.Tensor) -> tuple[int, torch.Tensor]:
    """What the page held before stays."""
    return first_row, bytes_TB[:-64] if first_row == 0 else bytes_TB


def pages_in_pool_order(patch: Patch) -> None:
    """Reads ignore the page table's order."""

    def make(rows: Callable[..., PagedRows]) -> Callable[..., PagedRows]:
        def broken(cache: JobCache, layer: int, kind: Any, num_tokens: int) -> PagedRows:
            found = rows(cache, layer, kind, num_tokens)
            return replace(found, table=tuple(sorted(found.table)))

        return broken

    wrap(patch, JobCache, "rows", make)


FAULTS = {
    "transposed state in the fold, K == V": Fault(apply=transpose_folded, engine=SQUARE),
    "transposed state in the fold, K != V": Fault(apply=reinterpret_folded),
    "fold without the transition": Fault(apply=fold_without_transition),
    "initial state twice": Fault(apply=double_initial_state, step_tokens=256),
    "boundary state in the summaries too": Fault(apply=boundary_state_in_summaries, engine=ONE_KDA, step_tokens=256),
    "boundary state added to incoming states": Fault(apply=boundary_state_in_incoming, engine=ONE_KDA, step_tokens=256),
    "incoming states of two fragments swapped": Fault(apply=swap_incoming_states),
    "boundary state not replicated": Fault(apply=stale_state_on_other_ranks),
    "boundary state not replicated, steps": Fault(apply=stale_state_on_other_ranks, step_tokens=128, cp=3),
    "history of the wrong fragment": Fault(apply=history_of_the_other_fragment),
    "history backwards": Fault(apply=history_backwards),
    "no history": Fault(apply=no_history),
    "no history at steps": Fault(apply=no_history, cp=1, step_tokens=128),
    "conv tail not kept": Fault(apply=conv_tail_of_the_step_before, cp=1, step_tokens=128),
    "gate of the next token": Fault(apply=future_gate),
    "other pairs rotate": Fault(apply=other_pairing),
    "positions of the rank": Fault(apply=local_positions),
    "values normalised in the residual": Fault(apply=normalised_values),
    "bias in the experts' weights": Fault(apply=biased_expert_weights),
    "experts chosen without the bias": Fault(apply=no_bias_in_the_routing),
    "no ReLU": Fault(apply=no_relu, cp=1),
    "indexer without the prefix": Fault(apply=no_prefix_in_the_indexer),
    "indexer without the prefix, steps": Fault(apply=no_prefix_in_the_indexer, cp=1, step_tokens=128),
    "indexer without the own key": Fault(apply=one_key_too_few),
    "dense attention without the prefix": Fault(
        apply=no_prefix_in_dense_attention, engine=make_engine(hybrid("kda", "mla"))
    ),
    "no tail of the pool": Fault(apply=no_tail_of_the_pool, engine=POOLED, lengths=(510,)),
    "keys pooled with their neighbours": Fault(apply=pool_starts_with_the_step, engine=POOLED),
    "outputs of two fragments swapped": Fault(apply=swapped_fragments),
    "index keys in order of arrival": Fault(apply=write_rows(keys_in_order_of_arrival), lengths=(512,)),
    "index keys one row late": Fault(apply=write_rows(keys_one_row_late)),
    "a page not written": Fault(apply=write_rows(one_page_not_written)),
    "a page not written, old numbers in it": Fault(apply=write_rows(one_page_not_written), fill=0x3C),
    "page table ignored": Fault(apply=pages_in_pool_order),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_turns_the_comparison_red(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.check()
    fault.apply(monkeypatch)
    with pytest.raises(AssertionError, match=r"relative RMS difference|worst .* from its tie|ranks differ"):
        fault.check()
