"""Roofline plot: speed of each engine under the machine's limits."""

from __future__ import annotations

import math
from pathlib import Path

from bench.peers.report import Point, Report
from bench.svg import FAINT, INK, Svg

COLORS = {
    "llmc": "#cf222e",
    "llama.cpp": "#8250df",
    "openvino": "#0969da",
    "vllm": "#bf8700",
    "transformers": "#6e7781",
}
SPARE_COLORS = ("#1a7f37", "#bf3989", "#953800")
PEAKS = {"f32": "f32 FMA", "bf16": "bf16 dot", "int8": "int8 dot"}
WIDTH, HEIGHT = 1000, 640
LEFT, RIGHT, TOP, BOTTOM = 78, WIDTH - 190, 64, HEIGHT - 62


class Axes:
    """Maps logarithmic coordinates x and y to pixels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])
        up = math.log(y / self.y[0]) / math.log(self.y[1] / self.y[0])
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def decades(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times powers of ten within a range."""
    found = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [factor * 10.0**exponent for factor in (1, 2, 5)]
    return [value for value in found if low <= value <= high]


def roofline(report: Report, model: str, path: Path) -> None:
    """Writes the plot of a model as SVG: median GFLOP/s over operations per byte. Points of a variant are joined."""
    points = [p for p in report.points.values() if p.model == model and p.work is not None and p.rate is not None]
    limits = {name: spread.median for name, spread in report.limits().items()}
    if not points or "read" not in limits:
        return
    peaks = {name: limits[name] for name in PEAKS if name in limits}
    across = [p.work.intensity for p in points if p.work]
    up = [p.rate for p in points if p.rate]
    axes = Axes((min(across) / 1.6, max(across) * 1.6), (min(up) / 2, max([*up, *peaks.values()]) * 1.6))
    title = f"{model}: every engine beside the limits of the machine"
    told = f"A log-log plot of {len(points)} points: operations a second over operations a byte, below the roof."
    svg = Svg(HEIGHT, title, told, WIDTH)
    svg.text(LEFT, 26, title, size=17)
    svg.text(LEFT, 46, f"{report.store.machine['cpu']}, {report.store.settings.threads} threads; medians", FAINT)
    draw_grid(svg, axes)
    draw_roof(svg, axes, limits["read"], peaks)
    for kind, words in (("decode", "decode, batches of {}"), ("prefill", "prompts of {} tokens")):
        own = [p for p in points if p.figure.startswith(kind)]
        sizes = sorted({int(p.figure.partition(":")[2]) for p in own})
        if own:
            middle = sum(place(axes, p)[0] for p in own) / len(own)
            svg.text(middle, BOTTOM - 10, words.format(", ".join(map(str, sizes))), FAINT, "middle", 12)
    names = dict.fromkeys((p.engine, p.variant, p.precision) for p in points)
    spare = iter(SPARE_COLORS)
    colors = {engine: COLORS.get(engine) or next(spare, INK) for engine in dict.fromkeys(p.engine for p in points)}
    for engine, variant, precision in names:
        own = [p for p in points if (p.engine, p.variant) == (engine, variant)]
        for kind in ("decode", "prefill"):
            line = sorted((p for p in own if p.figure.startswith(kind)), key=lambda p: int(p.figure.partition(":")[2]))
            places = [place(axes, p) for p in line]
            if len(places) > 1:
                svg.line(places, colors[engine], 1)
            for x, y in places:
                mark(svg, x, y, precision, colors[engine])
    draw_legend(svg, list(names), colors)
    svg.write(path)


def place(axes: Axes, point: Point) -> tuple[float, float]:
    assert point.work is not None
    assert point.rate is not None
    return axes.at(point.work.intensity, point.rate)


def draw_grid(svg: Svg, axes: Axes) -> None:
    for value in decades(*axes.x):
        x, _ = axes.at(value, axes.y[0])
        svg.line([(x, TOP), (x, BOTTOM)], "#eaeef2")
        svg.text(x, BOTTOM + 18, f"{value:g}", FAINT, "middle", 11)
    for value in decades(*(bound / 1e9 for bound in axes.y)):
        _, y = axes.at(axes.x[0], value * 1e9)
        svg.line([(LEFT, y), (RIGHT, y)], "#eaeef2")
        svg.text(LEFT - 8, y + 4, f"{value:g}", FAINT, "end", 11)
    svg.text((LEFT + RIGHT) / 2, BOTTOM + 42, "operations a byte that must come from memory", INK, "middle")
    svg.text(LEFT - 8, TOP - 6, "GFLOP/s", INK, "end", 12)


def draw_roof(svg: Svg, axes: Axes, read: float, peaks: dict[str, float]) -> None:
    """Draws the slope of memory up to the highest peak, and a ceiling for each arithmetic."""
    top = max(peaks.values(), default=axes.y[1])
    begin = max(axes.x[0], axes.y[0] / read)
    svg.line([axes.at(begin, begin * read), axes.at(top / read, top)], INK, 2)
    x, y = axes.at(top / read, top)
    svg.text(x - 40, y + 32, f"reading memory, {read / 1e9:.3g} GB/s", INK, "end", 12)
    for name, peak in peaks.items():
        svg.line([axes.at(peak / read, peak), axes.at(axes.x[1], peak)], INK, 2)
        x, y = axes.at(axes.x[1], peak)
        svg.text(x + 6, y + 4, f"{PEAKS[name]} {peak / 1e9:.0f}", INK, size=12)


def mark(svg: Svg, x: float, y: float, precision: str, color: str) -> None:
    """Draws a mark by the precision of weights: circle 16 bit, square int8, diamond int4, triangle 32 bit."""
    if precision == "int8":
        svg.polygon([(x - 4, y - 4), (x + 4, y - 4), (x + 4, y + 4), (x - 4, y + 4)], color, "white")
    elif precision == "int4":
        svg.polygon([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], color, "white")
    elif precision == "32-bit":
        svg.polygon([(x, y - 6), (x + 5, y + 4), (x - 5, y + 4)], color, "white")
    else:
        svg.circle(x, y, 4.5, color, "white")


def draw_legend(svg: Svg, names: list[tuple[str, str, str]], colors: dict[str, str]) -> None:
    """Draws the legend below the names of ceilings."""
    y = float(BOTTOM - 18 * len(names) - 50)
    for engine, variant, precision in names:
        mark(svg, RIGHT + 18, y - 4, precision, colors[engine])
        svg.text(RIGHT + 30, y, f"{engine} {variant}", size=12)
        y += 18
    svg.text(RIGHT + 12, y + 8, "right end of a line: the", FAINT, size=11)
    svg.text(RIGHT + 12, y + 22, "largest batch or prompt", FAINT, size=11)
