"""Charts as PNG bytes: lines and dot-matrix text on a white ground, deflated. Equal charts give equal bytes.

# H height, W width
"""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise

import numpy as np

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
from longprefill.orchestrator.simulator.plots.font import COLUMNS, GLYPHS, UNKNOWN

SCALE = 2
"""Pixels of the image a pixel of the chart."""
INK, GREY = (0x22, 0x22, 0x22), (0xDD, 0xDD, 0xDD)


def png(chart: Chart) -> bytes:
    """The whole file: 8-bit RGB."""
    picture = np.full((HEIGHT * SCALE, WIDTH * SCALE, 3), 255, dtype=np.uint8)
    x_axis, y_axis = axes(chart)
    for tick in x_axis.ticks:
        at = x_axis.pixel(tick)
        _stroke(picture, (at, TOP), (at, HEIGHT - BOTTOM), GREY, 1)
        _write(picture, at, HEIGHT - BOTTOM + 8, label(tick), 0.5)
    for tick in y_axis.ticks:
        at = y_axis.pixel(tick)
        _stroke(picture, (LEFT, at), (WIDTH - RIGHT, at), GREY, 1)
        _write(picture, LEFT - 6, at - 3, label(tick), 1.0)
    for place, line in enumerate(chart.lines):
        text = COLOURS[place % len(COLOURS)].removeprefix("#")
        colour = (int(text[:2], 16), int(text[2:4], 16), int(text[4:], 16))
        points = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in drawable(chart, line)]
        for first, second in pairwise(points):
            _stroke(picture, first, second, colour, 2 * SCALE)
        if len(points) <= 40:
            for point in points:
                _stroke(picture, point, point, colour, 6 * SCALE)
        at = TOP + 10 + 16 * place
        _stroke(picture, (LEFT + 10, at), (LEFT + 24, at), colour, 3 * SCALE)
        _write(picture, LEFT + 30, at - 3, line.name, 0.0)
    _write(picture, WIDTH / 2, 14, chart.title, 0.5)
    _write(picture, WIDTH / 2, HEIGHT - 18, chart.x_title, 0.5)
    _write(picture, LEFT - 60, TOP - 16, chart.y_title, 0.0)
    return encode(picture)


def encode(picture: np.ndarray) -> bytes:
    """[H, W, 3] uint8 as a PNG file."""
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), picture.reshape(height, width * 3)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _stroke(
    picture: np.ndarray,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: tuple[int, int, int],
    thickness: int,
) -> None:
    """Squares of `thickness` pixels along a line, a step of one pixel apart."""
    x0, y0, x1, y1 = (round(value * SCALE) for value in (*start, *end))
    num = max(abs(x1 - x0), abs(y1 - y0)) + 1
    across, down = np.linspace(x0, x1, num).round().astype(int), np.linspace(y0, y1, num).round().astype(int)
    for shift_y in range(-(thickness // 2), thickness - thickness // 2):
        for shift_x in range(-(thickness // 2), thickness - thickness // 2):
            rows = np.clip(down + shift_y, 0, picture.shape[0] - 1)
            columns = np.clip(across + shift_x, 0, picture.shape[1] - 1)
            picture[rows, columns] = colour


def _write(picture: np.ndarray, x: float, y: float, text: str, anchor: float) -> None:
    """Text whose top is at y; `anchor` is the share of its width that lies left of x."""
    width = len(text) * (COLUMNS + 1)
    left, top = round((x - anchor * width) * SCALE), round(y * SCALE)
    for character in text.upper():
        for row, dots in enumerate(GLYPHS.get(character, UNKNOWN)):
            for column in range(COLUMNS):
                if dots >> (COLUMNS - 1 - column) & 1:
                    above, beside = top + row * SCALE, left + column * SCALE
                    picture[max(above, 0) : above + SCALE, max(beside, 0) : beside + SCALE] = INK
        left += (COLUMNS + 1) * SCALE
