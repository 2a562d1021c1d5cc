"""Draws lines over time as an SVG file: a few series of points, with axes and a legend, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 340, 70, 45, 40
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
LINES = 5  # lines of the grid
MOST = 900  # points per line: more than pixels add nothing


def save(path: Path, title: str, unit: str, series: Mapping[str, Points]) -> None:
    """Draw `series`, each a name and its points (minutes, value)."""
    across = max((x for points in series.values() for x, _ in points), default=1.0) or 1.0
    highest = max((y for points in series.values() for _, y in points), default=1.0) or 1.0
    step = 10 ** math.floor(math.log10(highest)) / 2
    up = LINES * step * math.ceil(highest / LINES / step)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        *_axes(across, up, unit),
    ]
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        thin = points[:: max(1, len(points) // MOST)]
        drawn = " ".join(f"{_x(x, across):.1f},{_y(y, up):.1f}" for x, y in thin)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        parts.append(f'<text x="{WIDTH - 190}" y="{20 + 15 * number}" fill="{colour}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))


def _axes(across: float, up: float, unit: str) -> list[str]:
    parts = []
    for step in range(LINES + 1):
        y, x = up * step / LINES, across * step / LINES
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{_y(y, up):.1f}" y2="{_y(y, up):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{_y(y, up) + 4:.1f}" text-anchor="end">{y:,.0f}</text>'
            f'<text x="{_x(x, across):.1f}" y="{HEIGHT - 25}" text-anchor="middle">{x:.0f}</text>'
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">minutes</text>')
    parts.append(f'<text x="8" y="{TOP - 4}">{escape(unit)}</text>')
    return parts


def _x(x: float, across: float) -> float:
    return LEFT + x / across * (WIDTH - LEFT - 20)


def _y(y: float, up: float) -> float:
    return HEIGHT - BOTTOM - y / up * (HEIGHT - BOTTOM - TOP)
