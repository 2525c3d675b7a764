"""The report of a profile: its timeline, a roofline, and tables by op, layer, kernel and command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmc.runtime.profile.report import SHARES
from llmc.runtime.profile.roofline import FAMILY_MARKS, bandwidth_bars, family_of, roofline
from llmc.runtime.report.page import Page, card, key, pair, section, tiles
from llmc.runtime.report.table import Column, Row, table
from llmc.runtime.report.words import NONE, byte_count, microseconds, number, percent

Data = dict[str, Any]
_UNITS = {"read": "GB/s", "f32": "GFLOP/s", "bf16": "GFLOP/s", "int8": "GOP/s"}
_DRAWN = 16  # threads, as timeline.js has it
_COLUMNS = (
    Column("commands"),
    Column("time", help="In the kernel, mean of the threads"),
    Column("of the step"),
    Column("wait", help="At barriers behind it, mean of the threads"),
    Column("read"),
    Column("written"),
    Column("GB/s", help="Of all that is read and written"),
    Column("MFLOP"),
    Column("GFLOP/s"),
    Column("of the limit", help="What it reaches of memory or arithmetic, whichever binds"),
)
_KEYS = (
    "Click a mark, or reach the timeline with Tab: arrows go along, up and down; Enter looks closer; + and − zoom; "
    "Escape shows all. Drag to move, Ctrl and wheel to zoom."
)
_FAMILY_KEY = (
    ("linear", "var(--s1)"), ("attention", "var(--s2)"), ("norm", "var(--s3)"), ("rope", "var(--s4)"),
    ("activation", "var(--s5)"), ("others", "var(--s6)"),
)  # fmt: skip


def profile_html(data: Data, artifact: str) -> str:
    """The page for `profile_data`. artifact: its display name."""
    families = [family_of(kernel, data["commands"]) for kernel in data["kernels"]]
    tokens = sum(sequence["tokens"] for sequence in data["sequences"])
    return Page(
        title=f"Where the time of {data['bucket']} goes",
        lead=f"{artifact}: one replay with {len(data['sequences'])} sequences and {tokens} new tokens on "
        f"{data['threads']} threads, the median of {data['step_us']['replays']}.",
        parts=(
            _tiles(data, tokens),
            _timeline(data),
            _limits(data, families),
            section("By op", _groups("Ops, slowest first", "op", data["ops"])),
            section("By layer", _groups("Layers, in order", "layer", data["layers"], tall=True)),
            section("By kernel", _kernels(data)),
            section("Threads", _threads(data)),
            section("Commands", _commands(data)),
        ),
        method="Made by llmc profile: the bucket was replayed with the clock on, between two measurements of the "
        "machine's limits. Bytes and FLOPs are what a command has to move and compute at least.",
        data=data,
        scripts=("timeline.js",),
    ).html()


def _tiles(data: Data, tokens: int) -> str:
    replay, main = data["replay"], data["per_thread"][0]
    total = {name: sum(row[name] for row in data["families"]) for name in ("bytes", "memory_bytes", "flops")}
    rate = total["memory_bytes"] / replay["us"] / 1e3
    read = data["limits"].get("read")
    beside = f", {percent(rate * 1e9 / read)} of what memory gives" if read else ""
    wait = (main["imbalance_us"] + main["sync_us"]) / replay["us"]
    return tiles(
        (
            (microseconds(replay["us"]), f"the step, {number(tokens / replay['us'] * 1e6)} tokens a second"),
            (percent(replay["kernels_share"]), "of it in kernels, thread 0"),
            (percent(wait), "waiting at barriers, thread 0"),
            (byte_count(total["memory_bytes"]), "weights and KV cache"),
            (f"{number(rate)} GB/s", f"of them over the step{beside}"),
            (f"{number(total['flops'] / replay['us'] / 1e3)} GFLOP/s", f"{number(total['flops'] / 1e6)} MFLOP in all"),
        )
    )


def _timeline(data: Data) -> str:
    buttons = (
        '<div class="toolbar"><button type="button" id="zoom-in">Zoom in</button>'
        '<button type="button" id="zoom-out">Zoom out</button>'
        '<button type="button" id="zoom-all">Show all</button></div>'
    )
    return section(
        "Timeline",
        '<div class="card">',
        buttons,
        '<div id="timeline"><noscript>The timeline needs scripts; the tables below have its figures.</noscript></div>',
        key((name, color, "box") for name, color in _FAMILY_KEY),
        '<dl class="facts" id="timeline-details" aria-live="polite"></dl></div>',
        note=_KEYS + (f" Of {data['threads']} threads {_DRAWN} are drawn." if data["threads"] > _DRAWN else ""),
    )


def _limits(data: Data, families: Sequence[str]) -> str:
    limits = data["limits"]
    known = [f"{name} {number(rate / 1e9)} {_UNITS[name]}" for name, rate in limits.items() if rate is not None]
    shapes = ", ".join(f"{name}: {shape}" for name, (shape, _) in FAMILY_MARKS.items())
    return section(
        "What the machine allows",
        pair(
            card(
                "Roofline",
                roofline(data["kernels"], families, limits),
                note=f"{shapes}, others: square. Above the slope: read from a cache.",
            ),
            card(
                "Bytes a second", bandwidth_bars(data["kernels"], families, limits), note="The slowest kernels first."
            ),
        ),
        note=f"Limits measured before and after: {', '.join(known)}. Numbers are rows of the table of kernels.",
    )


def _cells(row: Data) -> list[str]:
    reached = NONE if row["of_limit"] is None else f"{percent(row['of_limit'])} {row['limit'] or ''}".rstrip()
    return [
        byte_count(row["bytes"] - row["written_bytes"]),
        byte_count(row["written_bytes"]),
        number(row["gb_per_s"]),
        number(row["flops"] / 1e6) if row["flops"] else NONE,
        number(row["gflop_per_s"]),
        reached,
    ]


def _group_cells(row: Data) -> list[str]:
    times = [microseconds(row["us"]), percent(row["of_step"]), microseconds(row["barrier_wait_us"])]
    return [f"{row['commands']}", *times, *_cells(row)]


def _groups(caption: str, name: str, rows: Iterable[Data], tall: bool = False) -> str:
    columns = [Column(name, words=True), *_COLUMNS]
    return table(caption, columns, (Row([row["name"], *_group_cells(row)]) for row in rows), tall=tall)


def _kernels(data: Data) -> str:
    columns = [Column("row"), Column("kernel", words=True), *_COLUMNS]
    rows = (Row([f"{n}", row["name"], *_group_cells(row)]) for n, row in enumerate(data["kernels"], 1))
    return table("Kernels, slowest first", columns, rows, tall=True)


def _threads(data: Data) -> str:
    rows = (
        Row([f"{row['thread']}", *(microseconds(row[f"{name}_us"]) for name in SHARES)]) for row in data["per_thread"]
    )
    return table("Where the time of each thread goes", [Column("thread"), *map(Column, SHARES)], rows, tall=True)


def _commands(data: Data) -> str:
    total, threads = data["replay"]["us"], data["threads"]
    columns = [
        Column("command"),
        Column("name", words=True),
        Column("op", words=True),
        Column("barrier"),
        *_COLUMNS[1:],
    ]

    def wait(row: Data) -> float:
        return float((sum(row["imbalance_us_per_thread"]) + sum(row["sync_us_per_thread"])) / threads)

    rows = (
        Row(
            [
                f"{row['index']}",
                row["name"],
                row["op"],
                "yes" if row["barrier"] else "no",
                microseconds(row["us"]),
                percent(row["us"] / total),
                microseconds(wait(row)),
                *_cells(row),
            ]
        )
        for row in data["commands"]
    )
    return table("Commands, in order", columns, rows, tall=True, hide=True)
