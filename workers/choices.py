"""Discrete choices (index top-k, expert top-k) recorded in one run and replayed in another, with proof of near ties.

Rounding may swap a choice at a near tie, and everything behind it then differs. So two runs are compared *given equal
choices*: `Recorder` keeps one run's, `Replayer` gives them to the other run and checks every difference between the
replayed choice and the run's own: the scores involved must lie within rounding of the k-th score.

    T rows, S selected positions (-1: none), I indexer heads, X indexer dim, E experts, A experts a token
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from longprefill.kernels.contracts import Routing
from longprefill.kernels.paged import PagedRows
from longprefill.partition.layout import Fragment
from longprefill.workers.model.config import MoeConfig
from longprefill.workers.model.layers.context import StepContext

Key = tuple[str, int, int, int]
"""("positions" or "experts", layer, job, position of the first row)."""

Record = dict[Key, torch.Tensor]
"""Rows of choices, keyed by where they start."""


@dataclass
class Recorder:
    """Keeps every choice of this rank. `record` of all ranks, merged by `dict |`, is what a `Replayer` takes."""

    record: Record = field(default_factory=dict)

    def positions(
        self,
        layer: int,
        fragment: Fragment,
        first_row: int,
        chosen_TS: torch.Tensor,
        query_TIX: torch.Tensor,
        weight_TI: torch.Tensor,
        keys: PagedRows,
        pool: int,
        context: StepContext,
    ) -> torch.Tensor:
        self.record["positions", layer, fragment.job, fragment.start + first_row] = chosen_TS.clone()
        return chosen_TS

    def experts(
        self, layer: int, config: MoeConfig, context: StepContext, logits_TE: torch.Tensor, routing: Routing
    ) -> Routing:
        for n, fragment in enumerate(context.runs):
            rows = routing.expert_TA[context.run_offsets[n] : context.run_offsets[n + 1]]
            self.record["experts", layer, fragment.job, fragment.start] = rows.clone()
        return routing


@dataclass
class Replayer:
    """Replaces this run's choices by recorded ones.

    `swaps` counts rows whose own choice differs; `worst` is the largest distance of a differing element's score from
    the k-th score, relative to the row's largest score: a near tie is one within rounding (1e-5 in fp32).
    """

    record: Record
    swaps: int = 0
    worst: float = 0.0
    rows: int = 0

    def __post_init__(self) -> None:
        self._tables: dict[tuple[str, int, int], dict[int, torch.Tensor]] = {}
        for (kind, layer, job, start), rows in self.record.items():
            table = self._tables.setdefault((kind, layer, job), {})
            for i, row in enumerate(rows):
                table[start + i] = row

    def positions(
        self,
        layer: int,
        fragment: Fragment,
        first_row: int,
        chosen_TS: torch.Tensor,
        query_TIX: torch.Tensor,
        weight_TI: torch.Tensor,
        keys: PagedRows,
        pool: int,
        context: StepContext,
    ) -> torch.Tensor:
        start = fragment.start + first_row
        replayed_TS = self._rows("positions", layer, fragment.job, start, chosen_TS)
        self.rows += chosen_TS.shape[0]
        for t in (replayed_TS != chosen_TS).any(dim=1).nonzero()[:, 0].tolist():
            own, other = _key_rows(chosen_TS[t], pool, keys.num_rows), _key_rows(replayed_TS[t], pool, keys.num_rows)
            differing = torch.tensor(sorted(set(own) ^ set(other)), dtype=torch.int64)
            both = torch.cat((torch.tensor(own, dtype=torch.int64), differing))
            scores = context.kernels.indexer.scores(query_TIX[t : t + 1], weight_TI[t : t + 1], keys, both[None])[0]
            self._prove(scores[: len(own)], scores[len(own) :])
        return replayed_TS

    def experts(
        self, layer: int, config: MoeConfig, context: StepContext, logits_TE: torch.Tensor, routing: Routing
    ) -> Routing:
        expert_TA = routing.expert_TA.clone()
        for n, fragment in enumerate(context.runs):
            rows = slice(context.run_offsets[n], context.run_offsets[n + 1])
            expert_TA[rows] = self._rows("experts", layer, fragment.job, fragment.start, routing.expert_TA[rows])
        score_TE = torch.sigmoid(logits_TE) if config.scoring == "sigmoid" else torch.softmax(logits_TE, dim=-1)
        self.rows += expert_TA.shape[0]
        own_sorted, other_sorted = routing.expert_TA.sort(dim=1).values, expert_TA.sort(dim=1).values
        for t in (own_sorted != other_sorted).any(dim=1).nonzero()[:, 0].tolist():
            differing = sorted(set(own_sorted[t].tolist()) ^ set(other_sorted[t].tolist()))
            self._prove(score_TE[t, routing.expert_TA[t]], score_TE[t, differing])
        weight_TA = score_TE.gather(1, expert_TA)
        if config.normalize_weights:
            weight_TA = weight_TA / (weight_TA.sum(dim=1, keepdim=True) + 1e-20)
        return Routing(expert_TA, weight_TA * config.weight_scale)

    def _rows(self, kind: str, layer: int, job: int, start: int, own: torch.Tensor) -> torch.Tensor:
        table = self._tables.get((kind, layer, job), {})
        rows = [table[start + i] for i in range(own.shape[0])]
        return torch.stack(rows) if rows else own

    def _prove(self, chosen: torch.Tensor, differing: torch.Tensor) -> None:
        self.swaps += 1
        kth, largest = chosen.min(), chosen.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        self.worst = max(self.worst, float(((differing - kth).abs() / largest).max()))


def _key_rows(positions_S: torch.Tensor, pool: int, num_keys: int) -> list[int]:
    """Key rows behind selected positions; the tail of an incomplete pool has none."""
    return sorted({p // pool for p in positions_S.tolist() if p >= 0 and p // pool < num_keys})
