"""How the fragments of a chain learn the KDA state they start from: `S_out = M S_in + E` composed in sequence order.

    G local value heads, K key dim, V value dim

Fragment 0 of a chain knows its incoming state (the boundary state) and publishes its true final state; fragments in the
middle publish [E | M]; the last one publishes nothing. An exchange gives every local fragment but the first its
incoming
state. The step plan names the exchange; all give one result. Here: `all_gather`, where each rank folds what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from longprefill.kernels.contracts import Summary
from longprefill.kernels.kda.algebra import fold
from longprefill.partition.layout import Fragment, Layout
from longprefill.workers.model.config import KdaConfig
from longprefill.workers.model.layers.context import StepContext


class StateExchange(Protocol):
    def __call__(
        self, config: KdaConfig, published: Mapping[Fragment, Summary], ctx: StepContext
    ) -> dict[Fragment, torch.Tensor]:
        """From what this rank's fragments publish to the incoming state [G, K, V] of each local fragment with order >
        0. Every rank of the group calls it once a KDA layer, ranks without fragments too."""
        ...


def publishes(layout: Layout, fragment: Fragment) -> bool:
    """Whether a later fragment of the chain needs this one."""
    return fragment != layout.chain(fragment.job)[-1]


def all_gather(
    config: KdaConfig, published: Mapping[Fragment, Summary], ctx: StepContext
) -> dict[Fragment, torch.Tensor]:
    """Every rank receives all summaries and folds them in sequence order."""
    layout = ctx.layout
    state_size = config.num_value_heads * config.key_dim * config.value_dim
    transition_size = config.num_value_heads * config.key_dim * config.key_dim

    def size(fragment: Fragment) -> int:
        return state_size if fragment.order == 0 else state_size + transition_size

    senders = [[f for f in layout.local(rank) if publishes(layout, f)] for rank in range(layout.num_ranks)]
    counts = [sum(size(fragment) for fragment in fragments) for fragments in senders]
    if not any(counts):
        return {}
    parts: list[torch.Tensor] = []
    for fragment in senders[ctx.mesh.cp.rank]:
        summary = published[fragment]
        parts.append(summary.state_GKV.reshape(-1))
        if fragment.order > 0:
            transition = summary.transition_GKK
            parts.append(summary.state_GKV.new_zeros(transition_size) if transition is None else transition.reshape(-1))
    local = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32)
    with ctx.tracer.span("kda.summaries", "collective"):
        gathered = ctx.mesh.cp.all_gather_rows(local, counts, op="kda_summaries")

    received: dict[Fragment, Summary] = {}
    offset = 0
    shape_E = (config.num_value_heads, config.key_dim, config.value_dim)
    shape_M = (config.num_value_heads, config.key_dim, config.key_dim)
    for fragments in senders:
        for fragment in fragments:
            state = gathered[offset : offset + state_size].view(shape_E)
            transition = None
            if fragment.order > 0:
                transition = gathered[offset + state_size : offset + state_size + transition_size].view(shape_M)
            received[fragment] = Summary(state, transition)
            offset += size(fragment)
    return _fold_chains(received, ctx)


def _fold_chains(received: Mapping[Fragment, Summary], ctx: StepContext) -> dict[Fragment, torch.Tensor]:
    incoming: dict[Fragment, torch.Tensor] = {}
    for job in dict.fromkeys(fragment.job for fragment in ctx.local if fragment.order > 0):
        last_needed = max(fragment.order for fragment in ctx.local if fragment.job == job)
        state: torch.Tensor | None = None
        for fragment in ctx.layout.chain(job)[: last_needed + 1]:
            if fragment.order > 0 and fragment.rank == ctx.mesh.cp.rank:
                assert state is not None
                incoming[fragment] = state
            if fragment.order < last_needed:
                state = fold((received[fragment],), state)
    return incoming


EXCHANGES: dict[str, StateExchange] = {"all_gather": all_gather}
