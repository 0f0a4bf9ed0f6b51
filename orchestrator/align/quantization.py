"""What each quantized cache costs and saves, path by path: one rank with it beside one rank without, in one dtype.

Both runs choose for themselves, so the recall and the errors are those that a user of the format gets.

    N rows that chose, K positions a row, V vocabulary
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table

from longprefill.orchestrator.align.observation import Numbers, Observation
from longprefill.orchestrator.align.single import SingleRank
from longprefill.workers.cache.pages import CacheFormats, cache_kinds
from longprefill.workers.model.config import MlaConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class PathEffect:
    """One choice of formats beside unquantized caches."""

    latent: str
    index: str
    recall: float | None
    """Share of the positions selected without quantization that are selected with it; None: nothing was to choose."""
    recall_by_layer: dict[int, float]
    """The same of each layer that selects. A later layer's holds what earlier layers changed in its input."""
    hidden_rms: float
    """Relative RMS difference of the last layer's rows, over all positions."""
    logits_rms: float
    """The same of the logits of the last positions."""
    changed_tokens: int
    """Positions of those where greedy decoding takes another token."""
    compared_tokens: int
    cache_bytes_per_token: float
    """Pages of all layers; states of KDA layers do not grow with tokens."""
    unquantized_bytes_per_token: float


def quantized_paths(config: ModelConfig, numbers: Numbers) -> list[Numbers]:
    """Each quantized cache that the model has alone, then both."""
    plain = replace(numbers, latent=numbers.dtype, index=numbers.dtype)
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, MlaConfig)]
    paths: list[Numbers] = []
    if mixers and numbers.latent != numbers.dtype:
        paths.append(replace(plain, latent=numbers.latent))
    if any(mixer.indexer is not None for mixer in mixers) and numbers.index != numbers.dtype:
        paths.append(replace(plain, index=numbers.index))
    return paths if len(paths) < 2 else [*paths, numbers]


def measure_paths(rank: SingleRank, numbers: Numbers, tokens: np.ndarray) -> list[PathEffect]:
    """Runs the prompt without quantization and once for each path; nothing where no cache is quantized."""
    paths = quantized_paths(rank.config, numbers)
    if not paths:
        return []
    plain = replace(numbers, latent=numbers.dtype, index=numbers.dtype)
    before = rank.run(tokens, numbers=plain)
    return [_effect(rank.config, before, rank.run(tokens, numbers=path)) for path in paths]


def _effect(config: ModelConfig, before: Observation, after: Observation) -> PathEffect:
    kept, selected = _selections(before, after)
    last = len(config.layers)
    logits_NV, other_NV = before.activations[last, "logits"], after.activations[last, "logits"]
    return PathEffect(
        latent=after.numbers.latent,
        index=after.numbers.index,
        recall=kept.total() / selected.total() if selected else None,
        recall_by_layer={layer: kept[layer] / selected[layer] for layer in sorted(selected)},
        hidden_rms=_relative_rms(before.activations[last, "final hidden"], after.activations[last, "final hidden"]),
        logits_rms=_relative_rms(logits_NV, other_NV),
        changed_tokens=int((logits_NV.argmax(dim=1) != other_NV.argmax(dim=1)).sum()),
        compared_tokens=logits_NV.shape[0],
        cache_bytes_per_token=_bytes_per_token(config, after.numbers),
        unquantized_bytes_per_token=_bytes_per_token(config, before.numbers),
    )


def _selections(before: Observation, after: Observation) -> tuple[Counter[int], Counter[int]]:
    """By layer: positions that both selected, and those that were selected before."""
    kept: Counter[int] = Counter()
    selected: Counter[int] = Counter()
    for key, before_NK in before.record.items():
        kind, layer, *_ = key
        if kind != "positions" or not before_NK.numel():
            continue
        # one number for a row and a position
        row_N1 = torch.arange(before_NK.shape[0])[:, None] * before.num_tokens
        one, other = ((row_N1 + rows_NK)[rows_NK >= 0] for rows_NK in (before_NK.long(), after.record[key].long()))
        kept[layer] += int(torch.isin(one, other).sum())
        selected[layer] += one.numel()
    return kept, selected


def _relative_rms(before: torch.Tensor, after: torch.Tensor) -> float:
    size = float(before.double().square().sum())
    return (float((after.double() - before.double()).square().sum()) / max(size, 1e-60)) ** 0.5


def _bytes_per_token(config: ModelConfig, numbers: Numbers) -> float:
    kinds = cache_kinds(config, CacheFormats(latent=numbers.latent, index_key=numbers.index))
    return sum(kind.format.row_bytes / kind.tokens_per_row for kind in kinds)


def effects_table(effects: list[PathEffect], num_tokens: int) -> Table:
    """One line a path."""
    title = f"quantized caches beside unquantized ones, one rank, {num_tokens} tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("latent", "index"):
        table.add_column(heading, no_wrap=True)
    for heading in ("recall", "worst (layer)", "hidden", "logits", "tokens", "bytes/token"):
        table.add_column(heading, justify="right", no_wrap=True)
    for effect in effects:
        worst = min(effect.recall_by_layer.items(), key=lambda item: item[1], default=None)
        table.add_row(
            effect.latent,
            effect.index,
            "-" if effect.recall is None else f"{effect.recall:.4f}",
            "-" if worst is None else f"{worst[1]:.4f} ({worst[0]})",
            f"{effect.hidden_rms:.1e}",
            f"{effect.logits_rms:.1e}",
            f"{effect.changed_tokens}/{effect.compared_tokens}",
            f"{effect.cache_bytes_per_token:.0f} of {effect.unquantized_bytes_per_token:.0f}",
        )
    return table


def effects_document(effects: list[PathEffect]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(effect) for effect in effects]
