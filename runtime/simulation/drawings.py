"""Drawings of a what-if as SVG: heat maps over the bucket grid, histograms and curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmc.buckets.bucket import rank
from llmc.runtime.report.svg import DASHES, FAINT, GROUND, INK, PANEL, RULE, Svg, heat, round_steps, series
from llmc.runtime.simulation.figures import count, duration
from llmc.runtime.simulation.what_if import Floats, GraphUse, Outcome

_TRAFFIC, _WASTE, _BORDER = "var(--s1)", "var(--waste)", "var(--s2)"
_NAMES = {"prefill": "prompt tokens of a step", "mixed": "tokens of a step", "decode": "tokens of context"}
_COLUMNS, _ROWS = 96, 32
_WIDEST_BAR = 72

At = Callable[[float, float], tuple[float, float]]  # pixel of (sequences or share, tokens)


def traffic_map(outcome: Outcome, phase: str, width: int = 560) -> str:
    """Steps of a phase by length and sequences, with the borders of the buckets. Decode gets one map for the longest
    context, and one for the total of contexts if there are such buckets."""
    uses = outcome.of_phase(phase)
    forms = sorted({use.bucket.total for use in uses})
    return "".join(_traffic(outcome, phase, [u for u in uses if u.bucket.total == total], width) for total in forms)


def _traffic(outcome: Outcome, phase: str, uses: Sequence[GraphUse], width: int) -> str:
    """Map of the steps that ran in these graphs, all of one form."""
    mine = {use.bucket for use in uses}
    indices = {n for n, one in enumerate(outcome.ladder.buckets) if one in mine}
    loads = [load for load in outcome.loads if load.graph in indices]
    name = _name(uses)
    batches = sorted({use.bucket.batch for use in uses})
    longest = max(use.bucket.seq for use in uses)
    if len(batches) == 1:
        return _histogram(phase, name, uses, [(load.length, load.replays) for load in loads], longest, width)
    rows = min(batches[-1], _ROWS)
    grid = np.zeros((rows, _COLUMNS))
    for load in loads:
        # Guesses are rows of a decode graph, as sequences are.
        of_step = load.tokens // load.replays if phase == "decode" else load.num_seqs
        row = min((of_step - 1) * rows // batches[-1], rows - 1)
        column = min((load.length - 1) * _COLUMNS // longest, _COLUMNS - 1)
        grid[row, column] += load.replays
    height, left, top, bottom = 300, 44, 12, 40
    svg = Svg(width, height, f"Heat map of {phase} steps by sequences and {name}, under the borders of the buckets")
    across, down = (width - left - 10) / longest, (height - top - bottom) / batches[-1]

    def at(batch: float, seq: float) -> tuple[float, float]:
        return left + seq * across, height - bottom - batch * down

    x0, y0 = at(batches[-1], 0)
    svg.rect(x0, y0, longest * across, batches[-1] * down, PANEL)
    most, total = max(float(grid.max()), 1.0), max(float(grid.sum()), 1.0)
    for row, column in zip(*np.nonzero(grid), strict=True):
        value = float(grid[row, column])
        low, high = row * batches[-1] / rows, (row + 1) * batches[-1] / rows
        x, y = at(high, column * longest / _COLUMNS)
        title = f"{count(value)} steps, {value / total:.2%}"
        # Square-root scale: a few cells hold most of the steps, and the others should still be visible.
        svg.rect(x, y, longest / _COLUMNS * across + 0.3, (high - low) * down + 0.3,
                 heat(_TRAFFIC, 0.12 + 0.88 * (value / most) ** 0.5), title)  # fmt: skip
    _borders(svg, uses, at)
    _axes(svg, at, batches, sorted({use.bucket.seq for use in uses}), name)
    return svg.html()


def _borders(svg: Svg, uses: Sequence[GraphUse], at: At) -> None:
    """Borders between buckets, as the scheduler chooses them."""
    buckets = sorted((use.bucket for use in uses), key=rank)
    batches, seqs = (sorted({getattr(bucket, name) for bucket in buckets}) for name in ("batch", "seq"))
    owner = np.full((len(batches) + 1, len(seqs) + 1), -1)
    for j, batch in enumerate(batches):
        for i, seq in enumerate(seqs):
            owner[j, i] = next((n for n, bucket in enumerate(buckets) if bucket.fits(batch, seq, seq)), -1)
    rows, columns = [0, *batches], [0, *seqs]
    for j in range(len(batches)):
        for i in range(len(seqs)):
            edges = []
            if owner[j, i] != owner[j + 1, i]:
                edges.append([at(rows[j + 1], columns[i]), at(rows[j + 1], columns[i + 1])])
            if owner[j, i] != owner[j, i + 1]:
                edges.append([at(rows[j], columns[i + 1]), at(rows[j + 1], columns[i + 1])])
            for edge in edges:
                svg.line(edge, GROUND, 1.8)
                svg.line(edge, INK, 0.8)


def _ticks(svg: Svg, positions: Sequence[tuple[float, int]], y: float, anchor: str = "end") -> None:
    """Numbers along an axis, as many as fit; always the last one."""
    right = positions[-1][0]
    last = -99.0
    for x, value in positions:
        final = x == right
        if final or (x - last >= 38 and right - x >= 46):
            svg.text(x, y, f"{value}", anchor=anchor if final else "middle")
            last = x


def _axes(svg: Svg, at: At, batches: Sequence[int], seqs: Sequence[int], name: str) -> None:
    _ticks(svg, [(at(0, seq)[0], seq) for seq in seqs], at(0, 0)[1] + 15)
    last = 1e9
    for batch in batches:
        x, y = at(batch, 0)
        if last - y >= 13 or batch == batches[-1]:
            svg.text(x - 6, y + 9, f"{batch}", anchor="end")
            last = y
    x, y = at(0, 0)
    svg.text(x, y + 32, name)
    svg.text(8, 10, "sequences", size=10)


def _name(uses: Sequence[GraphUse]) -> str:
    """Name of the length that these buckets bound."""
    totals = {use.bucket.total for use in uses}
    if len(totals) > 1:
        return "tokens of context, of a sequence and of all"
    return "tokens of all contexts" if True in totals else _NAMES[uses[0].bucket.phase]


def _histogram(
    phase: str, name: str, uses: Sequence[GraphUse], loads: Sequence[tuple[int, int]], longest: int, width: int
) -> str:
    """Lengths of the steps, coloured by the share of padding in their bucket; for a ladder with one batch size."""
    height, left, top, bottom = 300, 44, 12, 40
    svg = Svg(width, height, f"Histogram of the {name} of {phase} steps, with the sizes of the buckets")
    weights = np.zeros(_COLUMNS)
    for length, replays in loads:
        weights[min((length - 1) * _COLUMNS // longest, _COLUMNS - 1)] += replays
    most, total = max(float(weights.max()), 1.0), max(float(weights.sum()), 1.0)
    across, deep = (width - left - 10) / longest, height - top - bottom
    seqs = sorted(use.bucket.seq for use in uses)

    def at(batch: float, seq: float) -> tuple[float, float]:
        return left + seq * across, height - bottom - batch * deep

    x0, y0 = at(1, 0)
    svg.rect(x0, y0, longest * across, deep, PANEL)
    for column in np.nonzero(weights)[0]:
        value, size = float(weights[column]), longest / _COLUMNS
        x, y = at(value / most, column * size)
        title = f"about {(column + 0.5) * size:.0f} tokens: {count(value)} steps, {value / total:.2%}"
        svg.rect(x + 0.3, y, size * across - 0.6, value / most * deep, _TRAFFIC, title)
    for seq in seqs:
        x, y = at(1, seq)
        svg.line([(x, y), (x, height - bottom)], _BORDER, 1.1, "3 2")
    _ticks(svg, [(at(0, seq)[0], seq) for seq in seqs], height - bottom + 15)
    svg.text(left, height - 8, f"{name}; dashed: the buckets")
    svg.text(8, 10, "steps", size=10)
    return svg.html()


def waste_map(outcome: Outcome, phase: str, width: int = 560) -> str:
    """The bucket grid: the number is the share of padding, the colour the time it costs."""
    uses = outcome.of_phase(phase)
    by_bucket = {(use.bucket.batch, use.bucket.seq, use.bucket.total): use for use in uses}
    batches, seqs = sorted({u.bucket.batch for u in uses}), sorted({(u.bucket.total, u.bucket.seq) for u in uses})
    if len(batches) == 1:
        return _waste_bars(phase, uses, width)
    height, left, top, bottom = 300, 44, 12, 40
    svg = Svg(width, height, f"Grid of {phase} buckets, coloured by the time that their padding costs")
    wide, high = (width - left - 10) / len(seqs), (height - top - bottom) / len(batches)
    most = max((use.padding_s for use in uses), default=0.0) or 1.0
    for j, batch in enumerate(batches):
        y = height - bottom - (j + 1) * high
        svg.text(left - 6, y + high / 2 + 4, f"{batch}", anchor="end")
        for i, (total, seq) in enumerate(seqs):
            use = by_bucket.get((batch, seq, total))
            if use is None:
                continue
            x = left + i * wide
            share = (use.padding_s / most) ** 0.5
            fill = heat(_WASTE, 0.08 + 0.92 * share) if use.replays else PANEL
            svg.rect(x + 1, y + 1, wide - 2, high - 2, fill, _words(use), "" if use.replays else RULE)
            if use.replays and wide >= 24 and high >= 13:
                size = min(11, wide / 2.9)
                svg.text(x + wide / 2, y + high / 2 + 4, f"{use.padding:.0%}", anchor="middle", size=size, on=True)
    _ticks(svg, [(left + (i + 0.5) * wide, seq) for i, (_, seq) in enumerate(seqs)], height - bottom + 15, "middle")
    svg.text(left, height - 8, f"{_name(uses)}; number: share of padding, colour: its time, up to {duration(most)}")
    svg.text(8, 10, "sequences", size=10)
    return svg.html()


def _waste_bars(phase: str, uses: Sequence[GraphUse], width: int) -> str:
    """Tokens requested and padded, one bar per bucket; for a ladder with one batch size."""
    height, left, top, bottom = 300, 44, 12, 40
    svg = Svg(width, height, f"Bars of the {phase} buckets: tokens asked for, and padding")
    ordered = sorted(uses, key=lambda use: use.bucket.seq)
    wide, deep = (width - left - 10) / len(ordered), height - top - bottom
    steps = round_steps(0, max((use.computed for use in ordered), default=0.0) or 1.0)
    most, bar = steps[-1], min(wide - 2, _WIDEST_BAR)
    for step in steps[1:]:
        y = height - bottom - step / most * deep
        svg.line([(left, y), (width - 10, y)], RULE)
        svg.text(left - 6, y + 4, _short(step), anchor="end", size=9)
    middles = [(left + (i + 0.5) * wide, use.bucket.seq) for i, use in enumerate(ordered)]
    _ticks(svg, middles, height - bottom + 15, "middle")
    for i, use in enumerate(ordered):
        x, asked = left + (i + 0.5) * wide - bar / 2, use.asked / most * deep
        padded = (use.computed - use.asked) / most * deep
        base = height - bottom
        svg.rect(x, base - asked, bar, asked, _TRAFFIC, _words(use))
        svg.rect(x, base - asked - padded, bar, padded, _WASTE, _words(use))
        if use.replays and wide >= 22:
            svg.text(x + bar / 2, base - asked - padded - 4, f"{use.padding:.0%}", INK, "middle", min(11, wide / 2.9))
    svg.rect(left, height - 17, 10, 10, _TRAFFIC)
    svg.text(left + 15, height - 8, "tokens asked for")
    svg.rect(left + 120, height - 17, 10, 10, _WASTE)
    svg.text(left + 135, height - 8, "padding, and its share")
    return svg.html()


def _short(value: float) -> str:
    """As in 500, 20k, 1.5M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"


def _words(use: GraphUse) -> str:
    if not use.replays:
        return f"{use.bucket}: never used"
    return (
        f"{use.bucket}: {count(use.replays)} steps in {duration(use.seconds)}; {use.padding:.1%} of the tokens are "
        f"padding, which costs {duration(use.padding_s)}"
    )


def coverage_chart(outcomes: Sequence[Outcome], width: int = 560) -> str:
    """Share of the steps covered by the most used graphs, over the number of graphs."""
    height, left, top, bottom = 280, 50, 14, 40
    svg = Svg(width, height, "Share of steps served by the most used graphs")
    most = max(len(one.graphs) for one in outcomes)
    right = width - 16

    def at(graphs: float, share: float) -> tuple[float, float]:
        return left + graphs / most * (right - left), height - bottom - share * (height - top - bottom)

    for share in (0, 0.25, 0.5, 0.75, 1.0):
        y = at(0, share)[1]
        svg.line([(left, y), (right, y)], RULE)
        svg.text(left - 6, y + 4, f"{share:.0%}", anchor="end")
    y = at(0, 0.95)[1]
    svg.line([(left, y), (right, y)], FAINT, 0.8, "3 3")
    for index, one in enumerate(outcomes):
        used = np.sort([use.replays for use in one.graphs])[::-1]
        shares = np.cumsum(used) / max(used.sum(), 1)
        points = [at(0, 0), *(at(n + 1, float(share)) for n, share in enumerate(shares))]
        svg.line(points, series(index), 2, DASHES[index % len(DASHES)])
        hot = int(np.searchsorted(shares, 0.95)) + 1
        x, y = at(hot, float(shares[hot - 1]))
        svg.rect(x - 3.5, y - 3.5, 7, 7, series(index), f"{hot} graphs serve 95 % of the steps")
        svg.text(x + 8, y + 16 + 13 * index, f"{hot} graphs: 95 %", series(index))
    for part in range(5):
        graphs = round(most * part / 4)
        svg.text(at(graphs, 0)[0], height - bottom + 15, f"{graphs}", anchor="middle")
    svg.text(left, height - 8, "graphs, the most used first")
    return svg.html()


