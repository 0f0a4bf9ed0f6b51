"""What a run shows when it is looked at: activations between sub-blocks by position, and what a job leaves.

Without a probe the engine pays nothing. With one every rank copies its own rows at each point in fp32: for alignment
and tests, with prompts whose activations fit in memory.

    S own rows, T tokens, X width of a row
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from longprefill.workers.model.layers.context import StepContext

if TYPE_CHECKING:
    from longprefill.workers.prefill import PrefillRank

POINTS = (
    "mixer input", "latent rows", "index key rows", "mixer output", "feed-forward input", "feed-forward output",
    "final hidden", "logits",
)  # fmt: skip
"""In the order of computation. The last two have the number of layers as their layer. Inputs are the normed rows; cache
rows are those that are encoded, by cache row (with k-pool one for several positions)."""

Place = tuple[int, str]
"""(layer, point)."""


class ProbeEntry(NamedTuple):
    """Rows start, start + 1, ... of a job at a point of a layer, at least one."""

    layer: int
    point: str
    job: int
    start: int
    rows: np.ndarray
    """fp32 [rows, X]."""


@dataclass(kw_only=True)
class ActivationProbe:
    """Keeps all own rows of a rank at every point, and logits of the last `logit_rows` positions of every prompt."""

    logit_rows: int
    entries: list[ProbeEntry] = field(default_factory=list)

    def take(self, layer: int, point: str, rows_SX: torch.Tensor, context: StepContext) -> None:
        for n, run in enumerate(context.runs):
            self.keep(layer, point, run.job, run.start, rows_SX[context.run_offsets[n] : context.run_offsets[n + 1]])

    def keep(self, layer: int, point: str, job: int, start: int, rows_SX: torch.Tensor) -> None:
        """Copies rows that begin at position (or cache row) `start` of a job."""
        if not rows_SX.shape[0]:
            return
        rows = rows_SX.detach().float().cpu().flatten(1).clone().numpy()
        self.entries.append(ProbeEntry(layer, point, job, start, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """What one rank has to show of a job."""

    entries: tuple[ProbeEntry, ...]
    leavings: dict[str, np.ndarray]
    """On world rank 0 only, see `leavings`."""
    digests: dict[str, str]
    """Of every leaving, on every rank: all ranks must have the same."""


def observe(rank: PrefillRank, probe: ActivationProbe, job: int) -> RankObservation:
    """A collective of the TP group: the probe's rows of a job and what the job leaves."""
    found = leavings(rank, job)
    return RankObservation(
        entries=tuple(entry for entry in probe.entries if entry.job == job),
        leavings={name: tensor.numpy() for name, tensor in found.items()} if rank.mesh.world.rank == 0 else {},
        digests={name: _digest(tensor) for name, tensor in found.items()},
    )


def leavings(rank: PrefillRank, job: int) -> dict[str, torch.Tensor]:
    """States (with the heads of all tensor-parallel ranks) and dequantized cache rows of a job, fp32, by name:
    layers.N.state [G, K, V], .conv [W - 1, C], .pool_key, .pool_gate [n, X], .latent, .index_key [rows, X], and the
    bytes of the latter two as .latent.stored, .index_key.stored uint8 [rows, B]. A collective of the TP group."""
    state = rank.whole_state(job)
    found = {name: tensor.float().cpu().clone() for name, tensor in state.named_tensors()}
    for kind in rank.pool.kinds:
        rows = rank.cache(job).rows(kind.layer, kind.kind, state.position)
        name = f"layers.{kind.layer}.{kind.kind}"
        found[name] = rows.read(0, rows.num_rows, torch.float32).cpu().clone()
        found[name + ".stored"] = rows.read_bytes(0, rows.num_rows).cpu().clone()
    return found


def assemble(entries: Iterable[ProbeEntry]) -> dict[Place, torch.Tensor]:
    """The entries of all ranks for one job in sequence order: fp32 [T, X] by place.

    Raises:
        ValueError: a position is missing or twice there, with place and position.
    """
    by_place: dict[Place, list[ProbeEntry]] = {}
    for entry in entries:
        by_place.setdefault((entry.layer, entry.point), []).append(entry)
    result: dict[Place, torch.Tensor] = {}
    for place, parts in by_place.items():
        parts.sort(key=lambda entry: entry.start)
        for before, after in pairwise(parts):
            expected = before.start + before.rows.shape[0]
            if after.start != expected:
                kind = "missing" if after.start > expected else "computed twice"
                raise ValueError(
                    f"layer {place[0]} {place[1]}: position {min(expected, after.start)} is {kind} (rows of "
                    f"{before.start} end at {expected}, the next begin at {after.start})"
                )
        result[place] = torch.from_numpy(np.concatenate([entry.rows for entry in parts]))
    return result


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
