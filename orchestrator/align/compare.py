"""Two runs of one prompt side by side, in the order of computation, so that the first row that fails is where it began.

Rules (design: choices are compared apart from numbers):

- exact (fp32 throughout): relative RMS within the tolerance. Choices may swap at near ties only. Where our run keeps
  its own choices, rows that a proven swap reaches are left out: of the swapping layer that row, of later layers every
  row from there on.
- growth (bf16 or quantized caches): the RMS error against the exact run may be GROWTH times that of one rank in the
  same numbers; all choices are those of the exact run. Two faults that growth cannot see, because one rank has them as
  well, are looked for apart: pages must hold what the format's definition makes of the rows that were encoded (CODES of
  the elements may be one step off), and a choice must be right by the run's own scores.

    T tokens, X width of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from longprefill.orchestrator.align.codes import compare_codes
from longprefill.orchestrator.align.observation import Observation
from longprefill.workers.choices import Swap
from longprefill.workers.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig

TOLERANCE = 1e-5
GROWTH = 1.25
CODES = 1e-4
"""Share of a layer's codes that may be one step from the right one."""
CHOICE_STAGE = {"positions": 1, "experts": 3}
"""Where in a layer a choice takes effect: before everything of a later stage."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `rms` is relative RMS; for choices and greedy tokens the worst distance from a tie; for codes the
    share of those that are not the right ones."""

    layer: int | None
    """None behind the last layer."""
    kind: str
    """"kda", "dsa", "mla", or "" behind the last layer."""
    what: str
    rms: float
    worst: float
    """Largest absolute difference, for codes in steps."""
    allowed: float
    compared: int
    """Rows that were compared."""
    excluded: int = 0
    """Rows behind a proven swap."""
    swaps: int = 0
    problem: str = ""
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Squares of the error, of the exact values, and of one rank's error: to pool rows of several runs."""

    @property
    def is_ok(self) -> bool:
        return not self.problem and self.rms <= self.allowed

    @property
    def place(self) -> str:
        return self.what if self.layer is None else f"layer {self.layer} ({self.kind}) {self.what}"


def compare(
    config: ModelConfig, expected: Observation, actual: Observation, *, tolerance: float = TOLERANCE,
    base: Observation | None = None,
) -> list[Row]:  # fmt: skip
    """All rows in the order of computation. With `base`, one rank's run in the same numbers, the growth rule holds and
    choices are not judged."""
    comparison = _Comparison(config, expected, actual, tolerance, base)
    rows = [
        Row(
            layer=None, kind="", what="the run", rms=math.inf, worst=math.inf, allowed=tolerance, compared=0,
            problem=problem,
        )
        for problem in (*actual.problems, *_uncompared(expected, actual))
    ]  # fmt: skip
    return rows + list(comparison.rows())


def first_deviation(rows: list[Row]) -> str | None:
    """Where it goes wrong first, as one line; None: nowhere."""
    for row in rows:
        if not row.is_ok:
            allowed = f"{row.allowed:.1e}".replace(".0e", "e")
            return f"{row.place}: {row.problem or f'{row.rms:.1e} > {allowed}'}"
    return None


def pooled(runs: list[list[Row]], *, tolerance: float = TOLERANCE) -> list[Row]:
    """Rows of several runs under the growth rule as those of one: squares added up place by place."""
    by_place: dict[str, Row] = {}
    for rows in runs:
        for row in rows:
            before = by_place.get(row.place)
            if before is None:
                by_place[row.place] = row
                continue
            if not any((*before.sums, *row.sums)):  # choices and codes
                by_place[row.place] = max(before, row, key=lambda one: (not one.is_ok, one.rms))
                continue
            sums = (before.sums[0] + row.sums[0], before.sums[1] + row.sums[1], before.sums[2] + row.sums[2])
            by_place[row.place] = replace(
                before, rms=_ratio(sums[0], sums[1]), allowed=_growth(_ratio(sums[2], sums[1]), tolerance),
                worst=max(before.worst, row.worst), compared=before.compared + row.compared,
                problem=before.problem or row.problem, sums=sums,
            )  # fmt: skip
    return list(by_place.values())


def _uncompared(expected: Observation, actual: Observation) -> list[str]:
    """Choices that nobody looked at. A run that resumed makes those of its own rows only."""
    first = _first_position(expected, actual)
    num_made = sum(max(0, rows.shape[0] - max(0, first - start)) for (_, _, _, start), rows in expected.record.items())
    if actual.num_choices < num_made:
        return [f"{actual.num_choices} of {num_made} rows of choices were compared"]
    return []


def _first_position(expected: Observation, actual: Observation) -> int:
    """The first position that was computed and not read from a snapshot."""
    final = actual.activations.get((max((layer for layer, _ in expected.activations), default=0), "final hidden"))
    return expected.num_tokens - (0 if final is None else final.shape[0])


