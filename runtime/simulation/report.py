"""The report of a what-if: one HTML file that needs nothing else, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from llmc.runtime.report.page import Page, card, key, pair, section, write_page
from llmc.runtime.report.svg import DASH_NAMES, series
from llmc.runtime.report.table import Column, Row, table
from llmc.runtime.simulation.drawings import coverage_chart, latency_chart, traffic_map, waste_map
from llmc.runtime.simulation.figures import Figure, count, duration, figures, headline, warnings
from llmc.runtime.simulation.what_if import Outcome, WhatIf, percentile

_MISSES = 12


def report_html(what_if: WhatIf, outcomes: Sequence[Outcome], data: Mapping[str, Any] | None = None) -> str:
    """The whole page, with pictures and style included. data: the output of --json, for machines."""
    return Page(
        title="What these buckets make of the traffic",
        lead=f"{headline(what_if)}.",
        parts=(
            _cards(outcomes),
            pair(_comparison(figures(outcomes), outcomes), _curves(outcomes)),
            *(_ladder(one) for one in outcomes),
            _misses(outcomes),
        ),
        method=_method(what_if),
        warnings=[f"{line}." for line in warnings(what_if, outcomes)],
        data=data,
    ).html()


def write_report(page: str, html: Path | None, png: Path | None) -> None:
    """Writes the page, the picture, or both. Raises ReportError if one cannot be written, or no browser is found."""
    if html is not None:
        write_page(page, html)
    if png is not None:
        from llmc.runtime.report.screenshot import screenshot

        screenshot(page, png)


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
            f'<div class="card ladder" style="--mark:{series(index)}">'
            f'<div class="name">{escape(one.ladder.name)}</div>'
            f'<div class="note mono">{escape(source)}&nbsp;</div><div class="big">{numbers}</div></div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _comparison(rows: Sequence[Figure], outcomes: Sequence[Outcome]) -> str:
    return section(
        "Figures",
        table(
            "Figures of each ladder",
            [Column("figure", words=True), *(Column(one.ladder.name) for one in outcomes)],
            (
                Row(
                    [row.name, *row.texts],
                    frozenset(index for index, best in enumerate(row.best, 1) if best),
                    row.help,
                    row.last,
                )
                for row in rows
            ),
        ),
        note="✓ is the best of those that differ. Point at a row for what it means.",
    )


def _ladder(one: Outcome) -> str:
    rows = []
    for phase in one.phases:
        steps = sum(use.replays for use in one.of_phase(phase))
        rows.append(
            card(
                f"{phase.capitalize()}: where the traffic is",
                traffic_map(one, phase),
                note=f"{count(steps)} steps; lines are the borders of buckets",
            )
        )
        rows.append(
            card(
                f"{phase.capitalize()}: what each bucket wastes",
                waste_map(one, phase),
                note=f"{one.padding(phase):.1%} padding in all",
            )
        )
    return section(
        one.ladder.name,
        pair(*rows),
        _buckets(one),
        note="A step runs in the smallest bucket that holds it: what lies between the traffic and the border to its "
        "upper right is padding.",
    )


def _buckets(one: Outcome) -> str:
    return table(
        f"Buckets of {one.ladder.name}",
        [Column(name) for name in ("bucket", "steps", "time", "padding of tokens", "time of padding")],
        (
            Row(
                [
                    str(use.bucket),
                    count(use.replays),
                    duration(use.seconds),
                    f"{use.padding:.1%}" if use.replays else "–",
                    duration(use.padding_s),
                ]
            )
            for use in one.graphs
        ),
        tall=True,
        hide=True,
    )


def _curves(outcomes: Sequence[Outcome]) -> str:
    names = key((one.ladder.name, series(n), DASH_NAMES[n % len(DASH_NAMES)]) for n, one in enumerate(outcomes))
    return section(
        "Coverage and latency",
        '<div class="stack">',
        card("Steps served by the most used graphs", coverage_chart(outcomes), names),
        card("Latency added to whole requests", latency_chart(outcomes), names),
        "</div>",
        note="A few graphs serve most steps: those to warm up first.",
    )


def _misses(outcomes: Sequence[Outcome]) -> str:
    rows = [
        Row(
            [
                one.ladder.name,
                miss.phase,
                f"{miss.num_seqs}",
                f"{miss.num_tokens}",
                f"{miss.num_blocks}",
                f"{miss.count:,}",
            ]
        )
        for one in outcomes
        for miss in sorted(one.misses, key=lambda m: -m.count)[:_MISSES]
    ]
    if not rows:
        return section("Misses", note="None: every step found a bucket of its phase.")
    columns = ("ladder", "phase", "sequences", "tokens", "blocks of the longest", "steps")
    return section(
        "Misses",
        table("Steps without a bucket of their phase", [Column(name) for name in columns], rows),
        note="Steps that no bucket of their phase held; other graphs served them.",
    )


def _method(what_if: WhatIf) -> str:
    return (
        "Made by llmc buckets simulate: the trace ran through the scheduler and block manager in virtual time; "
        f"nothing was computed, and a step took what its bucket costs ({what_if.costs.source}). Times are predictions."
    )
