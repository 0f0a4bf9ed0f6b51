"""Scaling of one prompt over 1 to 1,024 devices, from counted work: how long, how efficient, and what is lost to what.

Efficiency is a product, and so is what one can do about it:

    T1 / (P T_P) = work x load balance x serialisation x transfer

work: T1 over the work that P devices do together (summaries, folds, halos are extra); load balance: mean over fullest
rank; serialisation: fullest rank's work over that and all waiting for one another; transfer: all but exposed traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from longprefill.orchestrator.simulator.costs import DeviceProfile, StepTime, WorkCosts
from longprefill.orchestrator.simulator.pipeline import pipeline_time
from longprefill.partition.generators import LayoutKind, contiguous
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.shapes import ModelShape
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
    of_gemm_rate: float
    """The same over the device's rate for projections: an efficiency of another kind."""
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


def strong_scaling(
    model: ModelShape, device: DeviceProfile, num_tokens: int, devices: Sequence[int] = DEVICES
) -> list[ScalingRow]:
    """One prompt on more and more devices, by every exchange of KDA states."""
    return [
        _row("strong", model, device, exchange, num_tokens, num_devices)
        for exchange in get_args(Exchange)
        for num_devices in devices
    ]


def weak_scaling(
    model: ModelShape, device: DeviceProfile, tokens_per_device: int, devices: Sequence[int] = DEVICES
) -> list[ScalingRow]:
    """A prompt that grows with the devices; work grows faster, so efficiency compares with the same prompt alone."""
    return [
        _row("weak", model, device, "head_transposed", tokens_per_device * num_devices, num_devices)
        for num_devices in devices
    ]


def sensitivity(model: ModelShape, device: DeviceProfile, num_tokens: int, num_devices: int) -> list[SensitivityRow]:
    """What slower links, longer latencies, one slow device and failures do to one prompt."""
    base = _best(WorkCosts(model, device, "head_transposed"), num_tokens, num_devices)

    def changed(**rates: float) -> float:
        other = replace(device, **rates)  # pyright: ignore[reportArgumentType]
        return _best(WorkCosts(model, other, "head_transposed"), num_tokens, num_devices).time.total_s

    rows: list[tuple[str, float, float]] = []
    for factor in (0.1, 0.25, 0.5, 2.0, 4.0):
        rows.append(("bandwidth", factor, changed(link_bytes_per_s=device.link_bytes_per_s * factor)))
    for factor in (0.1, 10.0, 100.0):
        rows.append(("latency", factor, changed(link_latency_s=device.link_latency_s * factor)))
    for factor in (1.05, 1.1, 1.25, 1.5, 2.0):
        # an even cut waits for the slowest: all of its extra time is everybody's
        rows.append(("slow device", factor, base.time.total_s + (factor - 1.0) * base.time.max_compute_s))
    for hours in (24.0, 240.0, 2400.0):
        rows.append(("device MTBF, h", hours, _with_failures(base, num_tokens, num_devices, hours * 3600)))
    return [
        SensitivityRow(what=what, value=value, seconds=seconds, over_base=seconds / base.time.total_s)
        for what, value, seconds in rows
    ]


REFORM_S = 30.0
"""Detecting a failure and forming the group again, weights included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    time: StepTime
    step_tokens: int
    layout: LayoutKind


def _with_failures(best: _Best, num_tokens: int, num_devices: int, mtbf_s: float) -> float:
    """Expected seconds when a failure costs half a step and forming the group again."""
    num_steps = -(-num_tokens // best.step_tokens)
    loss_s = best.time.total_s / num_steps / 2 + REFORM_S
    return best.time.total_s * (1.0 + num_devices / mtbf_s * loss_s)


def _row(
    scaling: str, model: ModelShape, device: DeviceProfile, exchange: Exchange, num_tokens: int, num_devices: int
) -> ScalingRow:
    costs = WorkCosts(model, device, exchange)
    alone_s = _best(costs, num_tokens, 1).time.total_s
    best = _best(costs, num_tokens, num_devices)
    time = best.time
    flops = step_flops(contiguous([Slice(job=0, start=0, end=num_tokens)], 1), model, exchange)[0].total
    rate = flops / (num_devices * time.total_s)
    waiting_s = time.max_compute_s + time.chain_s + time.overhead_s
    pipeline = pipeline_time(model, device, num_tokens, num_devices)
    return ScalingRow(
        scaling=scaling,
        exchange=exchange,
        devices=num_devices,
        tokens=num_tokens,
        step_tokens=best.step_tokens,
        layout=best.layout,
        seconds=time.total_s,
        speed_up=alone_s / time.total_s,
        efficiency=alone_s / (num_devices * time.total_s),
        flops_per_s_per_device=rate,
        of_gemm_rate=rate / device.gemm_flops_per_s,
        work=alone_s / (num_devices * time.mean_compute_s),
        load_balance=time.mean_compute_s / time.max_compute_s,
        serialisation=time.max_compute_s / waiting_s,
        transfer=waiting_s / time.total_s,
        pipeline_s=None if pipeline is None else pipeline.seconds,
    )


def _best(costs: WorkCosts, num_tokens: int, num_devices: int) -> _Best:
    """The faster layout for a prompt."""
    step = min(STEP_TOKENS_PER_DEVICE * num_devices, -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS)
    kinds: tuple[LayoutKind, ...] = ("zigzag",) if num_devices == 1 else ("zigzag", "contiguous")
    found = [
        _Best(time=_prompt_time(costs, num_tokens, step, kind, num_devices), step_tokens=step, layout=kind)
        for kind in kinds
    ]
    return min(found, key=lambda best: best.time.total_s)


def _prompt_time(costs: WorkCosts, num_tokens: int, step: int, kind: LayoutKind, num_devices: int) -> StepTime:
    """The sum of all steps. Between the first step and the last a step's time is near linear in its start, so of many
    steps three stand for all (Simpson's rule)."""
    starts = list(range(0, num_tokens, step))
    if len(starts) <= 3:
        chosen = [(start, 1.0) for start in starts]
    else:
        full = [start for start in starts if start + step <= num_tokens]
        weight = len(full) / 6
        chosen = [
            (full[0], weight),
            ((full[0] + full[-1]) // 2 // PAGE_TOKENS * PAGE_TOKENS, 4 * weight),
            (full[-1], weight),
        ]
        chosen += [(start, 1.0) for start in starts if start + step > num_tokens]
    total = [0.0] * 6
    for start, weight in chosen:
        piece = Slice(job=0, start=start, end=min(start + step, num_tokens))
        time = costs.step_time([piece], kind, num_devices)
        parts = (
            time.alone_s,
            time.mean_compute_s,
            time.max_compute_s,
            time.chain_s,
            time.transfer_s,
            time.overhead_s,
        )
        total = [sum_s + weight * part for sum_s, part in zip(total, parts, strict=True)]
    return StepTime(
        alone_s=total[0],
        mean_compute_s=total[1],
        max_compute_s=total[2],
        chain_s=total[3],
        transfer_s=total[4],
        overhead_s=total[5],
    )
