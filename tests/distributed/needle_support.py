"""The trained model of examples/needle over ranks in threads: what it answers about a document."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longprefill.comms.group import Group
from longprefill.comms.solo import SoloGroup
from longprefill.comms.thread_group import run_ranks
from longprefill.orchestrator.needle.answers import Prefilled, answer, pages_for
from longprefill.orchestrator.needle.bench import questions_of
from longprefill.orchestrator.needle.documents import Document
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.steps import pack_jobs
from longprefill.workers.cache.pages import CacheFormats
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.tokenizer import Tokenizer
from longprefill.workers.model.weights import load_weights
from longprefill.workers.prefill import PrefillRank

from .engine_support import WHOLE, Engine, drive, make_rank

MODEL_DIR = Path(__file__).resolve().parents[2] / "examples" / "needle"
MAX_NEW_TOKENS = 8
QUESTIONS_TOGETHER = 24


@functools.cache
def trained(latent: str = "fp32", index_key: str = "fp32") -> Engine:
    """The committed model, fp32 unless the cache formats say otherwise."""
    config = read_config(MODEL_DIR)
    model = Model(config, load_weights(MODEL_DIR, config, dtype=torch.float32))
    formats = CacheFormats(latent=latent, index_key=index_key)
    return Engine(config=config, model=model, dtype=torch.float32, formats=formats)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of a document's steps on one mesh."""

    cp: int
    end: int
    step_tokens: int = WHOLE


@dataclass(frozen=True, kw_only=True)
class Read:
    """A prefilled document: its boundary state, and a pool's bytes with its pages and spare ones."""

    document: Document
    state: BoundaryState
    pages: torch.Tensor
    table: tuple[int, ...]
    spare: range


def read(engine: Engine, document: Document, parts: Sequence[Part]) -> Read:
    """Prefills the document part after part, each on a mesh of its own that takes pages and state over from the one
    before."""
    tokenizer = Tokenizer(MODEL_DIR)
    tokens = torch.tensor(tokenizer.encode(document.text))
    longest = max(len(tokenizer.encode(question.text)) for question in questions_of(document))
    num_pages = -(-len(tokens) // PAGE_TOKENS)
    spare = range(num_pages, num_pages + QUESTIONS_TOGETHER * pages_for(longest, MAX_NEW_TOKENS))
    table = tuple(reversed(range(num_pages)))
    state: BoundaryState | None = None
    pages: torch.Tensor | None = None
    for part in parts:
        start = 0 if state is None else state.position
        steps = list(pack_jobs([Slice(job=0, start=start, end=part.end)], part.step_tokens))

        def on_rank(
            group: Group, state: BoundaryState | None = state, pages: torch.Tensor | None = pages, steps=steps
        ) -> PrefillRank:
            rank = make_rank(engine, group, spare.stop)
            if pages is not None:
                rank.pool.buffer.copy_(pages)
            rank.open_job(0, tokens, table, state)
            drive(rank, steps)
            return rank

        rank = run_ranks(part.cp, on_rank, timeout_s=60.0)[-1]
        state, pages = rank.state(0), rank.pool.buffer
    assert state is not None
    assert pages is not None
    return Read(document=document, state=state, pages=pages, table=table, spare=spare)


def ask(engine: Engine, found: Read) -> list[str]:
    """One rank's answers to all questions about a document that was read."""
    tokenizer = Tokenizer(MODEL_DIR)
    solo = make_rank(engine, SoloGroup(), found.spare.stop)
    solo.pool.buffer.copy_(found.pages)
    answers = answer(
        solo,
        Prefilled(state=found.state, table=found.table),
        [tokenizer.encode(question.text) for question in questions_of(found.document)],
        spare_pages=found.spare,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_token_ids=engine.config.eos_token_ids,
    )
    return [tokenizer.decode(ids).strip() for ids in answers]


def right(document: Document, answers: Sequence[str], kind: str) -> set[int]:
    """Numbers of the questions of a kind (plain, section, absent) that are answered right."""
    return {
        number
        for number, (question, text) in enumerate(zip(questions_of(document), answers, strict=True))
        if question.task == kind and text == question.answer
    }


def count(document: Document, kind: str) -> int:
    """Questions of a kind."""
    return sum(one.task == kind for one in questions_of(document))
