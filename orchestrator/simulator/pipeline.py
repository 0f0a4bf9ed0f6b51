"""Chunked pipeline parallelism, for comparison with context parallelism: layers over stages, chunks through them.

No stage waits for another's states or rows, so nothing is gathered; what is lost is filling and draining, stages of
unequal layers, and later chunks that take longer than earlier ones. A stage has one layer at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from longprefill.orchestrator.costs.rates import LinkRates
from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.orchestrator.simulator.subject import Subject
from longprefill.partition.layout import Slice

CHUNKS = (4096, 8192, 16_384, 32_768, 65_536)


class PipelineTime(NamedTuple):
    seconds: float
    chunk_tokens: int
    bubble: float
    """Share of the stages' time that nobody uses."""


def pipeline_time(subject: Subject, num_tokens: int, num_stages: int) -> PipelineTime | None:
    """The best of CHUNKS for a prompt on `num_stages` devices; None when there are more stages than layers."""
    if num_stages > len(subject.config.layers):
        return None
    times = [_time(subject, num_tokens, num_stages, chunk) for chunk in CHUNKS]
    return min(times, key=lambda time: time.seconds)


def even_stages(seconds: Sequence[float], num_stages: int) -> list[int]:
    """Borders of runs of layers, one layer each at least, whose longest run is as short as can be: num_stages + 1."""
    sums = [0.0, *accumulate(seconds)]
    num_layers = len(seconds)
    # longest[n]: the longest run when the first n layers make the stages so far; the border before the last of them
    longest = [sums[count] if count else float("inf") for count in range(num_layers + 1)]
    before: list[list[int]] = []
    for stage in range(1, num_stages):
        better = [float("inf")] * (num_layers + 1)
        cuts = [0] * (num_layers + 1)
        for count in range(stage + 1, num_layers + 1):
            for cut in range(stage, count):
                run = max(longest[cut], sums[count] - sums[cut])
                if run < better[count]:
                    better[count], cuts[count] = run, cut
        longest = better
        before.append(cuts)
    borders = [num_layers]
    for cuts in reversed(before):
        borders.append(cuts[borders[-1]])
    return [0, *reversed(borders)]


def _time(subject: Subject, num_tokens: int, num_stages: int, chunk_tokens: int) -> PipelineTime:
    costs, model = subject.costs(1), subject.shape()
    starts = [*range(0, num_tokens, chunk_tokens), num_tokens]
    prompt_s = costs.layer_seconds([Slice(job=0, start=0, end=num_tokens)])
    borders = even_stages([prompt_s[layer] for layer in model.layers], num_stages)
    links = LinkRates(subject.placement(Mesh(cp=num_stages)).links, subject.profile.name)
    scope = "node" if num_stages <= subject.devices_per_node else "network"
    free_s = [0.0] * num_stages
    used_s = 0.0
    for start, end in pairwise(starts):
        seconds = costs.layer_seconds([Slice(job=0, start=start, end=end)])
        num_bytes = (end - start) * model.hidden * model.element_bytes
        hop_s = links.seconds("send", scope, ranks=2, num_bytes=num_bytes) if num_stages > 1 else 0.0
        arrived_s = 0.0
        for stage, (first, last) in enumerate(pairwise(borders)):
            stage_s = sum(seconds[layer] for layer in model.layers[first:last])
            stage_s += subject.profile.overheads.step_s / num_stages
            used_s += stage_s
            free_s[stage] = max(free_s[stage], arrived_s) + stage_s
            arrived_s = free_s[stage] + hop_s
    return PipelineTime(free_s[-1], chunk_tokens, 1.0 - used_s / (num_stages * free_s[-1]))
