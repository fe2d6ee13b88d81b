"""A line through a few points as an SVG file: the horizontal axis logarithmic, the vertical one from zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 50


def write_plot(path: Path, points: Sequence[tuple[float, float]], *, title: str, x_label: str, y_label: str) -> None:
    """Draw points (x > 0, y >= 0), at least one, in order of x."""
    lowest, highest = math.floor(math.log10(points[0][0])), math.ceil(math.log10(points[-1][0]))
    highest = max(highest, lowest + 1)
    top = _round_up(max(y for _, y in points) * 1.2)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - lowest) / (highest - lowest)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for decade in range(lowest, highest + 1):
        x, bottom = place(10.0**decade, 0.0)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{10**decade:,}</text>')
    for step in range(5):
        value = top * step / 4
        x, y = place(10.0**lowest, value)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f6feb"/>' for x, y in (place(*p) for p in points)]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
        f"{escape(y_label)}</text>"
    )
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _round_up(value: float) -> float:
    """To one digit."""
    unit = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return math.ceil(value / unit) * unit
