"""Grids of shares as one picture, SVG or PNG: red for none, green for all, the percentage in each cell.

Equal grids give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from longprefill.orchestrator.simulator.plots.font import COLUMNS, GLYPHS, UNKNOWN
from longprefill.orchestrator.simulator.plots.png import encode

CELL_WIDTH, CELL_HEIGHT = 64, 26
LEFT, TOP, GAP, BOTTOM = 84, 72, 72, 40
SCALE = 2
"""Pixels of the PNG a pixel of the SVG."""
BAD, MIDDLE, GOOD, NOTHING = (0xD7, 0x45, 0x3A), (0xF6, 0xD8, 0x6B), (0x3F, 0xA3, 0x5C), (0xEE, 0xEE, 0xEE)
INK = (0x22, 0x22, 0x22)
ROWS_TITLE, COLUMNS_TITLE = "depth", "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    title: str
    columns: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    """[rows][columns] from 0 to 1, NaN where nothing was asked; the first row is the start of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    x: float
    y: float
    """Of its middle."""
    words: str
    anchor: str
    size: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    x: int
    y: int
    colour: tuple[int, int, int]


def svg(title: str, grids: Sequence[Grid]) -> str:
    """The whole document."""
    width, height, boxes, texts = _arranged(title, grids)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for box in boxes:
        colour = "#{:02x}{:02x}{:02x}".format(*box.colour)
        size = f'width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}"'
        parts.append(f'<rect x="{box.x + 1}" y="{box.y + 1}" {size} fill="{colour}"/>')
    for text in texts:
        place = f'x="{text.x:.1f}" y="{text.y + text.size * 0.35:.1f}"'
        parts.append(f'<text {place} text-anchor="{text.anchor}" font-size="{text.size}">{escape(text.words)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def png(title: str, grids: Sequence[Grid]) -> bytes:
    """The whole file: 8-bit RGB, the same picture with dot-matrix text."""
    width, height, boxes, texts = _arranged(title, grids)
    picture = np.full((height * SCALE, width * SCALE, 3), 255, dtype=np.uint8)
    for box in boxes:
        rows = slice((box.y + 1) * SCALE, (box.y + CELL_HEIGHT - 1) * SCALE)
        picture[rows, (box.x + 1) * SCALE : (box.x + CELL_WIDTH - 1) * SCALE] = box.colour
    for text in texts:
        _write(picture, text)
    return encode(picture)


def _arranged(title: str, grids: Sequence[Grid]) -> tuple[int, int, list[_Box], list[_Text]]:
    """(width, height, cells, texts) of the grids side by side."""
    boxes: list[_Box] = []
    left = LEFT
    num_rows = max(len(grid.shares) for grid in grids)
    height = TOP + num_rows * CELL_HEIGHT + BOTTOM
    texts: list[_Text] = []
    for grid in grids:
        middle = left + len(grid.columns) * CELL_WIDTH / 2
        texts.append(_Text(x=middle, y=TOP - 16, words=grid.title, anchor="middle", size=13))
        texts.append(_Text(x=left - 8, y=TOP - 16, words=ROWS_TITLE, anchor="end"))
        for row, shares in enumerate(grid.shares):
            y = TOP + row * CELL_HEIGHT
            percent = round(100 * (row + 0.5) / len(grid.shares))
            texts.append(_Text(x=left - 8, y=y + CELL_HEIGHT / 2, words=f"{percent}%", anchor="end"))
            for column, share in enumerate(shares):
                x = left + column * CELL_WIDTH
                boxes.append(_Box(x=x, y=y, colour=_colour(share)))
                words = "-" if share != share else f"{100 * share:.0f}"
                texts.append(_Text(x=x + CELL_WIDTH / 2, y=y + CELL_HEIGHT / 2, words=words, anchor="middle"))
        below = TOP + len(grid.shares) * CELL_HEIGHT + 14
        for column, words in enumerate(grid.columns):
            texts.append(_Text(x=left + (column + 0.5) * CELL_WIDTH, y=below, words=words, anchor="middle"))
        texts.append(_Text(x=left - 8, y=below, words=COLUMNS_TITLE, anchor="end"))
        left += len(grid.columns) * CELL_WIDTH + GAP
    width = left - GAP + 20
    texts.append(_Text(x=width / 2, y=20, words=title, anchor="middle", size=15))
    return width, height, boxes, texts


def _colour(share: float) -> tuple[int, int, int]:
    if share != share:
        return NOTHING
    first, second, part = (BAD, MIDDLE, 2 * share) if share < 0.5 else (MIDDLE, GOOD, 2 * share - 1)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _write(picture: np.ndarray, text: _Text) -> None:
    width = len(text.words) * (COLUMNS + 1)
    left = round((text.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * width) * SCALE)
    top = round((text.y - 3.5) * SCALE)
    for character in text.words.upper():
        for row, dots in enumerate(GLYPHS.get(character, UNKNOWN)):
            for column in range(COLUMNS):
                if dots >> (COLUMNS - 1 - column) & 1:
                    above, beside = top + row * SCALE, left + column * SCALE
                    picture[max(above, 0) : above + SCALE, max(beside, 0) : beside + SCALE] = INK
        left += (COLUMNS + 1) * SCALE
