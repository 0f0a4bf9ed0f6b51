"""Why there is no plan, in one line, and what would make one."""

from __future__ import annotations

from dataclasses import replace

from longprefill.orchestrator.planner.alternatives import gib
from longprefill.orchestrator.planner.candidate import Candidate
from longprefill.orchestrator.planner.evaluate import Evaluator
from longprefill.partition.layout import PAGE_TOKENS

MOST_DEVICES = 1 << 14


def no_mesh(evaluator: Evaluator) -> str:
    """The meshes that were asked for have no room."""
    request, machines = evaluator.request, evaluator.machines
    largest = max(machine.num_devices for machine in machines.machines)
    if request.tp is not None and request.tp > largest:
        return (
            f"--tp {request.tp}: tensor-parallel ranks share a machine, and the largest has {largest} device(s): "
            f"use --tp {largest} or less"
        )
    slots = machines.num_slots(request.tp or 1)
    return (
        f"--cp {request.cp}{f' --tp {request.tp}' if request.tp else ''}: the machines hold {slots} groups of "
        f"{request.tp or 1} device(s): use --cp {slots} or less"
    )


def no_memory(evaluator: Evaluator, misfits: list[tuple[Candidate, int]]) -> str:
    """Nothing fits: the leanest candidate's need, and how many devices or how much memory would do."""
    request = evaluator.request
    leanest, memory_bytes = min(misfits, key=lambda pair: evaluator.memory(pair[0]).total - pair[1])
    needed = evaluator.memory(leanest)
    what = (
        f"no mesh of {evaluator.machines.num_devices} device(s) holds {request.tokens} tokens of {request.model}: "
        f"{leanest.describe()} needs {gib(needed.total)} a device (weights {gib(needed.weights)}, cache "
        f"{gib(needed.cache)}, step {gib(needed.step)}), {gib(memory_bytes)} are there: use "
    )
    remedies: list[str] = []
    devices = devices_needed(evaluator, leanest, memory_bytes)
    if devices is not None:
        remedies.append(f"{devices} devices or more of this memory")
    remedies.append(f"devices with {gib(needed.total)}")
    tokens = tokens_possible(evaluator, leanest, memory_bytes)
    if tokens:
        remedies.append(f"--tokens {tokens} or less")
    return what + ", or ".join(remedies)


def devices_needed(evaluator: Evaluator, leanest: Candidate, memory_bytes: int) -> int | None:
    """The smallest power of two of devices on which some mesh fits; None: no number does."""
    num_devices = 1
    while num_devices <= MOST_DEVICES:
        for num_tp in {1, leanest.tp}:
            if num_devices % num_tp:
                continue
            candidate = replace(
                leanest,
                cp=num_devices // num_tp,
                tp=num_tp,
                step_tokens=evaluator.request.step_tokens or PAGE_TOKENS,
                is_expert_parallel=evaluator.has_experts and evaluator.request.expert_parallel is not False,
                is_cache_sharded=num_devices > num_tp,
            )
            if evaluator.memory(candidate).total <= memory_bytes:
                return num_devices
        num_devices *= 2
    return None


def tokens_possible(evaluator: Evaluator, leanest: Candidate, memory_bytes: int) -> int:
    """The longest prompt that the leanest candidate holds, whole pages; 0: none."""
    needed = evaluator.memory(leanest)
    fixed = needed.total - needed.cache
    per_token = needed.cache / evaluator.request.tokens
    room = memory_bytes - fixed
    return max(int(room / per_token) // PAGE_TOKENS * PAGE_TOKENS, 0) if per_token else 0
