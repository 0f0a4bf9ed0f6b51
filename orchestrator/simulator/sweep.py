"""Scaling of one prompt over 1 to 1,024 devices, from counted work: how long, how efficient, and what is lost to what.

Efficiency is a product, and so is what one can do about it:

    T1 / (P T_P) = work x load balance x serialisation x transfer

work: T1 over the work that P devices do together (summaries, folds, halos are extra); load balance: mean over fullest
rank; serialisation: fullest rank's work over that and all waiting for one another; transfer: all but exposed traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from longprefill.orchestrator.costs.prompt import PromptTime, prompt_time
from longprefill.orchestrator.costs.step import StepCosts
from longprefill.orchestrator.simulator.pipeline import pipeline_time
from longprefill.orchestrator.simulator.subject import Subject
from longprefill.partition.generators import LayoutKind, contiguous
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.work import Exchange, step_flops

DEVICES = tuple(1 << power for power in range(11))
STEP_TOKENS_PER_DEVICE = 16_384
"""A step gives every device at most this much, as its activations would limit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One prompt on P devices."""

    scaling: str
    """strong: the same prompt; weak: the same tokens a device."""
    exchange: str
    devices: int
    tokens: int
    step_tokens: int
    layout: str
    seconds: float
    speed_up: float
    """T1 / T_P of the same prompt."""
    efficiency: float
    """T1 / (P T_P)."""
    flops_per_s_per_device: float
    """Useful work: what one device would count for the prompt."""
    of_gemm_rate: float | None
    """The same over the device's rate for projections: an efficiency of another kind. None: no such rate is given."""
    work: float
    load_balance: float
    serialisation: float
    transfer: float
    pipeline_s: float | None
    """Chunked pipeline parallelism instead; none beyond one layer a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRow:
    """The same prompt and devices with one thing changed."""

    what: str
    value: float
    seconds: float
    over_base: float


def strong_scaling(subject: Subject, num_tokens: int, devices: Sequence[int] = DEVICES) -> list[ScalingRow]:
    """One prompt on more and more devices, by every exchange of KDA states."""
    return [
        _row("strong", subject, exchange, num_tokens, num_devices)
        for exchange in get_args(Exchange)
        for num_devices in devices
    ]


def weak_scaling(subject: Subject, tokens_per_device: int, devices: Sequence[int] = DEVICES) -> list[ScalingRow]:
    """A prompt that grows with the devices; work grows faster, so efficiency compares with the same prompt alone."""
    return [
        _row("weak", subject, "head_transposed", tokens_per_device * num_devices, num_devices)
        for num_devices in devices
    ]


def sensitivity(subject: Subject, num_tokens: int, num_devices: int) -> list[SensitivityRow]:
    """What slower links, longer latencies, one slow device and failures do to one prompt."""
    base = _best(subject.costs(num_devices), num_tokens)

    def changed(*, bandwidth: float = 1.0, latency: float = 1.0) -> float:
        other = subject.with_links(bandwidth=bandwidth, latency=latency)
        return _best(other.costs(num_devices), num_tokens).time.seconds

    rows: list[tuple[str, float, float]] = []
    for factor in (0.1, 0.25, 0.5, 2.0, 4.0):
        rows.append(("bandwidth", factor, changed(bandwidth=factor)))
    for factor in (0.1, 10.0, 100.0):
        rows.append(("latency", factor, changed(latency=factor)))
    for factor in (1.05, 1.1, 1.25, 1.5, 2.0):
        # an even cut waits for the slowest: all of its extra time is everybody's
        rows.append(("slow device", factor, base.time.seconds + (factor - 1.0) * base.time.max_work_s))
    for hours in (24.0, 240.0, 2400.0):
        rows.append(("device MTBF, h", hours, _with_failures(base, num_tokens, num_devices, hours * 3600)))
    return [
        SensitivityRow(what=what, value=value, seconds=seconds, over_base=seconds / base.time.seconds)
        for what, value, seconds in rows
    ]


REFORM_S = 30.0
"""Detecting a failure and forming the group again, weights included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    time: PromptTime
    step_tokens: int
    layout: LayoutKind


def _with_failures(best: _Best, num_tokens: int, num_devices: int, mtbf_s: float) -> float:
    """Expected seconds when a failure costs half a step and forming the group again."""
    num_steps = -(-num_tokens // best.step_tokens)
    loss_s = best.time.seconds / num_steps / 2 + REFORM_S
    return best.time.seconds * (1.0 + num_devices / mtbf_s * loss_s)


def _row(scaling: str, subject: Subject, exchange: Exchange, num_tokens: int, num_devices: int) -> ScalingRow:
    alone_s = _best(subject.costs(1, exchange), num_tokens).time.seconds
    best = _best(subject.costs(num_devices, exchange), num_tokens)
    time = best.time
    whole = contiguous([Slice(job=0, start=0, end=num_tokens)], 1)
    rate = step_flops(whole, subject.shape(), exchange)[0].total / (num_devices * time.seconds)
    gemm = subject.profile.rates.get("gemm")
    working_s = time.max_work_s + time.waiting_s + time.host_s
    pipeline = pipeline_time(subject, num_tokens, num_devices)
    return ScalingRow(
        scaling=scaling,
        exchange=exchange,
        devices=num_devices,
        tokens=num_tokens,
        step_tokens=best.step_tokens,
        layout=best.layout,
        seconds=time.seconds,
        speed_up=alone_s / time.seconds,
        efficiency=alone_s / (num_devices * time.seconds),
        flops_per_s_per_device=rate,
        of_gemm_rate=None if gemm is None else rate / (gemm.flops_per_s * gemm.efficiency),
        work=alone_s / (num_devices * time.mean_work_s),
        load_balance=time.mean_work_s / time.max_work_s,
        serialisation=time.max_work_s / working_s,
        transfer=working_s / time.seconds,
        pipeline_s=None if pipeline is None else pipeline.seconds,
    )


def _best(costs: StepCosts, num_tokens: int) -> _Best:
    """The faster layout for a prompt."""
    num_devices = costs.placement.num_devices
    step = min(STEP_TOKENS_PER_DEVICE * num_devices, -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS)
    kinds: tuple[LayoutKind, ...] = ("zigzag",) if num_devices == 1 else ("zigzag", "contiguous")
    found = [_Best(time=prompt_time(costs, num_tokens, step, kind), step_tokens=step, layout=kind) for kind in kinds]
    return min(found, key=lambda best: best.time.seconds)
