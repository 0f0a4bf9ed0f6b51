"""A line chart as data, and where its parts lie. Coordinates are pixels from the top left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 72, 20, 40, 52
COLOURS = ("#1f6fb4", "#d95f02", "#2a9d4b", "#b5297a", "#7a5fc0", "#8c6d1f", "#444444")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"line {self.name!r} has {len(self.x)} x and {len(self.y)} y")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over two axes. On a logarithmic axis points that are not positive are left out."""

    title: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    is_x_log: bool = False
    is_y_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: values to pixels, and labelled ticks."""

    low: float
    high: float
    start: float
    """Pixel of `low`."""
    end: float
    """Pixel of `high`."""
    is_log: bool
    ticks: tuple[float, ...]

    def pixel(self, value: float) -> float:
        if self.is_log:
            share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def axes(chart: Chart) -> tuple[Axis, Axis]:
    """The x and the y axis that hold all points."""
    points = [point for line in chart.lines for point in drawable(chart, line)]
    x_values, y_values = [x for x, _ in points], [y for _, y in points]
    x_axis = _axis(x_values, chart.is_x_log, LEFT, WIDTH - RIGHT, from_zero=False)
    return x_axis, _axis(y_values, chart.is_y_log, HEIGHT - BOTTOM, TOP, from_zero=True)


def drawable(chart: Chart, line: Line) -> list[tuple[float, float]]:
    """The points that the chart's axes can show."""
    return [
        (x, y)
        for x, y in zip(line.x, line.y, strict=True)
        if abs(x) < float("inf")
        and abs(y) < float("inf")
        and (x > 0 or not chart.is_x_log)
        and (y > 0 or not chart.is_y_log)
    ]


def label(value: float) -> str:
    """A tick's text: short, with k, M, G for thousands."""
    for limit, ending in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{ending}"
    return f"{value:g}"


def _axis(values: Sequence[float], is_log: bool, start: float, end: float, *, from_zero: bool) -> Axis:
    low, high = (min(values), max(values)) if values else (0.0, 1.0) if not is_log else (1.0, 10.0)
    if is_log:
        first, last = floor(log10(low) + 1e-9), max(ceil(log10(high) - 1e-9), floor(log10(low) + 1e-9) + 1)
        ticks = tuple(10.0**power for power in range(first, last + 1))
        return Axis(low=ticks[0], high=ticks[-1], start=start, end=end, is_log=True, ticks=ticks)
    low = min(low, 0.0) if from_zero else low
    if high <= low:
        high = low + 1.0
    step = _nice((high - low) / 6)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    ticks = tuple(round(number * step, 12) for number in range(first, last + 1))
    return Axis(low=ticks[0], high=ticks[-1], start=start, end=end, is_log=False, ticks=ticks)


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if step <= factor * power * (1 + 1e-9))
