"""Which steps a calibration times for a model, and how many rounds its time allows."""

from __future__ import annotations

from longprefill.orchestrator.calibrate.samples import TimedStep
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.config import MlaConfig, ModelConfig

LONGEST_TOKENS = 69_632
"""Position that the farthest step reaches by default: 64 K and a step."""
SHORTEST_TOKENS = 1024
STEP_TOKENS = (256, 1024, 4096, 8192)
GRID_TOKENS = STEP_TOKENS[:3]
"""Those that are timed at several starts."""
CLOSE_TOKENS = 2048
"""From the first start to the second and third; then distances double."""
LONE_TOKENS = (256, 1024, 4096, 16384)
"""Steps of which a rank that has fragments in the middle only is timed, one of two."""


def timed_steps(config: ModelConfig, longest_tokens: int) -> tuple[TimedStep, ...]:
    """Ascending in cost. Row counts by powers of two; visible keys too, most closely for the longest steps, as sparse
    attention changes its form on the way. What lies between is interpolated."""
    first = _pages(largest_topk(config)) + PAGE_TOKENS
    starts = [first, first + CLOSE_TOKENS, first + 2 * CLOSE_TOKENS]
    while (following := first + 2 * (starts[-1] - first) + 2 * CLOSE_TOKENS) + GRID_TOKENS[-1] <= longest_tokens:
        starts.append(following)
    chosen = {GRID_TOKENS[0]: (*starts[:3], starts[-1])}
    found = {TimedStep(start=0, tokens=tokens, is_on_grid=tokens in GRID_TOKENS) for tokens in STEP_TOKENS}
    for tokens in GRID_TOKENS:
        found |= {TimedStep(start=start, tokens=tokens) for start in chosen.get(tokens, starts)}
    found |= {TimedStep(start=first, tokens=tokens, rank=1, num_ranks=2, is_on_grid=False) for tokens in LONE_TOKENS}
    fitting = [step for step in found if step.start + step.tokens <= longest_tokens]
    return tuple(sorted(fitting, key=lambda step: (step.tokens, step.start, step.rank)))


def least_tokens(config: ModelConfig) -> int:
    """How far steps must reach: some must begin where queries select, and some must lie between others."""
    return max(SHORTEST_TOKENS, _pages(largest_topk(config)) + PAGE_TOKENS + 2 * STEP_TOKENS[0])


def largest_topk(config: ModelConfig) -> int:
    """Keys that a query selects in any layer; 0 without an indexer."""
    mixers = [layer.mixer for layer in config.layers]
    chosen = [mixer.selection.topk for mixer in mixers if isinstance(mixer, MlaConfig) and mixer.selection is not None]
    return max(chosen, default=0)


def _pages(num_tokens: int) -> int:
    """Whole pages, so that pools and cuts begin there."""
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS
