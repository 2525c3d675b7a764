"""Figures of a what-if as text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller

from llmc.buckets.cost_bounds import CONFIDENCE
from llmc.runtime.simulation.what_if import Outcome, WhatIf, percentile
from llmc.units import format_bytes

# Of the arrival time: a backlog of more than that at the end cannot be just one long last answer.
_BACKLOG = 0.1


@dataclass(frozen=True)
class Figure:
    """One row of the comparison: a text per ladder, and whether it is the best of several different ones.

    last: whether it ends its group. help: meaning of the row.
    """

    name: str
    texts: tuple[str, ...]
    best: tuple[bool, ...]
    last: bool
    help: str


def duration(seconds: float) -> str:
    """As in 850 µs, 3.2 ms, 12.4 s, 5 min, 2.1 h; with the sign of a negative one."""
    size, sign = abs(seconds), "−" if seconds < 0 else ""
    if size < 5e-8:
        return "0"
    for limit, unit, scale in ((1e-3, "µs", 1e6), (1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if size < limit:
            return f"{sign}{size * scale:.3g} {unit}"
    return f"{sign}{size / 3600:.3g} h"


def count(value: float) -> str:
    """As in 1,234 or 5.67 M."""
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.2f} M" if value < 1e9 else f"{value / 1e9:,.2f} G"


def between(ends: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    """An interval after a figure, as " (3.1 ms to 3.9 ms)"; empty if both ends read the same."""
    if ends is None or text(ends[0]) == text(ends[1]):
        return ""
    return f" ({text(ends[0])} to {text(ends[1])})"


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """All rows."""
    phases = [p for p in ("prefill", "mixed", "decode") if any(p in one.phases for one in outcomes)]
    rows: list[Figure] = []

    def add(
        name: str, value: Callable[[Outcome], float], text: Callable[[float], str], help: str, last: bool = False
    ) -> None:
        values = [value(one) for one in outcomes]
        least = min(values)
        differ = len({text(v) for v in values}) > 1
        texts = tuple(text(v) + between(one.range_of(value), text) for v, one in zip(values, outcomes, strict=True))
        rows.append(Figure(name, texts, tuple(differ and text(v) == text(least) for v in values), last, help))

    def share(value: float) -> str:
        return f"{value:.1%}"

    add("graphs", lambda o: len(o.graphs), count, "Buckets of the ladder, each compiled to a graph")
    add("unused", lambda o: o.num_unused, count, "Graphs that no step of this trace ran in", True)
    for phase in phases:
        what = "context" if phase == "decode" else "prompt"
        add(
            f"{phase} padding",
            methodcaller("padding", phase),
            share,
            f"Share of the {what} tokens of all {phase} steps that nobody asked for",
        )
        add(f"{phase} padding, tokens", methodcaller("padded_tokens", phase), count, "The same in tokens")
    add(
        "decode, uneven contexts",
        lambda o: o.uneven_contexts,
        share,
        "Share of sequences × the longest context that no sequence has; kernels that skip padding do not compute it",
    )
    add("padding, time", lambda o: o.padding_s, duration, "What graphs of exactly every shape would save")
    add(
        "padding, of replays",
        lambda o: o.padding_s / o.seconds if o.seconds else 0.0,
        share,
        "The same as a share of the time of all replays",
        True,
    )
    add("added to first token, p50", lambda o: percentile(o.added_ttft_s, 50), duration, _ADDED)
    add("added to first token, p99", lambda o: percentile(o.added_ttft_s, 99), duration, _ADDED)
    add("added to whole request, p50", lambda o: percentile(o.added_s, 50), duration, _ADDED)
    add("added to whole request, p99", lambda o: percentile(o.added_s, 99), duration, _ADDED, True)
    add("first token, p50", lambda o: percentile(o.ttft_s, 50), duration, "From arrival to the first token")
    add("first token, p99", lambda o: percentile(o.ttft_s, 99), duration, "From arrival to the first token")
    add("busy", lambda o: o.busy_s / o.span_s if o.span_s else 0.0, share, "Share of the time that steps ran", True)
    add("misses", lambda o: o.num_misses, count, "Steps that no graph of their phase held")
    add("split prompts", lambda o: o.split_prompts, count, "Prompts longer than the largest prefill bucket", True)
    if any(one.drafted for one in outcomes):
        add("steps with guesses", lambda o: o.guessing_steps, count, "Decode steps that brought guesses along")
        add("guesses", lambda o: o.drafted, count, "Guesses that went along, those behind a wrong one included")
        add(
            "tokens gained, a step",
            lambda o: -o.accepted / max(o.guessing_steps, 1),
            lambda v: f"{-v:.2f}",
            "Right guesses of a step with guesses; each is a token that needs no step of its own",
            True,
        )
    add("compile", lambda o: o.compile_s, duration, "Estimated, from an empty cache; 0 for an artifact")
    add("warm-up", lambda o: o.warm_up_s, duration, "One replay of every graph, full")
    add(
        "memory of graphs", lambda o: o.arena_bytes, lambda v: format_bytes(int(v)), "Arena of the largest and commands"
    )
    return rows


_ADDED = "Against an ideal ladder that has a graph of exactly every shape; median or 99th percentile of the requests"


def headline(what_if: WhatIf) -> str:
    """One sentence that describes the run."""
    trace, server = what_if.trace, what_if.server
    hours = duration(float(trace.arrival_s[-1]) / what_if.speed)
    faster = f", {what_if.speed:g} times as fast" if what_if.speed != 1 else ""
    clipped = f", {what_if.clipped:,} of them clipped to {server.max_model_len}" if what_if.clipped else ""
    guesses = f"; up to {server.guesses} guesses, each right with odds {server.odds:.2g}" if server.guesses else ""
    return (
        f"{trace.name}: {len(trace):,} requests in {hours}{faster}{clipped}; up to {server.max_num_seqs} at once; "
        f"costs {what_if.costs.source}{guesses}"
    )


def warnings(what_if: WhatIf, outcomes: Sequence[Outcome]) -> list[str]:
    """Warnings a reader needs before trusting the figures."""
    lines = []
    last_arrival = float(what_if.trace.arrival_s[-1]) / what_if.speed
    for one in outcomes:
        if one.span_s - last_arrival > _BACKLOG * last_arrival:
            lines.append(
                f"{one.ladder.name}: too slow for this traffic, it ends {duration(one.span_s - last_arrival)} after "
                "the last arrival: latencies are queueing; lower --speed"
            )
        if one.unserved:
            lines.append(f"{one.ladder.name}: {one.unserved:,} requests were not served")
    lines += what_if.costs.notes
    if any(one.low is not None for one in outcomes):
        lines.append(
            f"In brackets: between which ends a figure lies when costs are as far off as {CONFIDENCE:.0%} of them are"
        )
    if what_if.costs.source.startswith("assumed"):
        lines.append("Times are guesses: measure an artifact with llmc warmup, or give --cost-table or --model")
    return lines
