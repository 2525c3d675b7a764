"""Charts of measured values: distributions, time series, bars with errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.runtime.report.svg import DASHES, FAINT, GROUND, INK, PANEL, RULE, Svg, round_steps, series
from llmc.runtime.report.words import number

_BINS = 48
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 22, 40


def histogram(
    values: Sequence[float] | npt.NDArray[np.float64], title: str, unit: str, width: int = 560, height: int = 230
) -> str:
    """Distribution of values, with median, 90th and 99th percentile. Values beyond the 99.9th are in the last bar, to
    leave room for the others."""
    array = np.asarray(values, np.float64)
    if not array.size:
        return f"<p>No {title.lower()} were measured.</p>"
    p50, p90, p99, top = (float(v) for v in np.percentile(array, (50, 90, 99, 99.9)))
    low = float(array.min())
    steps = round_steps(low, top if top > low else low + max(abs(low), 1e-9))
    start = 0.0 if low >= 0 else steps[0]
    end = steps[-1]
    counts, _ = np.histogram(np.clip(array, start, end), _BINS, (start, end))
    svg = Svg(
        width,
        height,
        f"Histogram of {title}, {unit}",
        f"{array.size} values; median {number(p50)}, 90th percentile {number(p90)}, 99th {number(p99)}, largest "
        f"{number(float(array.max()))} {unit}.",
    )
    across, deep, base = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM, height - _BOTTOM
    svg.rect(_LEFT, _TOP, across, deep, PANEL)
    ticks = [step for step in round_steps(0, float(counts.max())) if step == int(step)]
    most = max(ticks[-1], 1)
    for tick in ticks:
        y = base - tick / most * deep
        svg.line([(_LEFT, y), (width - _RIGHT, y)], RULE)
        svg.text(_LEFT - 6, y + 4, f"{tick:,.0f}", anchor="end")
    size = across / _BINS
    for n, count in enumerate(counts):
        if count:
            left, right = (start + (end - start) * (n + side) / _BINS for side in (0, 1))
            high = count / most * deep
            words = f"{number(left)} to {number(right)} {unit}: {count:,}"
            svg.rect(_LEFT + n * size + 0.4, base - high, size - 0.8, high, series(0), words)
    for step in steps:
        if step >= start:
            svg.text(_LEFT + (step - start) / (end - start) * across, base + 15, number(step), anchor="middle")
    drawn = 0.0
    for place, (name, value) in enumerate((("p50", p50), ("p90", p90), ("p99", p99))):
        x = _LEFT + min((value - start) / (end - start), 1.0) * across
        svg.line([(x, _TOP - 2), (x, base)], INK, 1.3, DASHES[place])
        drawn = max(x, drawn + 24)
        svg.text(drawn, _TOP - 6, name, INK, "middle", 10)
    svg.text(_LEFT, height - 6, unit)
    return svg.html()


@dataclass(frozen=True)
class Curve:
    """A value over x, both ascending in x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    steps: bool = False


def curves(
    title: str,
    lines: Sequence[Curve],
    x_name: str,
    y_name: str,
    width: int = 560,
    height: int = 230,
    text: Callable[[float], str] = number,
) -> str:
    """Curves on shared axes; the area under the first is tinted. steps: a value holds until the next."""
    right = max((max(line.x) for line in lines if len(line.x)), default=1.0) or 1.0
    most = max((max(line.y) for line in lines if len(line.y)), default=1.0)
    least = min(0.0, min((min(line.y) for line in lines if len(line.y)), default=0.0))
    ys = [step for step in round_steps(least, most or 1.0) if step >= least - 1e-12]
    low, high = min(ys[0], least), ys[-1]
    svg = Svg(width, height, title, f"{y_name} over {x_name}; at most {text(most)}.")
    base = height - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / right * (width - _LEFT - _RIGHT)
        return across, base - (y - low) / (high - low) * (height - _TOP - _BOTTOM)

    for y in ys:
        svg.line([at(0, y), at(right, y)], RULE)
        svg.text(_LEFT - 6, at(0, y)[1] + 4, text(y), anchor="end")
    for x in round_steps(0, right):
        if x <= right * 1.0001:
            svg.text(at(x, 0)[0], base + 15, number(x), anchor="middle")
    for n, line in enumerate(lines):
        points = [at(x, y) for x, y in zip(line.x, line.y, strict=True)]
        if line.steps:
            points = [p for a, b in zip(points, [*points[1:], points[-1]], strict=True) for p in (a, (b[0], a[1]))]
        if n == 0 and points:
            svg.area([(points[0][0], base), *points, (points[-1][0], base)], series(0))
        svg.line(points, series(n), 1.8, DASHES[n % len(DASHES)])
    svg.text(_LEFT, height - 6, x_name)
    svg.text(6, 12, y_name, size=10)
    return svg.html()


def error_bars(title: str, rows: Sequence[tuple[str, float, float | None]], width: int = 1180) -> str:
    """One bar per row: (name, value 0 … 1, standard error or None); whiskers are two errors to each side."""
    line, left, right, top = 24, 230, 60, 10
    height = top + line * len(rows) + 26
    svg = Svg(width, height, title, "The table beside it has the same figures.")
    across, base = width - left - right, height - 26
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share * across
        svg.line([(x, top), (x, base)], RULE)
        svg.text(x, base + 15, f"{share:g}", anchor="middle")
    for n, (name, value, error) in enumerate(rows):
        y = top + n * line
        svg.text(left - 8, y + 15, name if len(name) < 36 else f"{name[:34]}…", INK, "end")
        svg.rect(left, y + 4, min(max(value, 0.0), 1.0) * across, line - 9, series(0), f"{name}: {value:.4f}")
        if error:
            low, high = (left + min(max(value + side * error, 0.0), 1.0) * across for side in (-2, 2))
            middle = y + 4 + (line - 9) / 2
            svg.line([(low, middle), (high, middle)], GROUND, 4)
            svg.line([(low, middle), (high, middle)], INK, 1.6)
        svg.text(width - right + 8, y + 15, f"{value:.4f}", INK)
    svg.line([(left, top), (left, base)], FAINT)
    return svg.html()


def rate_over_time(times_s: Sequence[float], duration_s: float, bins: int = 60) -> Curve:
    """Events per second, in equal bins from 0 to duration_s."""
    end = max(duration_s, 1e-9)
    bins = max(1, min(bins, math.ceil(len(times_s) / 4)))
    counts, edges = np.histogram(np.asarray(times_s, np.float64), bins, (0.0, end))
    width = end / bins
    return Curve("rate", [*map(float, edges)], [*(float(c) / width for c in counts), float(counts[-1]) / width], True)


def running_over_time(spans_s: Sequence[tuple[float, float]]) -> Curve:
    """The number of (start, end) spans in progress, at each change."""
    changes = sorted(change for start, end in spans_s for change in ((start, 1), (end, -1)))
    xs, ys, running = [0.0], [0.0], 0
    for when, by in changes:
        running += by
        xs.append(when)
        ys.append(float(running))
    return Curve("running", xs, ys, True)
