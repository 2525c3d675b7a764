"""The report of a what-if: one HTML file that needs nothing else, and a picture of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from llmc.buckets import BucketError
from llmc.runtime.simulation.drawings import SERIES, coverage_chart, latency_chart, traffic_map, waste_map
from llmc.runtime.simulation.figures import Figure, count, duration, figures, headline, warnings
from llmc.runtime.simulation.what_if import Outcome, WhatIf, percentile

_MISSES = 12
_STYLE = """
:root { color-scheme: light; font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
  "DejaVu Sans", sans-serif; }
* { box-sizing: border-box; }
body { margin: 0; background: #eef1f4; color: #1c2530; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 40px; }
h1 { margin: 0 0 4px; font-size: 25px; letter-spacing: -.01em; }
h2 { margin: 34px 0 2px; font-size: 17px; }
h3 { margin: 0; font-size: 13px; }
p { margin: 0; color: #57636f; max-width: 100ch; }
section > p { margin-bottom: 12px; }
.warn { margin-top: 10px; padding: 8px 12px; border-left: 3px solid #c2570c; background: #fff6ec; color: #7a3a08; }
.cards, .pair { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
.pair { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.wide { gap: 22px; }
.wide .card + .card { margin-top: 14px; }
.card { background: #fff; border: 1px solid #dce2e8; border-radius: 10px; padding: 14px 16px; min-width: 0; }
.ladder { border-top: 3px solid var(--ladder); }
.name { font-weight: 650; overflow-wrap: anywhere; }
.source { color: #66727f; font-size: 12px; overflow-wrap: anywhere; }
.big { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px; margin-top: 12px; }
.big b { display: block; font-size: 21px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; }
.big span { color: #66727f; font-size: 12px; }
table { width: 100%; border-collapse: collapse; background: #fff; border: 1px solid #dce2e8; border-radius: 10px; }
th, td { padding: 6px 14px; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #dce2e8; }
th { font-weight: 600; }
tbody th { font-weight: 400; color: #3b4754; }
tr.last td, tr.last th { border-bottom: 1px solid #e6ebef; }
td.best { color: #1a7f5a; font-weight: 650; }
svg { display: block; width: 100%; height: auto; margin-top: 8px; font-family: inherit; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12px; color: #3b4754; margin-top: 6px; }
.key i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle;
  background: var(--ladder); }
footer { margin-top: 26px; font-size: 12px; color: #66727f; }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr; } }
"""


def report_html(what_if: WhatIf, outcomes: Sequence[Outcome]) -> str:
    """The whole page; pictures and style are in it."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Buckets for {escape(what_if.trace.name)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>What these buckets make of the traffic</h1><p>{escape(headline(what_if))}.</p>",
        *(f'<p class="warn">{escape(line)}.</p>' for line in warnings(what_if, outcomes)),
        _cards(outcomes),
        f'<div class="pair wide">{_comparison(figures(outcomes), outcomes)}{_curves(outcomes)}</div>',
        *(_ladder(index, one) for index, one in enumerate(outcomes)),
        _misses(outcomes),
        f"<footer>{escape(_method(what_if))}</footer></main></body></html>\n",
    ]
    return "".join(parts)


def write_report(page: str, html: Path | None, png: Path | None) -> None:
    """Writes the page, the picture, or both. Raises BucketError when one cannot be written or there is no browser."""
    if html is not None:
        temporary = html.with_name(f".{html.name}.{os.getpid()}")
        try:
            temporary.write_text(page, encoding="utf-8")
            temporary.replace(html)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise BucketError(f"cannot write report {html}: {error.strerror or error}") from error
    if png is not None:
        from llmc.runtime.simulation.screenshot import screenshot

        screenshot(page, png)


def _color(index: int) -> str:
    return SERIES[index % len(SERIES)]


def _cards(outcomes: Sequence[Outcome]) -> str:
    cards = []
    for index, one in enumerate(outcomes):
        big = (
            (f"{one.padding_s / one.seconds if one.seconds else 0:.1%}", "of the time of replays is padding"),
            (duration(percentile(one.added_s, 99)), "added to a request, p99"),
            (f"{len(one.graphs)}", f"graphs, {one.num_unused} unused" if one.num_unused else "graphs, all used"),
        )
        numbers = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in big)
        source = one.ladder.source if one.ladder.source != one.ladder.name else ""
        cards.append(
            f'<div class="card ladder" style="--ladder:{_color(index)}">'
            f'<div class="name">{escape(one.ladder.name)}</div>'
            f'<div class="source">{escape(source)}&nbsp;</div><div class="big">{numbers}</div></div>'
        )
    return f'<section style="margin-top:18px"><div class="cards">{"".join(cards)}</div></section>'


def _comparison(rows: Sequence[Figure], outcomes: Sequence[Outcome]) -> str:
    head = "".join(f"<th>{escape(one.ladder.name)}</th>" for one in outcomes)
    body = []
    for row in rows:
        cells = "".join(
            f'<td class="best">{escape(text)}</td>' if best else f"<td>{escape(text)}</td>"
            for text, best in zip(row.texts, row.best, strict=True)
        )
        last = ' class="last"' if row.last else ""
        body.append(f'<tr{last} title="{escape(row.help)}"><th>{escape(row.name)}</th>{cells}</tr>')
    return (
        "<section><h2>Figures</h2><p>Green is the best of those that differ. Point at a row for what it means.</p>"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></section>"
    )


def _ladder(index: int, one: Outcome) -> str:
    rows = []
    for phase in one.phases:
        steps = sum(use.replays for use in one.of_phase(phase))
        rows.append(
            f'<div class="card"><h3>{phase.capitalize()}: where the traffic is</h3>'
            f'<div class="source">{count(steps)} steps; lines are the borders of buckets</div>'
            f"{traffic_map(one, phase)}</div>"
            f'<div class="card"><h3>{phase.capitalize()}: what each bucket wastes</h3>'
            f'<div class="source">{one.padding(phase):.1%} padding in all</div>{waste_map(one, phase)}</div>'
        )
    name = f'<span style="color:{_color(index)}">{escape(one.ladder.name)}</span>'
    return (
        f"<section><h2>{name}</h2><p>A step runs in the smallest bucket that holds it: what lies between the traffic "
        f'and the border to its upper right is padding.</p><div class="pair">{"".join(rows)}</div></section>'
    )


def _curves(outcomes: Sequence[Outcome]) -> str:
    key = "".join(
        f'<span><i style="--ladder:{_color(n)}"></i>{escape(one.ladder.name)}</span>' for n, one in enumerate(outcomes)
    )
    key = f'<div class="key">{key}</div>'
    return (
        "<section><h2>Coverage and latency</h2><p>A few graphs serve most steps: those to warm up first.</p>"
        f'<div class="card"><h3>Steps served by the most used graphs</h3>{coverage_chart(outcomes)}{key}</div>'
        f'<div class="card"><h3>Latency added to whole requests</h3>{latency_chart(outcomes)}{key}</div></section>'
    )


def _misses(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in outcomes:
        for miss in sorted(one.misses, key=lambda m: -m.count)[:_MISSES]:
            rows.append(
                f"<tr><th>{escape(one.ladder.name)}</th><td>{miss.phase}</td><td>{miss.num_seqs}</td>"
                f"<td>{miss.num_tokens}</td><td>{miss.num_blocks}</td><td>{miss.count:,}</td></tr>"
            )
    if not rows:
        return "<section><h2>Misses</h2><p>None: every step found a bucket of its phase.</p></section>"
    head = "".join(
        f"<th>{name}</th>" for name in ("", "phase", "sequences", "tokens", "blocks of the longest", "steps")
    )
    return (
        "<section><h2>Misses</h2><p>Steps that no bucket of their phase held; other graphs served them.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _method(what_if: WhatIf) -> str:
    return (
        "Made by llmc buckets simulate: the trace ran through the scheduler and block manager in virtual time; "
        f"nothing was computed, and a step took what its bucket costs ({what_if.costs.source}). Times are predictions."
    )
