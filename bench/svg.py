"""A small SVG writer for figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

WIDTH = 720
INK, FAINT = "#24292f", "#8c959f"


class Svg:
    """A file of shapes in pixel coordinates. Title and description are for screen readers."""

    def __init__(self, height: int, title: str, description: str, width: int = WIDTH) -> None:
        self._width, self._height = width, height
        self._shapes = [
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self._shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>')

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1, dashes: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>')

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, stroke: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polygon points="{path}" fill="{fill}" stroke="{stroke}"/>')

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str) -> None:
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" stroke="{stroke}"/>')

    def text(self, x: float, y: float, words: str, color: str = INK, anchor: str = "start", size: int = 13) -> None:
        style = f'fill="{color}" font-size="{size}" text-anchor="{anchor}"'
        self._shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>')

    def write(self, path: Path) -> None:
        box = f'viewBox="0 0 {self._width} {self._height}" font-family="sans-serif"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-labelledby="title desc">'
        path.write_text("\n".join([head, *self._shapes, "</svg>", ""]), encoding="utf-8")
