"""What the trained model answers proves the engine: the same under every mesh, step size and resume, nearly the same
with quantized caches; wrong as soon as a state is lost at a cut or a key lies under another position.

Faults are put into the engine alone. What counts is what they do to questions that the sound engine answers right.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from longprefill.kernels.contracts import Summary
from longprefill.orchestrator.needle.documents import Document, Wanted, spread, write_document
from longprefill.orchestrator.needle.words import Phrasing
from longprefill.partition.generators import generate
from longprefill.partition.layout import PAGE_TOKENS, Fragment, Slice
from longprefill.workers.cache.states import BoundaryState, KdaState
from longprefill.workers.model.config import KdaConfig
from longprefill.workers.model.layers import state_exchange
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.indexer import Indexer
from longprefill.workers.prefill import PrefillRank

from .engine_support import WHOLE
from .needle_support import Part, ask, count, read, right, trained

Patch = pytest.MonkeyPatch
LENGTH = 4096
KNOWN = 0.75
"""Share of questions of each kind that the sound engine answers right, at least."""
GAP = 48


@functools.cache
def everyday() -> Document:
    """Facts anywhere, and names that are not there."""
    wanted = spread(10, LENGTH, (32, 96), random.Random(1))
    return write_document(LENGTH, wanted, num_absent=10, seed="everyday")


@functools.cache
def over_cuts(cp: int, step_tokens: int) -> Document:
    """A section over every cut of such a prefill; all in the same words, so that nothing but the name tells them
    apart."""
    size = min(step_tokens, LENGTH)
    borders = range(0, LENGTH, size)
    starts = {
        fragment.start
        for begin in borders
        for fragment in generate("zigzag", (Slice(job=0, start=begin, end=begin + size),), cp).fragments
    }
    if cp == 1:  # one rank's two fragments follow each other without any exchange
        starts = set(borders)
    wanted = [Wanted(kind="section", middle=cut, gap=GAP) for cut in sorted(starts - {0})]
    return write_document(LENGTH, wanted, num_absent=0, seed=f"{cp}/{step_tokens}", phrasing=Phrasing(varied=0.0))


# ---- sound runs -----------------------------------------------------------------------------------------------------


@functools.cache
def one_rank() -> tuple[str, ...]:
    """Everyday answers of one rank in one step."""
    return tuple(ask(trained(), read(trained(), everyday(), [Part(cp=1, end=LENGTH)])))


@pytest.mark.parametrize("kind", ["plain", "section", "absent"])
def test_most_answers_are_right(kind: str) -> None:
    assert len(right(everyday(), one_rank(), kind)) >= KNOWN * count(everyday(), kind)


@pytest.mark.parametrize(("cp", "step_tokens"), [(1, 320), (2, WHOLE), (2, 1024), (3, WHOLE), (3, 1536)])
def test_answers_do_not_depend_on_the_mesh(cp: int, step_tokens: int) -> None:
    answers = ask(trained(), read(trained(), everyday(), [Part(cp=cp, end=LENGTH, step_tokens=step_tokens)]))
    assert tuple(answers) == one_rank()


def test_answers_survive_a_resume_on_another_mesh() -> None:
    parts = [Part(cp=2, end=1000), Part(cp=3, end=2048, step_tokens=512), Part(cp=1, end=LENGTH)]
    assert tuple(ask(trained(), read(trained(), everyday(), parts))) == one_rank()


@pytest.mark.parametrize(("latent", "index_key"), [("fp8", "mxfp8"), ("fp8", "bf16")])
def test_answers_survive_quantized_caches(latent: str, index_key: str) -> None:
    engine = trained(latent, index_key)
    answers = ask(engine, read(engine, everyday(), [Part(cp=2, end=LENGTH)]))
    for kind in ("plain", "section"):
        known = right(everyday(), one_rank(), kind)
        assert len(known & right(everyday(), answers, kind)) >= 0.9 * len(known)


# ---- faults ---------------------------------------------------------------------------------------------------------


def forget_at_every_step(patch: Patch) -> None:
    """The boundary state's KDA part is zero when a step begins."""
    replicate = PrefillRank._replicate_states

    def broken(rank: PrefillRank, ctx: StepContext) -> dict[int, BoundaryState]:
        states = replicate(rank, ctx)
        for job, state in states.items():
            kda = {
                layer: KdaState(state_GKV=torch.zeros_like(kept.state_GKV), conv_tail_WC=kept.conv_tail_WC)
                for layer, kept in state.kda.items()
            }
            states[job] = replace(state, kda=kda)
        return states

    patch.setattr(PrefillRank, "_replicate_states", broken)


