"""Published figures: bench/results/*.json, one file per model and machine, and their Markdown for pages.

A file has `format`, `machine`, `date` (YYYY-MM-DD, or none), `commands`, and any of these parts:

    limits   by name (read, f32, bf16, int8): GB/s, GFLOP/s or GOP/s
    speed    per contender: prefill and decode, tok/s by tokens and by sequences; peak, % by arithmetic, of the longest
             prompt of at most 512 tokens; reading, % of the read bandwidth with the fewest sequences
    ratios   llmc's variant over a peer's, by figure: tok/s over tok/s of the same round
    start    per contender: python and native, seconds to the first token; memory, GiB
    serve    per contender: served and offline, output tok/s; beside, llmc's server over it
    tables   by name, of scripts other than bench.peers: heads, and rows with a name, values and perhaps a unit

A figure is a number, or a list: least and most, or median, least and most over the rounds. In `tables` it may be text.
`transcribed` marks a file copied from a page, for which the measurements were not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.machine_limits import UNITS
from bench.peers.report import OWN, significant, table
from bench.peers.store import StoreError

FORMAT = 1
RESULTS = Path(__file__).resolve().parent.parent / "results"
LABELS = {"openvino": "OpenVINO", "vllm": "vLLM"}
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
NONE = "–"

Value = float | list[float] | None


@dataclass(frozen=True)
class Results:
    """One file. name: its name without .json."""

    name: str
    document: dict[str, Any]

    @classmethod
    def load(cls, name: str, folder: Path = RESULTS) -> Results:
        """Reads a file. Raises StoreError if it does not exist or has another format."""
        path = folder / f"{name}.json"
        if not path.is_file():
            raise StoreError(f"{path} does not exist: publish the run, or take its block out of the page")
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] == FORMAT:
                return cls(name, document)
        except (ValueError, KeyError, TypeError):
            pass
        raise StoreError(f"{path} has no published figures of format {FORMAT}: publish the run again")

    def parts(self) -> list[str]:
        """Parts that `markdown` can show, in the order of a page."""
        parts = [part for part in _PARTS if self.document.get(part)]
        return [*parts, *(f"tables.{name}" for name in self.document.get("tables", {}))]

    def markdown(self, part: str) -> str:
        """Markdown of a part, without a newline at its end. Raises StoreError if the file lacks the part."""
        if part not in self.parts():
            raise StoreError(f"bench/results/{self.name}.json has no {part!r}: it has {', '.join(self.parts())}")
        if part.startswith("tables."):
            return _free_table(self.document["tables"][part.removeprefix("tables.")])
        return _PARTS[part](self.document[part])


def label(engine: str, variant: str) -> str:
    """Name of a contender on pages: "OpenVINO int8", "llmc, file of Q8_0"."""
    name = LABELS.get(engine, engine)
    return f"{name}, file of {variant.removeprefix('gguf-')}" if variant.startswith("gguf-") else f"{name} {variant}"


def text(value: Value, unit: str = "", decimals: int | None = None) -> str:
    """Text of a figure: 1.9, 1.41 (1.18–1.64), 70 % (67–74) or 1.1–3.5; a dash for None. The unit follows the first
    number."""
    if value is None:
        return NONE
    words = [
        str(one) if decimals is None else f"{one:.{decimals}f}"
        for one in (value if isinstance(value, list) else [value])
    ]
    suffix = f" {unit}" if unit else ""
    if len(words) == 3:
        return f"{words[0]}{suffix} ({words[1]}–{words[2]})"
    return "–".join(words) + suffix


def median(value: Value) -> str:
    """The median in three digits."""
    if value is None:
        return NONE
    return significant(value[0] if isinstance(value, list) else value, 3)


def _limits(limits: Mapping[str, Value]) -> str:
    def one(name: str, value: Value) -> str:
        first, *span = value if isinstance(value, list) else [value]
        return f"{first:,} {UNITS[name]} {name}" + (f" ({span[0]:,}–{span[1]:,})" if span else "")

    return f"Limits: {', '.join(one(name, value) for name, value in limits.items())}."


def _speed(rows: list[dict[str, Any]]) -> str:
    prefills, batches = (_sizes(row[name] for row in rows) for name in ("prefill", "decode"))
    at = f" at {peak_prompt(prefills)}" if len(prefills) > 1 else ""
    heads = ["engine", *_named("prefill", prefills), f"of the peak{at}", *_named("decode", batches)]
    heads[-1] += " sequences"
    heads.append(f"of reading at {batches[0]}")
    cells = [
        [
            label(row["engine"], row["variant"]),
            *(median(row["prefill"].get(str(size))) for size in prefills),
            ", ".join(f"{share} % of {name}" for name, share in row["peak"].items()) or NONE,
            *(median(row["decode"].get(str(size))) for size in batches),
            text(row["reading"], "%"),
        ]
        for row in rows
    ]
    return table(heads, cells)


def peak_prompt(prefills: Iterable[int]) -> int:
    """Tokens of the prompt that is compared with the peak: the longest of at most 512, or else the shortest."""
    sizes = list(prefills)
    return max((size for size in sizes if size <= 512), default=min(sizes))


def _ratios(rows: list[dict[str, Any]]) -> str:
    figures = list(dict.fromkeys(figure for row in rows for figure in row["figures"]))
    cells = [
        [f"{label(OWN, row['variant'])} ÷ {label(*row['peer'])}"]
        + [text(row["figures"].get(figure), decimals=2) for figure in figures]
        for row in rows
    ]
    return table(["median (least–most)", *(figure.replace(":", " ") for figure in figures)], cells)


def _start(rows: list[dict[str, Any]]) -> str:
    heads = {"python": "from Python, s", "native": "C or C++ program, s", "memory": "peak memory, GiB"}
    return _contenders(rows, heads)


def _serve(rows: list[dict[str, Any]]) -> str:
    heads = {"served": "served, tok/s", "offline": "without a server, tok/s", "beside": "llmc's server beside it"}
    return _contenders(rows, heads)


def _contenders(rows: list[dict[str, Any]], heads: Mapping[str, str]) -> str:
    """A table with a row per contender, and its `note`. Columns without figures are left out."""
    columns = [column for column in heads if any(column in row for row in rows)]
    cells = [
        [", ".join([label(row["engine"], row["variant"]), *([row["note"]] if "note" in row else [])])]
        + [text(row.get(column), decimals=2 if column == "beside" else None) for column in columns]
        for row in rows
    ]
    return table(["engine", *(heads[column] for column in columns)], cells)


def _commands(commands: list[str]) -> str:
    return "\n".join(f"    {command}" for command in commands)


def _free_table(stated: dict[str, Any]) -> str:
    rows = [[row["name"], *(text(value, row.get("unit", "")) for value in row["values"])] for row in stated["rows"]]
    return table(stated["heads"], rows)


def _sizes(columns: Iterable[Mapping[str, Value]]) -> list[int]:
    return sorted({int(size) for column in columns for size in column})


def _named(name: str, sizes: list[int]) -> list[str]:
    """Heads of columns by size. Only the first has the name, so that columns stay narrow."""
    return [f"{name} {sizes[0]}", *map(str, sizes[1:])]


_PARTS: Mapping[str, Callable[[Any], str]] = {
    "limits": _limits,
    "speed": _speed,
    "ratios": _ratios,
    "start": _start,
    "serve": _serve,
    "commands": _commands,
}
