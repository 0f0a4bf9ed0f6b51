"""Faults that are put into one layer of the engine while it runs over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from longprefill.kernels.backends import resolve
from longprefill.kernels.contracts import KdaInputs, Routing
from longprefill.kernels.paged import PagedRows
from longprefill.orchestrator.align.compare import first_deviation
from longprefill.workers.cache.pages import JobCache
from longprefill.workers.model.layers import state_exchange
from longprefill.workers.model.layers.attention import AttentionLayer
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.indexer import Indexer
from longprefill.workers.model.layers.kda import Halo, KdaLayer
from longprefill.workers.model.layers.rotation import rotate

from .engine_support import WHOLE
from .mesh_support import Mesh, Whole, mesh_config, rows_of, whole_model

Patch = pytest.MonkeyPatch
Make = Callable[[Callable[..., Any]], Callable[..., Any]]
KERNELS = resolve("cpu")
"""The modules that the engine calls: a fault is put into them."""
LENGTH = 300
# layers: 0 kda + dense, 1 dsa + moe, 2 kda + moe, 3 dsa + moe
WHOLE_MODEL = whole_model(mesh_config())
MESH = Mesh(cp=2, tp=2, ep=True)


def wrap(patch: Patch, owner: Any, name: str, make: Make) -> None:
    """Replaces a function by what `make` makes of it."""
    patch.setattr(owner, name, make(getattr(owner, name)))


class OnlyIn:
    """Which layer each rank's thread is in, so that a fault shows in one layer only."""

    def __init__(self, patch: Patch, layer: int) -> None:
        self.patch = patch
        self.layer = layer
        self.now = threading.local()
        for owner in (KdaLayer, AttentionLayer):
            wrap(patch, owner, "forward", self._tracked)

    def _tracked(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def tracked(layer: Any, *args: Any) -> Any:
            self.now.index = layer.index
            return forward(layer, *args)

        return tracked

    def wrap(self, owner: Any, name: str, make: Make) -> None:
        sound = getattr(owner, name)
        broken = make(sound)

        def chosen(*args: Any, **options: Any) -> Any:
            is_here = getattr(self.now, "index", None) == self.layer
            return (broken if is_here else sound)(*args, **options)

        self.patch.setattr(owner, name, chosen)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in one layer, and where the comparison must find it."""

    place: str
    layer: int
    apply: Callable[[OnlyIn], None]
    whole: Whole = WHOLE_MODEL
    mesh: Mesh = MESH
    step_tokens: int = WHOLE

    def deviation(self) -> str | None:
        return first_deviation(rows_of(self.whole, [LENGTH], self.step_tokens, self.mesh))


# ---- the recurrence -------------------------------------------------------------------------------------------------


def transposed_state(only: OnlyIn) -> None:
    only.wrap(
        state_exchange, "fold",
        lambda fold: lambda *args: fold(*args).transpose(1, 2).reshape(fold(*args).shape).contiguous(),
    )  # fmt: skip


def fold_without_transition(only: OnlyIn) -> None:
    def make(fold: Callable[..., Any]) -> Callable[..., Any]:
        return lambda summaries, initial: summaries[-1].state_GKV + (0 if initial is None else initial)

    only.wrap(state_exchange, "fold", make)


def doubled_boundary_state(only: OnlyIn) -> None:
    only.wrap(KERNELS.kda, "scan", lambda scan: lambda prepared, initial: scan(prepared, 2 * initial))


def history_of_the_other_fragment(only: OnlyIn) -> None:
    only.wrap(Halo, "history", lambda history: lambda *args: history(*args).roll(1, dims=0))


def future_gate(only: OnlyIn) -> None:
    def shifted(inputs: KdaInputs) -> KdaInputs:
        return inputs._replace(g_TGK=inputs.g_TGK.roll(-1, dims=0))

    only.wrap(KERNELS.kda, "make_inputs", lambda make: lambda *args, **options: shifted(make(*args, **options)))


def gates_of_other_heads(only: OnlyIn) -> None:
    only.wrap(
        KERNELS.kda, "make_inputs",
        lambda make: lambda *args, a_log_G, **options: make(*args, a_log_G=a_log_G.roll(1, dims=0), **options),
    )  # fmt: skip


def conv_tail_of_the_step_before(only: OnlyIn) -> None:
    only.wrap(KdaLayer, "_keep_conv_tails", lambda keep: lambda *args: None)


# ---- indexer and attention ------------------------------------------------------------------------------------------


def other_pairing(only: OnlyIn) -> None:
    other = {"interleaved": "half", "half": "interleaved"}
    only.wrap(
        KERNELS.rope, "rotate", lambda rotate: lambda x, at, freq, pairing: rotate(x, at, freq, other[pairing])
    )  # fmt: skip


def indexer_pairing(only: OnlyIn) -> None:
    """In the indexer alone."""

    def make(_: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(self: Indexer, x_SHX: torch.Tensor, ctx: StepContext) -> torch.Tensor:
            assert self.config.rope is not None
            assert self.inv_freq is not None
            first, rest = x_SHX[..., : self.config.rope_dim], x_SHX[..., self.config.rope_dim :]
            rope = replace(self.config.rope, pairing="interleaved")
            assert rope != self.config.rope
            turned = rotate(first, ctx.own_positions_S, self.inv_freq, rope, ctx.kernels.rope)
            return torch.cat((turned, rest), dim=-1)

        return broken

    only.wrap(Indexer, "_rotate", make)


def rotation_of_the_last_dims(only: OnlyIn) -> None:
    def make(rotate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda self, x, ctx: rotate(self, x.flip(-1), ctx).flip(-1)

    only.wrap(Indexer, "_rotate", make)


def no_bias_of_the_key_norm(only: OnlyIn) -> None:
    only.wrap(
        KERNELS.norm, "layer_norm", lambda norm: lambda x, weight, bias, eps: norm(x, weight, 0 * bias, eps)
    )  # fmt: skip


def no_relu(only: OnlyIn) -> None:
    def select(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int) -> torch.Tensor:
        k_LX = keys.read(0, start + len(q_TIX), torch.float32)
        score_TL = torch.einsum("tix,lx,ti->tl", q_TIX, k_LX, w_TI)
        future_TL = torch.arange(len(k_LX)) > torch.arange(start, start + len(q_TIX))[:, None]
        return score_TL.masked_fill(future_TL, -torch.inf).topk(topk).indices.sort().values.to(torch.int32)

    only.wrap(KERNELS.indexer, "select", lambda _: select)


def shifted_start(shift: Callable[[int], int]) -> Callable[[OnlyIn], None]:
    """Rows before the queries' own are miscounted."""

    def make(select: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda q, w, keys, *, start, topk: select(q, w, keys, start=shift(start), topk=topk)

    return lambda only: only.wrap(KERNELS.indexer, "select", make)


def scale_of_the_latent(only: OnlyIn) -> None:
    """(r + d_r)^-1/2, what the absorbed form's width suggests."""
    only.wrap(
        KERNELS.mla, "sparse",
        lambda sparse: lambda query, *args, scale, latent_rank: sparse(
            query, *args, scale=query.shape[-1] ** -0.5, latent_rank=latent_rank
        ),
    )  # fmt: skip


def index_rows_of_another_rank(only: OnlyIn) -> None:
    """The second half of the queries takes the selections of the first: attention would refuse rows that come later."""

    def shifted(chosen_TS: torch.Tensor) -> torch.Tensor:
        half = len(chosen_TS) // 2
        return torch.cat((chosen_TS[: len(chosen_TS) - half], chosen_TS[:half]))

    def make(choose: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
        return lambda *args: [shifted(chosen_TS) for chosen_TS in choose(*args)]

    only.wrap(Indexer, "choose", make)


def keys_one_row_late(only: OnlyIn) -> None:
    def make(write: Callable[..., None]) -> Callable[..., None]:
        def broken(cache: JobCache, layer: int, kind: Any, first_row: int, bytes_TB: torch.Tensor) -> None:
            write(cache, layer, kind, first_row, bytes_TB.roll(1, dims=0) if kind == "index_key" else bytes_TB)

        return broken

    only.wrap(JobCache, "write", make)


def latents_differ_on_one_rank(only: OnlyIn) -> None:
    """Only what rank 3 keeps is wrong, and nothing that it computed itself from it."""

    def make(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(layer: AttentionLayer, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
            out = forward(layer, x_SD, ctx)
            if ctx.mesh.world.rank == 3:
                rows = ctx.jobs[0].cache.rows(layer.index, "latent", 1).read_bytes(0, 1)
                ctx.jobs[0].cache.write(layer.index, "latent", 0, rows + 1)
            return out

        return broken

    wrap(only.patch, AttentionLayer, "forward", lambda forward: _in_layer(only.layer, forward, make(forward)))


def _in_layer(index: int, sound: Callable[..., Any], broken: Callable[..., Any]) -> Callable[..., Any]:
    return lambda layer, *args: (broken if layer.index == index else sound)(layer, *args)


# ---- feed-forward and the mesh --------------------------------------------------------------------------------------


def partial_sums_not_summed(only: OnlyIn) -> None:
    """Every rank keeps its own part."""

    def make(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(ctx: StepContext, partial_TX: torch.Tensor, *, op: str) -> torch.Tensor:
            scatter(ctx, partial_TX, op=op)
            return partial_TX[ctx._own_rows[ctx.mesh.tp.rank]]

        return broken

    only.wrap(StepContext, "scatter_sum", make)


def shard_order_swapped(only: OnlyIn) -> None:
    """Gathered rows stay in rank order."""

    def make(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(ctx: StepContext, own_SX: torch.Tensor, *, op: str) -> torch.Tensor:
            return gather(ctx, own_SX, op=op)[torch.cat(ctx._own_rows)]

        return broken

    only.wrap(StepContext, "gather_rows", make)


def wrong_expert_offset(only: OnlyIn) -> None:
    """Local expert numbers that start one too late."""

    def make(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, *args: Any, **options: Any) -> Any:
            num_local = max(gate_up.shape[0], 1)
            moved = torch.where(routing.expert_TA < 0, -1, (routing.expert_TA + 1) % num_local)
            return compute(x, Routing(moved, routing.weight_TA), gate_up, *args, **options)

        return broken

    only.wrap(KERNELS.moe, "experts", make)


def biased_expert_weights(only: OnlyIn) -> None:
    def make(route: Callable[..., Routing]) -> Callable[..., Routing]:
        def broken(logits: torch.Tensor, bias: torch.Tensor, **options: Any) -> Routing:
            routing = route(logits, bias, **options)
            return Routing(routing.expert_TA, routing.weight_TA + bias[routing.expert_TA])

        return broken

    only.wrap(KERNELS.moe, "route", make)


def experts_chosen_without_the_bias(only: OnlyIn) -> None:
    only.wrap(KERNELS.moe, "route", lambda route: lambda logits, bias, **options: route(logits, None, **options))


FAULTS = {
    "transposed state": Fault(place="layer 2 (kda) state", layer=2, apply=transposed_state),
    "fold without the transition": Fault(place="layer 2 (kda) state", layer=2, apply=fold_without_transition),
    "boundary state twice": Fault(
        place="layer 2 (kda) state", layer=2, apply=doubled_boundary_state, mesh=Mesh(tp=2), step_tokens=128
    ),
    "history of the other fragment": Fault(place="layer 2 (kda) state", layer=2, apply=history_of_the_other_fragment),
    "gate of the next token": Fault(place="layer 0 (kda) state", layer=0, apply=future_gate),
    "gates of other heads": Fault(place="layer 2 (kda) state", layer=2, apply=gates_of_other_heads),
    "conv tail not kept": Fault(
        place="layer 2 (kda) conv", layer=2, apply=conv_tail_of_the_step_before, mesh=Mesh(tp=2), step_tokens=128
    ),
    "other pairs rotate": Fault(place="layer 1 (dsa) latent", layer=1, apply=other_pairing),
    "other pairs rotate in the indexer": Fault(place="layer 3 (dsa) index key", layer=3, apply=indexer_pairing),
    "last dims rotate in the indexer": Fault(place="layer 3 (dsa) index key", layer=3, apply=rotation_of_the_last_dims),
    "no bias in the key's norm": Fault(place="layer 1 (dsa) index key", layer=1, apply=no_bias_of_the_key_norm),
    "no ReLU": Fault(place="layer 3 (dsa) index choices", layer=3, apply=no_relu),
    "prefix omitted": Fault(
        place="layer 3 (dsa) index choices", layer=3, apply=shifted_start(lambda start: 0), step_tokens=128
    ),
    "own key not seen": Fault(
        place="layer 1 (dsa) index choices", layer=1, apply=shifted_start(lambda start: start - 1)
    ),
    "tail sees what the head sees": Fault(
        place="layer 3 (dsa) index choices", layer=3, apply=shifted_start(lambda start: start % 128)
    ),
    "scale of the latent": Fault(place="layer 3 (dsa) mixer output", layer=3, apply=scale_of_the_latent),
    "index rows of another rank": Fault(
        place="layer 1 (dsa) mixer output", layer=1, apply=index_rows_of_another_rank
    ),
    "keys one row late": Fault(place="layer 3 (dsa) index key", layer=3, apply=keys_one_row_late),
    "another page on one rank": Fault(place="layer 1 (dsa) latent", layer=1, apply=latents_differ_on_one_rank),
    "partial sums not summed, kda": Fault(place="layer 2 (kda) mixer output", layer=2, apply=partial_sums_not_summed),
    "partial sums not summed, dsa": Fault(place="layer 3 (dsa) mixer output", layer=3, apply=partial_sums_not_summed),
    "shard order swapped": Fault(place="layer 2 (kda) conv", layer=2, apply=shard_order_swapped),
    "wrong expert offset": Fault(place="layer 1 (dsa) feed-forward output", layer=1, apply=wrong_expert_offset),
    "bias in the experts' weights": Fault(
        place="layer 2 (kda) feed-forward output", layer=2, apply=biased_expert_weights
    ),
    "experts chosen without the bias": Fault(
        place="layer 2 (kda) expert choices", layer=2, apply=experts_chosen_without_the_bias
    ),
}  # fmt: skip
