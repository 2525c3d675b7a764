"""SVG pictures in the page's colours, light or dark. No scripts, fonts or files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, FAINT, RULE, PANEL, CELL, GROUND = (
    f"var(--{name})" for name in ("text", "dim", "line", "raised", "cell", "panel")
)
SERIES = tuple(f"var(--s{number})" for number in range(1, 7))
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4")
"""Dash patterns of a chart's curves, so that not only colour distinguishes them; CSS names the first three."""
DASH_NAMES = ("solid", "dashed", "dotted", "dashed", "dashed", "dotted")


def series(index: int) -> str:
    """The colour of a curve, a bar, a ladder."""
    return SERIES[index % len(SERIES)]


def heat(color: str, share: float) -> str:
    """The colour of a heat map cell: empty at 0, `color` at 1."""
    return f"color-mix(in oklab, {color} {100 * min(max(share, 0.0), 1.0):.0f}%, {CELL})"


@dataclass
class Svg:
    """Shapes in pixel coordinates. title, description: for readers who cannot see the picture."""

    width: int
    height: int
    title: str
    description: str = ""
    _shapes: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, title: str = "", stroke: str = ""
    ) -> None:
        edge = f";stroke:{stroke}" if stroke else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
            f' style="fill:{fill}{edge}">{_tip(title)}</rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1, dash: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(
            f'<polyline points="{path}" fill="none" style="stroke:{color}" stroke-width="{width}"{dashed}/>'
        )

    def area(self, points: Sequence[tuple[float, float]], color: str, opacity: float = 0.18) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polygon points="{path}" style="fill:{color}" fill-opacity="{opacity:g}"/>')

    def mark(self, x: float, y: float, shape: str, color: str, size: float = 6, title: str = "") -> None:
        """shape: "circle", "diamond", "square" or "triangle"."""
        s = size
        points = {
            "diamond": [(0, -1.3 * s), (1.3 * s, 0), (0, 1.3 * s), (-1.3 * s, 0)],
            "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
            "triangle": [(0, -1.2 * s), (1.2 * s, s), (-1.2 * s, s)],
        }
        style = f'style="fill:{color};stroke:{GROUND}"'
        if shape == "circle":
            body = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s:g}" {style}>{_tip(title)}</circle>'
        else:
            path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in points[shape])
            body = f'<polygon points="{path}" {style}>{_tip(title)}</polygon>'
        self._shapes.append(body)

    def text(
        self, x: float, y: float, words: str, color: str = "", anchor: str = "start", size: float = 11, on: bool = False
    ) -> None:
        """on: the text is over shapes, and gets an outline."""
        style = f' style="fill:{color}"' if color else ""
        name = ' class="on"' if on else ""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{name}{style}>'
            f"{escape(words)}</text>"
        )

    def html(self) -> str:
        about = f"<desc>{escape(self.description)}</desc>" if self.description else ""
        # Below this width letters are too small; the picture scrolls.
        head = (
            f'<svg viewBox="0 0 {self.width} {self.height}" style="min-width:{self.width * 3 // 4}px" role="img" '
            f'aria-label="{escape(self.title)}">{about}'
        )
        return (
            f'<figure class="scroll" tabindex="0" aria-label="{escape(self.title)}">{head}'
            f"{''.join(self._shapes)}</svg></figure>"
        )


def _tip(title: str) -> str:
    return f"<title>{escape(title)}</title>" if title else ""


def round_steps(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` ticks in steps of 1, 2 or 5 times a power of ten, including 0, the last at or above `high`."""
    rough = max(high - min(low, 0.0), 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(min(low, 0.0) / step), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around positive values, for a logarithmic axis."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return [10.0**n for n in range(first, max(last, first + 1) + 1)]
