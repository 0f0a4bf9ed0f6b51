"""What one run of one prompt shows, whoever ran it: activations, what is left, discrete choices.

T tokens, X width of a row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from longprefill.workers.choices import Record, Swap
from longprefill.workers.probe import Place, RankObservation, assemble

LOGIT_ROWS = 256
"""Logits are compared at so many of a prompt's last positions: a large vocabulary's are too many to keep them all."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """In which numbers a run computes and keeps its rows."""

    dtype: str
    latent: str
    index: str

    @property
    def is_exact(self) -> bool:
        """fp32 throughout: results do not depend on the mesh."""
        return self.dtype == self.latent == self.index == "fp32"

    def of_rows(self, kind: str) -> str:
        """The format of "latent" or "index_key" rows."""
        return self.latent if kind == "latent" else self.index


EXACT = Numbers(dtype="fp32", latent="fp32", index="fp32")


@dataclass(frozen=True, kw_only=True)
class Observation:
    num_tokens: int
    activations: Mapping[Place, torch.Tensor]
    """fp32 rows by place (workers/probe.py), up to the last position; a run that resumed has no earlier ones."""
    leavings: Mapping[str, torch.Tensor]
    """States and cache rows by name (workers.probe.leavings)."""
    numbers: Numbers = EXACT
    """What was asked for; what came of it, the rows show."""
    record: Record = field(default_factory=dict)
    """The run's own choices, as those of job 0; empty where they were replayed."""
    num_choices: int = 0
    """Rows of choices that were compared with those of a reference."""
    swapped: tuple[Swap, ...] = ()
    """Rows whose choices differed."""
    keeps_own: bool = False
    """Whether the run went on with its own choices where they differed."""
    problems: tuple[str, ...] = ()
    """What no number says: a row that is missing or twice there."""
    rank_differences: Mapping[str, int] = field(default_factory=dict)
    """Leavings that are not the same on all ranks, with a rank that differs from rank 0."""


def from_ranks(
    ranks: Sequence[RankObservation], num_tokens: int, *, record: Record | None = None, num_choices: int = 0,
    swapped: Sequence[Swap] = (), keeps_own: bool = False, numbers: Numbers = EXACT,
) -> Observation:  # fmt: skip
    """Puts together what all ranks of a mesh have to show of one job."""
    problems: list[str] = []
    activations: Mapping[Place, torch.Tensor] = {}
    try:
        activations = assemble(entry for rank in ranks for entry in rank.entries)
    except ValueError as error:
        problems.append(str(error))
    differences: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        for name, digest in rank.digests.items():
            if digest != ranks[0].digests.get(name):
                differences.setdefault(name, number)
    return Observation(
        num_tokens=num_tokens,
        activations=activations,
        numbers=numbers,
        leavings={name: torch.from_numpy(array.copy()) for name, array in ranks[0].leavings.items()},
        record=record or {},
        num_choices=num_choices,
        swapped=tuple(swapped),
        keeps_own=keeps_own,
        problems=tuple(problems),
        rank_differences=differences,
    )


def renumbered(record: Record, job: int) -> Record:
    """A record of one job under another job number."""
    return {(kind, layer, job, start): rows for (kind, layer, _, start), rows in record.items()}