def latency_chart(outcomes: Sequence[Outcome], width: int = 560) -> str:
    """Latency that each ladder adds to a whole request, by percentile."""
    height, left, top, bottom = 280, 64, 14, 40
    svg = Svg(width, height, "Latency added to a whole request, by percentile")
    percents = np.array([*range(1, 99, 2), 99.0])
    curves: list[Floats] = []
    for one in outcomes:
        known = one.added_s[~np.isnan(one.added_s)]
        curves.append(np.percentile(known, percents) if len(known) else np.zeros(len(percents)))
    low = min(0.0, *(float(curve.min()) for curve in curves))
    steps = round_steps(low, max(1e-6, *(float(curve.max()) for curve in curves)))
    steps, high = [step for step in steps if step >= low], steps[-1]
    right = width - 16

    def at(percent: float, seconds: float) -> tuple[float, float]:
        x = left + percent / 100 * (right - left)
        return x, height - bottom - (seconds - low) / (high - low) * (height - top - bottom)

    for seconds in steps:
        y = at(0, seconds)[1]
        svg.line([(left, y), (right, y)], RULE)
        svg.text(left - 6, y + 4, duration(seconds), anchor="end")
    if low < 0:
        svg.line([at(0, 0), at(100, 0)], FAINT, 0.8)
    for index, curve in enumerate(curves):
        points = [at(float(p), float(s)) for p, s in zip(percents, curve, strict=True)]
        svg.line(points, series(index), 2, DASHES[index % len(DASHES)])
    for percent in (1, 25, 50, 75, 99):
        svg.text(at(percent, low)[0], height - bottom + 15, f"p{percent}", anchor="middle")
    svg.text(left, height - 8, "percentile of the requests")
    return svg.html()
