"""Charts of kernel performance against the machine's limits: a roofline, and memory bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llmc.runtime.report.svg import FAINT, GROUND, INK, PANEL, RULE, Svg, decades
from llmc.runtime.report.words import number

FAMILY_MARKS = {"linear": ("circle", "var(--s1)"), "attention": ("diamond", "var(--s2)")}
_OTHER = ("square", "var(--s6)")
_PEAK_DASHES = {"f32": "", "bf16": "8 3", "int8": "3 3"}
Limits = dict[str, float | None]


def family_of(kernel: dict[str, Any], commands: Sequence[dict[str, Any]]) -> str:
    """The family of the commands that run a kernel."""
    return next((str(c["family"]) for c in commands if c["symbol"] == kernel["name"]), "other")


def roofline(kernels: Sequence[dict[str, Any]], families: Sequence[str], limits: Limits, width: int = 600) -> str:
    """FLOP/s over FLOPs per byte of memory, both logarithmic. kernels: from `profile_data`; those without FLOPs are
    skipped.

    A mark shows its row number in the kernel table.
    """
    height, left, right, top, bottom = 380, 58, 16, 26, 44
    svg = Svg(
        width,
        height,
        "Roofline: GFLOP/s of each kernel over its FLOPs a byte, under the limits of this machine",
        "Each mark has the number of a row in the table of kernels, which has the same figures.",
    )
    shown = [
        (n, k["flops"] / k["memory_bytes"], k["gflop_per_s"], families[n], k)
        for n, k in enumerate(kernels)
        if k["flops"] and k["memory_bytes"] and k["gflop_per_s"]
    ]
    peaks = {name: limits[name] for name in ("f32", "bf16", "int8") if limits.get(name)}
    read = limits.get("read") or 0.0
    most = max([*(p / 1e9 for p in peaks.values() if p), *(s[2] for s in shown), 1e-3])
    least = min([s[2] for s in shown] or [most / 1e3])
    ridge = max((p for p in peaks.values() if p), default=1e9) / read if read else 1.0
    xs = decades(min([s[1] for s in shown] + [ridge]) * 0.7, max([s[1] for s in shown] + [ridge]) * 3)
    ys = decades(least * 0.6, most * 1.3)
    low_x, high_x = math.log10(xs[0]), math.log10(xs[-1])
    low_y, high_y = math.log10(ys[0]), math.log10(ys[-1])

    def at(intensity: float, gflops: float) -> tuple[float, float]:
        x = left + (math.log10(intensity) - low_x) / (high_x - low_x) * (width - left - right)
        y = height - bottom - (math.log10(gflops) - low_y) / (high_y - low_y) * (height - top - bottom)
        return x, y

    svg.rect(left, top, width - left - right, height - top - bottom, PANEL)
    for x in xs:
        svg.line([at(x, ys[0]), at(x, ys[-1])], RULE)
        svg.text(at(x, ys[0])[0], height - bottom + 15, f"{x:g}", anchor="middle")
    for y in ys:
        svg.line([at(xs[0], y), at(xs[-1], y)], RULE)
        svg.text(left - 6, at(xs[0], y)[1] + 4, f"{y:g}", anchor="end")
    if read:
        highest = max((p for p in peaks.values() if p), default=most * 1e9)
        ends = [max(xs[0], ys[0] * 1e9 / read), min(xs[-1], highest / read)]
        slope = [at(x, x * read / 1e9) for x in ends]
        svg.line(slope, INK, 1.8)
        x, y = slope[0]
        svg.text(x + 8, min(y - 6, height - bottom - 8), f"memory, {number(read / 1e9)} GB/s", on=True)
    for name, peak in peaks.items():
        rate = (peak or 0.0) / 1e9
        start = max(xs[0], rate * 1e9 / read) if read else xs[0]
        if start < xs[-1]:
            svg.line([at(start, rate), at(xs[-1], rate)], INK, 1.8, _PEAK_DASHES[name])
        svg.text(width - right - 6, at(xs[-1], rate)[1] - 5, f"{name}, {number(rate)}", anchor="end", on=True)
    taken = [at(intensity, gflops) for _, intensity, gflops, _, _ in shown]
    for n, intensity, gflops, family, kernel in shown:
        shape, color = FAMILY_MARKS.get(family, _OTHER)
        x, y = at(intensity, gflops)
        words = f"{n + 1}: {kernel['name']}, {number(gflops)} GFLOP/s, {number(intensity)} FLOPs a byte"
        svg.mark(x, y, shape, color, 6, words)
        # Where no other mark or number is, if possible.
        places = [(x + 16, y), (x - 16, y), (x, y - 16), (x, y + 16), (x + 14, y - 14), (x - 14, y + 14)]
        far = [min((math.dist(place, other) for other in taken), default=99.0) for place in places]
        best = next((i for i, distance in enumerate(far) if distance > 15), far.index(max(far)))
        taken.append(places[best])
        svg.text(places[best][0], places[best][1] + 4, f"{n + 1}", anchor="middle", on=True)
    svg.text(left, height - 8, "FLOPs a byte of weights and KV cache")
    svg.text(6, 11, "GFLOP/s", size=10)
    return svg.html()


def bandwidth_bars(kernels: Sequence[dict[str, Any]], families: Sequence[str], limits: Limits, width: int = 600) -> str:
    """Bytes per second of each kernel as bars, next to the memory's; numbers are rows of the kernel table."""
    shown = [(n, k) for n, k in enumerate(kernels) if k["gb_per_s"]][:20]
    left, right, top, line = 34, 16, 24, 19
    height = top + line * max(len(shown), 1) + 30
    svg = Svg(
        width,
        height,
        "Bars: GB/s of each kernel, beside the limit of memory",
        "The table of kernels has the same figures.",
    )
    read = (limits.get("read") or 0.0) / 1e9
    most = max([read, *(k["gb_per_s"] for _, k in shown), 1e-3]) * 1.02
    across = (width - left - right) / most
    for place, (n, kernel) in enumerate(shown):
        y, rate, color = top + place * line, kernel["gb_per_s"], FAMILY_MARKS.get(families[n], _OTHER)[1]
        svg.rect(left, y + 2, rate * across, line - 6, color, f"{kernel['name']}: {number(rate)} GB/s")
    if read:
        x = left + read * across
        svg.line([(x, top - 4), (x, height - 28)], INK, 1.8, "6 3")
        svg.text(x, top - 9, f"memory, {number(read)} GB/s", INK, "end" if x > width / 2 else "start")
    for place, (n, kernel) in enumerate(shown):
        y, rate = top + place * line, kernel["gb_per_s"]
        svg.text(left - 8, y + 12, f"{n + 1}", anchor="end")
        words = f"{number(rate)} {kernel['name'].rsplit('_', 1)[0]}"
        inside = rate * across > (width - left - right) * 0.6
        x = left + 6 if inside else left + rate * across + 6
        svg.text(x, y + 12, words, GROUND if inside else "", size=11, on=not inside)
    svg.line([(left, height - 28), (width - right, height - 28)], FAINT)
    svg.text(left, height - 10, "GB/s of all that a kernel moves; beyond the limit: from a cache")
    return svg.html()
