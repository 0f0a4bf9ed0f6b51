"""A choice as JSON. Every figure is modelled, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from longprefill.orchestrator.planner.crossovers import Crossovers
from longprefill.orchestrator.planner.evaluate import Estimate, Evaluator, limits
from longprefill.orchestrator.planner.search import Choice

RUNNABLE_EXCHANGES = ("all_gather",)
"""What the engine has (`workers/model/layers/state_exchange.py`, which needs torch; a test compares)."""


def document(evaluator: Evaluator, choice: Choice, borders: Crossovers) -> dict[str, object]:
    """The JSON object of `plan --json`."""
    best, request = choice.best, evaluator.request
    return {
        "kind": "modelled",
        "model": {"name": request.model, "family": evaluator.config.family},
        "tokens": request.tokens,
        "cached": request.cached,
        "concurrent": request.concurrent,
        "devices": evaluator.machines.num_devices,
        "plan": plan_fields(best),
        "estimate": estimate_fields(best),
        "memory": {**limits(best.memory), "device_bytes": best.site.memory_bytes},
        "memory_by_rank": [
            {
                "device": kind.device,
                "tp_ranks": list(kind.tp_ranks),
                "ranks": kind.num_ranks,
                **limits(kind.memory),
                "device_bytes": kind.device_bytes,
            }
            for kind in evaluator.memory_by_rank(best.candidate, best.site)
        ],
        "received_bytes": evaluator.traffic(best.candidate),
        "handoff_bytes": evaluator.handoff_bytes(best.candidate, request.tokens) if evaluator.has_decode else 0,
        "alternatives": [
            {
                "what": other.what,
                "ttft_s": None if other.estimate is None else other.estimate.ttft_s,
                "devices": None if other.estimate is None else other.estimate.candidate.num_devices,
                "reason": other.reason,
            }
            for other in choice.alternatives
        ],
        "crossovers": asdict(borders),
        "rates": evaluator.costs(best.candidate, best.site).coverage(),
        "notes": list(notes(evaluator, choice)),
    }


def rounded(value: object) -> object:
    """Floats to six digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def plan_fields(best: Estimate) -> dict[str, object]:
    """What a group is told."""
    candidate = best.candidate
    return {
        "cp": candidate.cp,
        "tp": candidate.tp,
        "devices": candidate.num_devices,
        "groups": best.num_groups,
        "machines": best.site.num_machines,
        "expert_parallel": candidate.is_expert_parallel,
        "step_tokens": candidate.step_tokens,
        "steps": best.prompt.num_steps,
        "prompts_per_step": candidate.jobs_per_step,
        "layout": candidate.layout,
        "exchange": candidate.exchange,
        "caches": "sharded" if candidate.is_cache_sharded else "replicated",
        "latent_format": candidate.latent_format,
        "index_format": candidate.index_format,
    }


def estimate_fields(best: Estimate) -> dict[str, object]:
    """Seconds, and what they are made of: `parts` sum to `prefill_s`."""
    prompt = best.prompt
    return {
        "ttft_s": best.ttft_s,
        "mean_ttft_s": best.mean_ttft_s,
        "prefill_s": prompt.seconds,
        "handoff_exposed_s": best.handoff_s,
        "queue_s": best.queue_s,
        "parts": dict(sorted(prompt.parts.items(), key=lambda part: -part[1])),
        "work_max_over_mean": prompt.max_work_s / prompt.mean_work_s if prompt.mean_work_s else 1.0,
    }


def notes(evaluator: Evaluator, choice: Choice) -> Iterator[str]:
    """What the reader should know of these figures."""
    yield from choice.notes
    profiles = {profile.name: profile for profile in choice.best.site.placement.profiles}
    for profile in profiles.values():
        yield f"device {profile.name}: {profile.source}"
    if not evaluator.has_decode:
        yield "no hand-off: the cluster file has no [decode] workers"
    candidate = choice.best.candidate
    if candidate.cp > 1 and candidate.exchange not in RUNNABLE_EXCHANGES:
        yield (
            f"the engine does not run {candidate.exchange} yet, it is modelled: add --exchange "
            f"{' or '.join(RUNNABLE_EXCHANGES)} for a plan that runs"
        )
    if candidate.is_cache_sharded:
        yield "the engine does not shard caches yet, it is modelled"
        yield "sharded caches: a finished step cannot be recovered when a rank dies, the job starts again"
