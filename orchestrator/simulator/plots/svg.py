"""Charts as SVG text: equal charts give equal bytes."""

from __future__ import annotations

from xml.sax.saxutils import escape

from longprefill.orchestrator.simulator.plots.chart import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    axes,
    drawable,
    label,
)


def svg(chart: Chart) -> str:
    """The whole document."""
    x_axis, y_axis = axes(chart)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, chart.title, "middle", size=15),
        _text(WIDTH / 2, HEIGHT - 10, chart.x_title, "middle"),
        f'<g transform="rotate(-90 16 {HEIGHT / 2})">{_text(16, HEIGHT / 2, chart.y_title, "middle")}</g>',
    ]
    for tick in x_axis.ticks:
        at = x_axis.pixel(tick)
        parts.append(_rule(at, TOP, at, HEIGHT - BOTTOM))
        parts.append(_text(at, HEIGHT - BOTTOM + 18, label(tick), "middle"))
    for tick in y_axis.ticks:
        at = y_axis.pixel(tick)
        parts.append(_rule(LEFT, at, WIDTH - RIGHT, at))
        parts.append(_text(LEFT - 6, at + 4, label(tick), "end"))
    for place, line in enumerate(chart.lines):
        colour = COLOURS[place % len(COLOURS)]
        points = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in drawable(chart, line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 40:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        at = TOP + 14 + 16 * place
        parts.append(f'<rect x="{LEFT + 10}" y="{at - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(LEFT + 30, at - 3, line.name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'
