"""Discrete choices (index top-k, expert top-k) recorded in one run and replayed in another, with proof of near ties.

Rounding may swap a choice at a near tie, and everything behind it then differs. So two runs are compared *given equal
choices*: `Recorder` keeps one run's, `Replayer` gives them to the other run and checks every difference between the
replayed choice and the run's own: the scores involved must lie within rounding of the k-th score.

    T rows, S selected positions (-1: none), I indexer heads, X indexer dim, E experts, A experts a token
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from longprefill.kernels.contracts import Routing
from longprefill.workers.model.config import MoeConfig
from longprefill.workers.model.layers.context import ExpertChoice, PositionChoice, StepContext

Key = tuple[str, int, int, int]
"""("positions" or "experts", layer, job, position of the first row)."""

Record = dict[Key, torch.Tensor]
"""Rows of choices, keyed by where they start."""


class Swap(NamedTuple):
    """One row whose own choice differs from the recorded one.

    `distance` is as in `Replayer.worst`. `regret` is by how much the best score that was recorded and not chosen here
    exceeds the worst that was chosen, relative to the largest: 0 where the own choice is right by its own scores,
    however far they are from those of the recorded run.
    """

    kind: str
    layer: int
    job: int
    position: int
    distance: float
    regret: float = 0.0


@dataclass
class Recorder:
    """Keeps every choice of this rank. `record` of all ranks, merged by `dict |`, is what a `Replayer` takes."""

    record: Record = field(default_factory=dict)

    def positions(self, choice: PositionChoice, context: StepContext) -> torch.Tensor:
        self.record["positions", choice.layer, choice.run.job, choice.start] = choice.chosen_TS.clone()
        return choice.chosen_TS

    def experts(self, choice: ExpertChoice, context: StepContext) -> Routing:
        for n, run in enumerate(context.runs):
            rows = choice.routing.expert_TA[context.run_offsets[n] : context.run_offsets[n + 1]]
            self.record["experts", choice.layer, run.job, run.start] = rows.clone()
        return choice.routing


@dataclass
class Replayer:
    """Replaces this run's choices by recorded ones.

    `swaps` counts rows whose own choice differs; `worst` is the largest distance of a differing element's score from
    the k-th score, relative to the row's largest score: a near tie is one within rounding (1e-5 in fp32). It is
    infinite where the choices differ in what no score decides: their size, or a position that the query must or must
    not see. Rows that chose the same keep their own routing weights. With `keep_own` differences are only counted and
    the run's own choices stand.
    """

    record: Record
    keep_own: bool = False
    swapped: list[Swap] = field(default_factory=list)
    swaps: int = 0
    worst: float = 0.0
    rows: int = 0

    def __post_init__(self) -> None:
        self._tables: dict[tuple[str, int, int], dict[int, torch.Tensor]] = {}
        for (kind, layer, job, start), rows in self.record.items():
            table = self._tables.setdefault((kind, layer, job), {})
            for i, row in enumerate(rows):
                table[start + i] = row

    def positions(self, choice: PositionChoice, context: StepContext) -> torch.Tensor:
        run, start, chosen_TS, pool = choice.run, choice.start, choice.chosen_TS, choice.pool
        replayed_TS = self._rows("positions", choice.layer, run.job, start, chosen_TS)
        self.rows += chosen_TS.shape[0]
        for t in (replayed_TS != chosen_TS).any(dim=1).nonzero()[:, 0].tolist():
            num_complete = (start + t + 1) // pool
            own, own_rest = _split(chosen_TS[t], pool, num_complete)
            other, other_rest = _split(replayed_TS[t], pool, num_complete)
            is_one_size = (chosen_TS[t] >= 0).sum() == (replayed_TS[t] >= 0).sum() and len(own) == len(other)
            place = ("positions", choice.layer, run.job, start + t)
            if own_rest != other_rest or not is_one_size:
                self._count(place, math.inf, math.inf)
                continue
            gone, left = sorted(set(other) - set(own)), sorted(set(own) - set(other))
            rows = torch.tensor([*own, *gone, *left], dtype=torch.int64)
            scores = context.kernels.indexer.scores(
                choice.query_TIX[t : t + 1], choice.weight_TI[t : t + 1], choice.keys, rows[None]
            )[0]
            chosen, differing = scores[: len(own)], scores[len(own) :]
            self._count(place, _distance(chosen, differing), _regret(chosen, differing[: len(gone)]))
        return chosen_TS if self.keep_own else replayed_TS

    def experts(self, choice: ExpertChoice, context: StepContext) -> Routing:
        config, routing, logits_TE, bias_E = choice.config, choice.routing, choice.logits_TE, choice.bias_E
        expert_TA, weight_TA = routing.expert_TA.clone(), routing.weight_TA.clone()
        replayed_TA = routing.expert_TA.clone()
        for n, run in enumerate(context.runs):
            rows = slice(context.run_offsets[n], context.run_offsets[n + 1])
            replayed_TA[rows] = self._rows("experts", choice.layer, run.job, run.start, routing.expert_TA[rows])
        score_TE = torch.sigmoid(logits_TE) if config.scoring == "sigmoid" else torch.softmax(logits_TE, dim=-1)
        steering_TE = score_TE if bias_E is None else score_TE + bias_E
        self.rows += expert_TA.shape[0]
        rows_T = [(run.job, position) for run in context.runs for position in range(run.start, run.end)]
        swapped_T = (expert_TA.sort(dim=1).values != replayed_TA.sort(dim=1).values).any(dim=1)
        for t in swapped_T.nonzero()[:, 0].tolist():
            own, other = set(expert_TA[t].tolist()), set(replayed_TA[t].tolist())
            chosen = steering_TE[t, expert_TA[t]]
            distance = _distance(chosen, steering_TE[t, sorted(own ^ other)])
            # where the choice of groups is a near tie, any expert of theirs may come or go with its group
            gap = _group_gap(steering_TE[t], config)
            distance = min(distance, gap)
            regret = min(_regret(chosen, _in_chosen_groups(steering_TE[t], config)[sorted(other - own)]), gap)
            self._count(("experts", choice.layer, *rows_T[t]), distance, regret)
            weight_A = score_TE[t, replayed_TA[t]]
            if config.normalize_weights:
                weight_A = weight_A / (weight_A.sum() + 1e-20)
            expert_TA[t], weight_TA[t] = replayed_TA[t], weight_A * config.weight_scale
        return routing if self.keep_own else Routing(expert_TA, weight_TA)

    def _rows(self, kind: str, layer: int, job: int, start: int, own: torch.Tensor) -> torch.Tensor:
        table = self._tables.get((kind, layer, job), {})
        rows = [table[start + i] for i in range(own.shape[0])]
        return torch.stack(rows) if rows else own

    def _count(self, place: Key, distance: float, regret: float) -> None:
        distance = math.inf if math.isnan(distance) else distance
        regret = math.inf if math.isnan(regret) else regret
        self.swapped.append(Swap(*place, distance, regret))
        self.swaps += 1
        self.worst = max(self.worst, distance)


def _split(positions_S: torch.Tensor, pool: int, num_complete: int) -> tuple[list[int], list[int]]:
    """The key rows behind selected positions, and the positions that stand in no complete pool of the query: its own
    incomplete pool, and any that it must not see."""
    chosen = [position for position in positions_S.tolist() if position >= 0]
    rows = sorted({position // pool for position in chosen if position // pool < num_complete})
    return rows, [position for position in chosen if position // pool >= num_complete]


def _distance(chosen: torch.Tensor, differing: torch.Tensor) -> float:
    """The largest distance of a differing score from the worst chosen one, relative to the largest chosen one."""
    if differing.numel() == 0:
        return 0.0
    largest = chosen.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float(((differing - chosen.min()).abs() / largest).max())


def _regret(chosen: torch.Tensor, passed_over: torch.Tensor) -> float:
    """By how much the best score that was passed over exceeds the worst chosen one, relative to the largest chosen."""
    if passed_over.numel() == 0:
        return 0.0
    largest = chosen.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float(((passed_over.max() - chosen.min()) / largest).clamp_min(0.0))


def _in_chosen_groups(steering_E: torch.Tensor, config: MoeConfig) -> torch.Tensor:
    """Scores of the experts whose groups compete; -inf elsewhere."""
    if config.topk_groups == config.num_groups:
        return steering_E
    score_G = _group_scores(steering_E, config)
    is_out_G = torch.ones_like(score_G, dtype=torch.bool)
    is_out_G[score_G.topk(config.topk_groups).indices] = False
    return steering_E.masked_fill(is_out_G.repeat_interleave(steering_E.numel() // config.num_groups), -torch.inf)


def _group_scores(steering_E: torch.Tensor, config: MoeConfig) -> torch.Tensor:
    """The sum of the two best scores of each group."""
    groups_GE = steering_E.view(config.num_groups, -1)
    return groups_GE.topk(min(2, groups_GE.shape[1]), dim=1).values.sum(dim=1)


def _group_gap(steering_E: torch.Tensor, config: MoeConfig) -> float:
    """How far the last group that competes is from the first that does not, relative to the largest group score."""
    if config.topk_groups == config.num_groups:
        return math.inf
    score_G = _group_scores(steering_E, config).sort(descending=True).values
    largest = score_G.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((score_G[config.topk_groups - 1] - score_G[config.topk_groups]) / largest)