class _Comparison:
    def __init__(
        self, config: ModelConfig, expected: Observation, actual: Observation, tolerance: float,
        base: Observation | None,
    ) -> None:  # fmt: skip
        self.config = config
        self.expected = expected
        self.actual = actual
        self.tolerance = tolerance
        self.base = base
        # what was replayed has no effects of its own; then `keeps_own` is False and nothing is left out
        self.swaps: tuple[Swap, ...] = actual.swapped if actual.keeps_own else ()

    def rows(self) -> Iterator[Row]:
        for layer, spec in enumerate(self.config.layers):
            is_kda = isinstance(spec.mixer, KdaConfig)
            kind = _kind(spec.mixer)
            yield from self._activation(layer, kind, "mixer input", 0)
            names = ("conv", "state") if is_kda else ("latent", "index_key", "pool_key", "pool_gate")
            for name in names:
                if self.base is not None and name in ("latent", "index_key"):
                    yield from self._encoded(layer, kind, name, self.base)
                yield from self._leaving(layer, kind, name)
            if isinstance(spec.mixer, MlaConfig) and spec.mixer.indexer is not None:
                yield from self._choices(layer, kind, "positions", "index choices")
            yield from self._activation(layer, kind, "mixer output", 2)
            yield from self._activation(layer, kind, "feed-forward input", 2)
            if isinstance(spec.ffn, MoeConfig):
                yield from self._choices(layer, kind, "experts", "expert choices")
            yield from self._activation(layer, kind, "feed-forward output", 4)
        last = len(self.config.layers)
        yield from self._activation(last, "", "final hidden", 0)
        yield from self._activation(last, "", "logits", 0)
        yield from self._greedy(last)

    def _excluded(self, layer: int, stage: int, first: int, end: int) -> torch.Tensor:
        """bool [end - first]: positions that a swap before this stage of the layer reaches."""
        positions_T = torch.arange(first, end)
        reached_T = torch.zeros(end - first, dtype=torch.bool)
        for swap in self.swaps:
            if swap.layer == layer and CHOICE_STAGE[swap.kind] < stage:
                reached_T |= positions_T == swap.position
            elif swap.layer == layer - 1 and stage == 0:
                reached_T |= positions_T == swap.position  # this layer has not mixed it into later rows yet
            elif swap.layer < layer:
                reached_T |= positions_T >= swap.position
        return reached_T

    def _activation(self, layer: int, kind: str, point: str, stage: int) -> Iterator[Row]:
        expected = self.expected.activations.get((layer, point))
        if expected is None:
            return
        actual = self.actual.activations.get((layer, point))
        end = self.expected.num_tokens
        if actual is not None:
            # a run that resumed has the last rows only; logits are kept of the last rows
            expected = expected[max(0, expected.shape[0] - actual.shape[0]) :]
        reached_T = self._excluded(layer, stage, end - expected.shape[0], end)
        base = None if self.base is None else self.base.activations[layer, point][-expected.shape[0] :]
        yield self._row(layer, kind, point, expected, actual, reached_T, base)

    def _leaving(self, layer: int, kind: str, name: str) -> Iterator[Row]:
        key = f"layers.{layer}.{name}"
        expected = self.expected.leavings.get(key)
        if expected is None:
            return
        reached_T = self._excluded(layer, 0, 0, self.expected.num_tokens)
        if name in ("latent", "index_key"):
            tokens_a_row = self._pool(layer) if name == "index_key" else 1
            whole = expected.shape[0] * tokens_a_row
            reached_N = reached_T[:whole].view(-1, tokens_a_row).any(dim=1)
        else:
            reached_N = reached_T.any().expand(expected.shape[0])
        base = None if self.base is None else self.base.leavings[key]
        row = self._row(layer, kind, name.replace("_", " "), expected, self.actual.leavings.get(key), reached_N, base)
        if key in self.actual.rank_differences:
            problem = f"rank {self.actual.rank_differences[key]} holds other values than rank 0"
            row = replace(row, problem=row.problem or problem)
        yield row

    def _encoded(self, layer: int, kind: str, name: str, base: Observation) -> Iterator[Row]:
        """Rows before they are encoded, and what pages hold of them. A run that resumed encoded the last rows only."""
        key, words = f"layers.{layer}.{name}", name.replace("_", " ")
        expected = self.expected.leavings.get(key)
        if expected is None:
            return
        tokens_a_row = self._pool(layer) if name == "index_key" else 1
        expected = expected[_first_position(self.expected, self.actual) // tokens_a_row :]
        count = expected.shape[0]
        if not count:
            return
        point = f"{words} rows"
        rows_NX = self.actual.activations.get((layer, point))
        every_N = torch.zeros(count, dtype=torch.bool)
        yield self._row(layer, kind, point, expected, rows_NX, every_N, base.activations[layer, point][-count:])
        stored, read = self.actual.leavings.get(key + ".stored"), self.actual.leavings.get(key)
        if rows_NX is None or stored is None or read is None or not rows_NX.shape[0] == count <= stored.shape[0]:
            return
        mixer = self.config.layers[layer].mixer
        found = compare_codes(
            base.numbers.of_rows(name), stored[-count:], rows_NX, read[-count:],
            rope_dim=mixer.rope_dim if isinstance(mixer, MlaConfig) else 0,
        )  # fmt: skip
        yield Row(
            layer=layer, kind=kind, what=f"{words} codes", rms=found.share, worst=found.worst_steps, allowed=CODES,
            compared=count, problem=found.problem,
        )  # fmt: skip

    def _pool(self, layer: int) -> int:
        mixer = self.config.layers[layer].mixer
        return mixer.indexer.pool if isinstance(mixer, MlaConfig) and mixer.indexer is not None else 1

    def _row(
        self, layer: int, kind: str, what: str, expected: torch.Tensor, actual: torch.Tensor | None,
        reached_N: torch.Tensor, base: torch.Tensor | None,
    ) -> Row:  # fmt: skip
        place: dict[str, Any] = {"layer": layer if kind else None, "kind": kind, "what": what}
        if actual is None or actual.shape != expected.shape:
            found = "nothing" if actual is None else f"shape {list(actual.shape)}"
            return Row(**place, rms=math.inf, worst=math.inf, allowed=self.tolerance, compared=0,
                       problem=f"{found} instead of shape {list(expected.shape)}")  # fmt: skip
        kept_N = ~reached_N
        e, a = expected[kept_N].double(), actual[kept_N].double()
        counts: dict[str, Any] = {"compared": int(kept_N.sum()), "excluded": int(reached_N.sum())}
        if not bool(torch.isfinite(a).all()):
            return Row(**place, **counts, rms=math.inf, worst=math.inf, allowed=self.tolerance, problem="not finite")
        error, size = float((a - e).square().sum()), float(e.square().sum())
        worst = float((a - e).abs().max()) if e.numel() else 0.0
        if base is not None:
            base_error = float((base[kept_N].double() - e).square().sum())
            allowed = _growth(_ratio(base_error, size), self.tolerance)
            sums = (error, size, base_error)
            return Row(**place, **counts, rms=_ratio(error, size), worst=worst, allowed=allowed, sums=sums)
        rms = _ratio(error, size)
        if what == "state":  # the worst head, so that no large head hides a wrong small one
            squares = [(float((x - y).square().sum()), float(y.square().sum())) for x, y in zip(a, e, strict=True)]
            rms = max((_ratio(*pair) for pair in squares), default=0.0)
        return Row(**place, **counts, rms=rms, worst=worst, allowed=self.tolerance)

    def _choices(self, layer: int, kind: str, choice: str, what: str) -> Iterator[Row]:
        recorded = [rows for key, rows in self.expected.record.items() if key[:2] == (choice, layer)]
        here = [swap for swap in self.actual.swapped if (swap.kind, swap.layer) == (choice, layer)]
        reached_T = self._excluded(layer, CHOICE_STAGE[choice], 0, self.expected.num_tokens)
        judged = [swap for swap in here if not reached_T[swap.position]]
        if self.base is None:
            worst = max((swap.distance for swap in judged), default=0.0)
        else:
            worst = max((swap.regret for swap in judged), default=0.0)
        yield Row(
            layer=layer, kind=kind, what=what, swaps=len(here), excluded=len(here) - len(judged), worst=0.0,
            rms=worst, allowed=self.tolerance, compared=sum(rows.shape[0] for rows in recorded),
        )  # fmt: skip

    def _greedy(self, layer: int) -> Iterator[Row]:
        """Tokens that greedy decoding would take: where they differ, their logits must tie."""
        expected = self.expected.activations.get((layer, "logits"))
        actual = self.actual.activations.get((layer, "logits"))
        if expected is None or actual is None or self.base is not None:
            return
        expected = expected[max(0, expected.shape[0] - actual.shape[0]) :]
        if actual.shape != expected.shape:
            return
        end = self.expected.num_tokens
        kept_N = ~self._excluded(layer, 0, end - expected.shape[0], end)
        e, a = expected[kept_N], actual[kept_N]
        if not e.shape[0]:
            return
        best_N = e.max(dim=1).values
        chosen_N = e.gather(1, a.argmax(dim=1, keepdim=True))[:, 0]
        distance_N = (best_N - chosen_N) / e.abs().max(dim=1).values.clamp_min(torch.finfo(torch.float32).tiny)
        yield Row(
            layer=None, kind="", what="greedy tokens", rms=float(distance_N.max()), worst=0.0, allowed=self.tolerance,
            compared=e.shape[0], excluded=int((~kept_N).sum()),
            swaps=int((a.argmax(dim=1) != e.argmax(dim=1)).sum()),
        )  # fmt: skip


def _kind(mixer: KdaConfig | MlaConfig) -> str:
    if isinstance(mixer, KdaConfig):
        return "kda"
    return "mla" if mixer.selection is None else "dsa"


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0.0 else math.sqrt(error / max(size, 1e-60))


def _growth(base_ratio: float, tolerance: float) -> float:
    """What fp32 rounding alone may do is never too much: quantized rows may come late in an fp32 run."""
    return max(GROWTH * base_ratio, tolerance)
