"""The graph of a bucket as one HTML page: commands by layer, bytes moved, and the arena over the step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from llmc.cli.render.graph_formats import InspectError
from llmc.regular_file import read_regular
from llmc.runtime.report.page import Page, key, section, tiles
from llmc.runtime.report.svg import FAINT, INK, PANEL, RULE, Svg, heat, round_steps
from llmc.runtime.report.table import Column, Row, table
from llmc.runtime.report.words import NONE, byte_count, microseconds, number

Data = dict[str, Any]
_MAX_PROFILE_BYTES = 1 << 28
_HUES = {
    "linear": "var(--s1)",
    "attention": "var(--s2)",
    "norm": "var(--s3)",
    "rope": "var(--s4)",
    "activation": "var(--s5)",
}
_KEYS = (
    "Click a layer to unfold it, or reach the graph with Tab: arrows go up, down, in and out; Enter folds and unfolds; "
    "* unfolds all. Arrows beside it go from the command that writes a value to those that read it; dashed: KV cache."
)


def with_times(data: Data, path: Path) -> Data:
    """`graph_data` with `us` of each command from a file of `llmc profile --json`. Raises InspectError."""
    try:
        profile = json.loads(read_regular(path, _MAX_PROFILE_BYTES))
        bucket, commands = profile["bucket"], profile["commands"]
        times = [(str(one["symbol"]), float(one["us"])) for one in commands]
    except OSError as error:
        raise InspectError(f"cannot read --profile {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InspectError(f"--profile {path} is not an output of llmc profile: write it with --json") from None
    if bucket != data["bucket"]:
        raise InspectError(
            f"--profile {path} is of {bucket}, not of {data['bucket']}: profile that one, or show {bucket}"
        )
    if [symbol for symbol, _ in times] != [command["kernel"] for command in data["commands"]]:
        raise InspectError(f"--profile {path} is of another artifact: its commands are others; profile this one")
    timed = [{**command, "us": us} for command, (_, us) in zip(data["commands"], times, strict=True)]
    return {**data, "commands": timed, "profile": {"threads": profile.get("threads"), "us": sum(us for _, us in times)}}


def graph_html(data: Data, artifact: str, buckets: Sequence[str]) -> str:
    """The page for data from `graph_data` or `with_times`. artifact: its name. buckets: names of all its buckets."""
    others = ", ".join(name for name in buckets if name != data["bucket"])
    return Page(
        title=f"The graph of {data['bucket']}",
        lead=f"{artifact}: up to {data['max_tokens']} tokens, {data['max_seqs']} sequences and {data['max_samples']} "
        f"samples; bytes and FLOPs are of a step that fills it.",
        parts=(
            _tiles(data),
            _graph(data),
            section(
                "Arena over the step",
                f'<div class="card">{_arena(data)}{_families()}</div>',
                note="Each value from the command that writes it to the last that reads it, where it lies in the arena."
                " The dashed line is what is needed at a time; holes below it are free.",
            ),
            section("By op", _by_op(data)),
            section("Commands", _commands(data)),
        ),
        method=f"Made by llmc inspect --html from graphs.bin. Other buckets of this artifact: {others or 'none'}.",
        data=data,
        scripts=("graph.js",),
    ).html()


def _families() -> str:
    return key([*((name, color, "box") for name, color in _HUES.items()), ("others", "var(--s6)", "box")])


def _tiles(data: Data) -> str:
    commands = data["commands"]
    weights = {o["name"]: o["bytes"] for c in commands for o in c["operands"] if o["kind"] == "weight"}
    figures = [
        (f"{len(commands)}", f"commands of {len({c['kernel'] for c in commands})} kernels"),
        (byte_count(sum(weights.values())), f"in {len(weights)} weights"),
        (byte_count(sum(c["read_bytes"] for c in commands)), "read"),
        (byte_count(sum(c["written_bytes"] for c in commands)), "written"),
        (f"{number(sum(c['flops'] for c in commands) / 1e6)} MFLOP", "of products and attention"),
        (
            byte_count(data["arena_bytes"]),
            f"arena, at most {byte_count(max(c['arena_live_bytes'] for c in commands))} needed at once",
        ),
    ]
    if profile := data.get("profile"):
        figures.append((microseconds(profile["us"]), f"in kernels, measured on {profile['threads']} threads"))
    return tiles(figures)


# ---- the tree --------------------------------------------------------------------------------------------------------


def _graph(data: Data) -> str:
    groups: dict[str, list[Data]] = {}
    for command in data["commands"]:
        groups.setdefault(command["group"], []).append(command)
    most = max((c.get("us", 0.0) for c in data["commands"]), default=0.0)
    tree = "".join(_group(name, commands, most) for name, commands in groups.items())
    buttons = (
        '<div class="toolbar"><button type="button" id="unfold-all">Unfold all</button>'
        '<button type="button" id="fold-all">Fold all</button></div>'
    )
    timed = "us" in data["commands"][0]
    heads = "".join(
        f'<span class="{name}">{words}</span>'
        for name, words in (("what", "op and name"), ("type", "makes"), ("n moved", "reads"), ("n moved w", "writes"))
    )
    name = escape(f"Commands of {data['bucket']} by layer")
    heads += f'<span class="n">{"time" if timed else "MFLOP"}</span>'
    return section(
        "Graph",
        buttons,
        '<div class="graph"><div>',
        f'<div class="flow" aria-hidden="true"><div class="node heads {_kind(timed)}">{heads}</div></div>',
        '<div class="flow"><svg id="graph-edges" aria-hidden="true"></svg>',
        f'<ul role="tree" id="graph" aria-label="{name}">{tree}</ul></div></div>',
        '<div class="card aside" id="graph-details" tabindex="0" role="region" aria-label="The chosen command" '
        'aria-live="polite"><noscript>What a command reads and writes needs scripts; the table of commands below has '
        "its figures.</noscript></div></div>",
        _families(),
        note=_KEYS,
    )


def _kind(timed: bool) -> str:
    return "timed" if timed else "plain"


def _group(name: str, commands: Sequence[Data], most: float) -> str:
    timed = "us" in commands[0]
    sums: Data = {k: sum(c[k] for c in commands) for k in ("read_bytes", "written_bytes", "flops")}
    if timed:
        sums["us"] = sum(c["us"] for c in commands)
    size = f"{len(commands)} command{'s' if len(commands) > 1 else ''}"
    label = f"{name}, {size}"
    inside = "".join(_command(command, most) for command in commands)
    row = _node("", name, size, "", sums)
    return (
        f'<li role="treeitem" aria-level="1" aria-expanded="true" aria-selected="false" tabindex="-1" '
        f'aria-label="{escape(label)}" data-group="{escape(name)}" data-title="{escape(label)}">{row}'
        f'<ul role="group">{inside}</ul></li>'
    )


def _command(command: Data, most: float) -> str:
    made = [o for o in command["operands"] if o["written"]]
    kind = f"{made[-1]['dtype']}[{', '.join(map(str, made[-1]['shape']))}]" if made else ""
    row = _node(command["family"], command["op"], command["name"], kind, command, most)
    title = f"{command['index']}: {command['name']}"
    label = (
        f"{command['op']}, {command['name']}, makes {kind}, reads {byte_count(command['read_bytes'])}, writes "
        f"{byte_count(command['written_bytes'])}"
    )
    return (
        f'<li role="treeitem" aria-level="2" aria-selected="false" tabindex="-1" aria-label="{escape(label)}" '
        f'data-command="{command["index"]}" data-title="{escape(title)}">{row}</li>'
    )


def _node(family: str, title: str, small: str, kind: str, sums: Data, most: float = 0.0) -> str:
    timed = "us" in sums
    last = microseconds(sums["us"]) if timed else number(sums["flops"] / 1e6) if sums["flops"] else NONE
    bar = f'<span class="share" style="--part:{100 * sums["us"] / most:.0f}%"></span>' if timed and most else ""
    return (
        f'<div class="node {_kind(timed)} {family}">'
        f'<span class="what"><b>{escape(title)}</b><small>{escape(small)}</small></span>'
        f'<span class="type">{escape(kind)}</span>'
        f'<span class="n moved">{byte_count(sums["read_bytes"])}</span>'
        f'<span class="n moved w">{byte_count(sums["written_bytes"])}</span>'
        f'<span class="n">{last}{bar}</span></div>'
    )


# ---- the arena -------------------------------------------------------------------------------------------------------


def _arena(data: Data, width: int = 1180) -> str:
    commands, plan, total = data["commands"], data["memory_plan"], data["arena_bytes"]
    height, left, right, top, bottom = 340, 70, 12, 12, 40
    most = max(c["arena_live_bytes"] for c in commands)
    svg = Svg(
        width,
        height,
        f"Map of the arena over the {len(commands)} commands of the step",
        f"At most {most:,} of {total:,} bytes are needed at once; the table of commands has what each needs.",
    )
    across, deep = (width - left - right) / len(commands), (height - top - bottom) / max(total, 1)
    base = height - bottom
    svg.rect(left, top, width - left - right, base - top, PANEL)
    for step in round_steps(0, total):
        if step <= total:
            svg.line([(left, base - step * deep), (width - right, base - step * deep)], RULE)
            svg.text(left - 6, base - step * deep + 4, byte_count(step), anchor="end")
    for value in plan:
        family = commands[value["first_command"]]["family"]
        first, last = value["first_command"], value["last_command"]
        words = f"{value['name']}, {value['bytes']:,} bytes at {value['offset']:,}: commands {first} to {last}"
        color = _HUES.get(family, "var(--s6)")
        svg.rect(
            left + first * across,
            base - (value["offset"] + value["bytes"]) * deep,
            (last - first + 1) * across - 0.6,
            value["bytes"] * deep,
            heat(color, 0.5),
            words,
            color,
        )
    steps = [
        (left + (n + side) * across, base - c["arena_live_bytes"] * deep)
        for n, c in enumerate(commands)
        for side in (0, 1)
    ]
    svg.line(steps, INK, 1.4, "5 3")
    groups = {c["group"]: c["index"] for c in reversed(commands)}
    drawn = -99.0
    for name, first in sorted(groups.items(), key=lambda item: item[1]):
        x = left + first * across
        svg.line([(x, base), (x, base + 5)], FAINT)
        if x - drawn > 62:
            svg.text(x, base + 17, name)
            drawn = x
    svg.text(left, height - 6, "commands in order; height: bytes of the arena")
    return svg.html()


# ---- tables ----------------------------------------------------------------------------------------------------------


def _by_op(data: Data) -> str:
    ops: dict[str, list[Data]] = {}
    for command in data["commands"]:
        ops.setdefault(command["op"], []).append(command)
    timed = "us" in data["commands"][0]
    columns = [Column("op", words=True), Column("commands"), Column("kernels"), *_moved(timed)]
    rows = (
        Row([name, f"{len(commands)}", f"{len({c['kernel'] for c in commands})}", *_sums(commands, timed)])
        for name, commands in sorted(ops.items(), key=lambda item: -sum(c["read_bytes"] for c in item[1]))
    )
    return table("Ops, by the bytes that they read", columns, rows)


def _moved(timed: bool) -> list[Column]:
    return [Column(name) for name in ("read", "written", "MFLOP", *(["time"] if timed else []))]


def _sums(commands: Sequence[Data], timed: bool) -> list[str]:
    flops = sum(c["flops"] for c in commands)
    cells = [byte_count(sum(c[name] for c in commands)) for name in ("read_bytes", "written_bytes")]
    cells.append(number(flops / 1e6) if flops else NONE)
    return [*cells, microseconds(sum(c["us"] for c in commands))] if timed else cells


def _commands(data: Data) -> str:
    timed = "us" in data["commands"][0]
    columns = [
        Column("command"),
        *(Column(name, words=True) for name in ("name", "op", "kernel", "weights", "makes")),
        *_moved(timed),
        Column("arena in use"),
    ]
    rows = []
    for command in data["commands"]:
        weights = ", ".join(o["name"] for o in command["operands"] if o["kind"] == "weight")
        makes = ", ".join(f"{o['dtype']}{o['shape']}" for o in command["operands"] if o["written"])
        cells = [f"{command['index']}", command["name"], command["op"], command["kernel"], weights or NONE, makes]
        rows.append(Row([*cells, *_sums([command], timed), f"{command['arena_live_bytes']:,}"]))
    return table("Commands, in order", columns, rows, tall=True, hide=True)
