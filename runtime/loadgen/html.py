"""The report of a benchmark: distributions of latencies, throughput over time, requests, and buckets in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmc.runtime.loadgen.answer import Outcome
from llmc.runtime.report.charts import curves, histogram, rate_over_time, running_over_time
from llmc.runtime.report.page import Page, card, key, pair, section, tiles
from llmc.runtime.report.svg import RULE, Svg, round_steps
from llmc.runtime.report.table import Column, Row, table
from llmc.runtime.report.words import NONE, microseconds, number, percent

Data = Mapping[str, Any]
LATENCIES = {
    "ttft_ms": ("TTFT", "time to first token"),
    "tpot_ms": ("TPOT", "time per output token"),
    "itl_ms": ("ITL", "inter-token latency"),
    "e2e_ms": ("E2E", "end-to-end latency"),
}
_SPREAD = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")
_MAX_REQUESTS = 150


def bench_html(
    title: str,
    lead: str,
    data: Data,
    report: Data,
    outcomes: Sequence[Outcome],
    notes: Sequence[str] = (),
    last: Sequence[Outcome] | None = None,
) -> str:
    """data: as printed by --json, with `buckets`. report: the figures, as in Report. outcomes: of all runs, for
    distributions. last: of the run drawn over time; by default the same."""
    drawn = outcomes if last is None else last
    return Page(
        title=title,
        lead=lead,
        parts=(
            tiles(_tiles(report)),
            section("Latency", _spreads(report), _latencies(outcomes), note="Dashes: p50, p90 and p99."),
            section("Over time", _over_time(drawn)),
            _buckets(data.get("buckets")),
            _failures(report),
            section("Settings", _settings(data["settings"])),
        ),
        method="Made by llmc bench. Percentiles are interpolated linearly; latencies are those of completed requests.",
        warnings=notes,
        data=data,
    ).html()


def values_ms(outcomes: Iterable[Outcome], name: str) -> list[float]:
    """The values that `measure.report` summarizes as `name`."""
    done = [outcome for outcome in outcomes if outcome.ok]
    if name == "itl_ms":
        return [(b - a) / 1e6 for o in done for a, b in zip(o.token_ns, o.token_ns[1:], strict=False)]
    return [value for o in done if (value := getattr(o, name)) is not None]


def _tiles(report: Data) -> list[tuple[str, str]]:
    figures = [
        (f"{report['completed']:,}", f"requests completed, {report['failed']:,} failed"),
        (f"{number(report['output_tokens_per_s'])}", "output tokens a second"),
        (f"{number(report['requests_per_s'])}", "requests a second"),
        (f"{report['peak_concurrency']:,}", "requests at once, at most"),
    ]
    for name in ("ttft_ms", "tpot_ms"):
        if (spread := report[name]) is not None:
            figures.append((f"{number(spread['p50'])} ms", f"{LATENCIES[name][1]}, median"))
    if report.get("goodput") is not None:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report["goodput_limits_ms"].items())
        figures.append((number(report["goodput"]), f"good requests a second: {limits}"))
    return figures


def _latencies(outcomes: Sequence[Outcome]) -> str:
    cards = []
    for name, (short, long) in LATENCIES.items():
        if values := values_ms(outcomes, name):
            cards.append(card(f"{short}: {long}", histogram(values, long, "ms"), note=f"{len(values):,} values"))
    return pair(*cards)


def _spreads(report: Data) -> str:
    rows = []
    for name, (short, long) in LATENCIES.items():
        spread = report[name]
        if spread is not None:
            rows.append(Row([short, *(number(spread[column], 4) for column in _SPREAD)], help=long))
    if not rows:
        return "<p>No request completed.</p>"
    return table("Latency in milliseconds", [Column("latency", words=True), *map(Column, _SPREAD)], rows)


def _over_time(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "<p>No request was sent.</p>"
    zero = min(outcome.start_ns for outcome in outcomes)
    end = max(outcome.end_ns for outcome in outcomes) - zero
    tokens = sorted((when - zero) / 1e9 for o in outcomes if o.ok for when in o.token_ns)
    spans = [((o.start_ns - zero) / 1e9, (o.end_ns - zero) / 1e9) for o in outcomes]
    rate, running = rate_over_time(tokens, end / 1e9), running_over_time(spans)
    return pair(
        card("Output tokens a second", curves("Output tokens a second over time", [rate], "seconds", "tokens/s")),
        card("Requests under way", curves("Requests under way over time", [running], "seconds", "requests")),
    ) + (
        '<div class="card"><h3>Requests</h3>'
        f"{_requests(outcomes, zero, end)}"
        f"{key((('until the first token', 'var(--s2)', 'box'), ('until the last', 'var(--s1)', 'box')))}"
        f'<div class="note">{_shown(len(outcomes))}; × ended in failure.</div></div>'
    )


def _shown(count: int) -> str:
    return (
        f"Each line is a request, {_MAX_REQUESTS} of {count:,}" if count > _MAX_REQUESTS else "Each line is a request"
    )


def _requests(outcomes: Sequence[Outcome], zero: int, end: int, width: int = 1180) -> str:
    """One line per request, in order of sending."""
    ordered = sorted(outcomes, key=lambda o: o.start_ns)
    every = -(-len(ordered) // _MAX_REQUESTS)
    shown = ordered[::every]
    line = max(3.0, min(14.0, 420 / len(shown)))
    left, right, top = 12, 24, 8
    height = round(top + line * len(shown) + 40)
    svg = Svg(width, height, "Requests over time, a line each", "The result file of --output has every request.")
    base = height - 34

    def x(ns: float) -> float:
        return left + ns / max(end, 1) * (width - left - right)

    for step in round_steps(0, end / 1e9):
        if step <= end / 1e9 * 1.0001:
            svg.line([(x(step * 1e9), top), (x(step * 1e9), base)], RULE)
            svg.text(x(step * 1e9), base + 15, f"{number(step)}", anchor="middle")
    for n, one in enumerate(shown):
        y = top + n * line
        start, stop = one.start_ns - zero, one.end_ns - zero
        first = one.token_ns[0] - zero if one.token_ns else stop
        words = f"request {one.index}: {one.prompt_tokens} + {one.output_tokens} tokens, {(stop - start) / 1e6:.1f} ms"
        svg.rect(x(start), y, max(x(first) - x(start), 0.6), line * 0.72, "var(--s2)", words)
        svg.rect(x(first), y, x(stop) - x(first), line * 0.72, "var(--s1)", words)
        if one.failure is not None:
            svg.text(x(stop) + 4, y + line * 0.8, "×", "var(--bad)", size=12)
    svg.text(left, height - 4, "seconds")
    return svg.html()


def _buckets(uses: Sequence[Data] | None) -> str:
    if uses is None:
        return section(
            "Buckets in use", note="The server does not tell of its buckets: llmc serve does, with its live page on."
        )
    total = sum(use["replay_s"] for use in uses)
    used = [use for use in uses if use["replays"]]
    rows = (
        Row(
            [
                use["bucket"],
                f"{use['replays']:,}",
                microseconds(use["replay_s"] * 1e6),
                percent(use["replay_s"] / total) if total else NONE,
                microseconds(use["replay_s"] / use["replays"] * 1e6),
                f"{use['tokens']:,}",
                f"{use['padding_tokens']:,}",
                percent(use["padding_tokens"] / max(use["tokens"] + use["padding_tokens"], 1)),
            ]
        )
        for use in sorted(used, key=lambda use: -use["replay_s"])
    )
    names = ("bucket", "replays", "time", "of all replays", "a replay", "tokens", "padding", "of the tokens")
    return section(
        "Buckets in use",
        table("Buckets, by their time", [Column(name) for name in names], rows, tall=True) if used else "",
        note=f"{len(used)} of {len(uses)} buckets were replayed.",
    )


def _failures(report: Data) -> str:
    if not report["failures"]:
        return ""
    rows = (
        Row([cause, f"{count:,}", report["examples"].get(cause, "")]) for cause, count in report["failures"].items()
    )
    columns = [Column("cause", words=True), Column("requests"), Column("one of them", words=True)]
    return section("Failures", table("Failed requests by cause", columns, rows))


def _settings(settings: Mapping[str, Any]) -> str:
    rows = (Row([name.replace("_", " "), NONE if value is None else f"{value}"]) for name, value in settings.items())
    return table("What was asked for", [Column("setting", words=True), Column("value", words=True)], rows, hide=True)