def fold_in_rank_order(patch: Patch) -> None:
    """Every fragment folds the summaries that ranks before its own hold, then its own rank's earlier ones."""

    def broken(received: Mapping[Fragment, Summary], ctx: StepContext) -> dict[Fragment, torch.Tensor]:
        incoming: dict[Fragment, torch.Tensor] = {}
        state: torch.Tensor | None = None
        for fragment in sorted(ctx.layout.chain(0), key=lambda one: (one.rank, one.order)):
            if fragment.rank == ctx.mesh.cp.rank and fragment.order > 0:
                assert state is not None
                incoming[fragment] = state
            if fragment in received:
                state = state_exchange.fold((received[fragment],), state)
        return incoming

    patch.setattr(state_exchange, "_fold_chains", broken)


def swap_states_of_a_rank(patch: Patch) -> None:
    """A rank's head and tail fragments get each other's incoming states."""
    exchange = state_exchange.EXCHANGES["all_gather"]

    def broken(config: KdaConfig, published: Mapping[Fragment, Summary], ctx: StepContext) -> Any:
        incoming = exchange(config, published, ctx)
        return dict(zip(incoming, reversed(incoming.values()), strict=True))

    patch.setitem(state_exchange.EXCHANGES, "all_gather", broken)


def shift_keys_of_a_fragment(patch: Patch) -> None:
    """Index keys of the second fragment lie a page too late."""
    key_rows = Indexer.key_rows

    def broken(indexer: Indexer, x_SD: torch.Tensor, ctx: StepContext) -> list[torch.Tensor]:
        keys = key_rows(indexer, x_SD, ctx)
        return [
            rows.roll(PAGE_TOKENS, dims=0) if run.order == 1 else rows for rows, run in zip(keys, ctx.runs, strict=True)
        ]

    patch.setattr(Indexer, "key_rows", broken)


@dataclass(frozen=True, kw_only=True)
class Fault:
    apply: Callable[[Patch], None]
    cp: int
    step_tokens: int = WHOLE
    kind: str = "section"
    below: float = 0.5


FAULTS = [
    Fault(apply=forget_at_every_step, cp=1, step_tokens=256),
    Fault(apply=fold_in_rank_order, cp=5),
    Fault(apply=swap_states_of_a_rank, cp=4),
    Fault(apply=shift_keys_of_a_fragment, cp=2, kind="plain", below=0.9),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.apply.__name__}-{fault.cp}")
def test_a_fault_shows_in_the_answers(fault: Fault, monkeypatch: Patch) -> None:
    document = over_cuts(fault.cp, fault.step_tokens) if fault.kind == "section" else everyday()
    parts = [Part(cp=fault.cp, end=LENGTH, step_tokens=fault.step_tokens)]
    known = right(document, ask(trained(), read(trained(), document, parts)), fault.kind)
    assert len(known) >= 0.6 * count(document, fault.kind)
    with monkeypatch.context() as patch:  # questions are asked by a sound engine
        fault.apply(patch)
        found = read(trained(), document, parts)
    broken = right(document, ask(trained(), found), fault.kind)
    assert len(known & broken) < fault.below * len(known)


def test_plain_facts_need_no_state_across_cuts(monkeypatch: Patch) -> None:
    """Why sections are there: with states lost at every step, facts that name their owner are found all the same."""
    parts = [Part(cp=1, end=LENGTH, step_tokens=256)]
    with monkeypatch.context() as patch:
        forget_at_every_step(patch)
        found = read(trained(), everyday(), parts)
    known = right(everyday(), one_rank(), "plain")
    assert len(known & right(everyday(), ask(trained(), found), "plain")) >= 0.7 * len(known)
