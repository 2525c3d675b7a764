"""The template of every report: one HTML file that asks nobody for anything, and parts to fill it with.

Parts are HTML; whatever comes from a model, a trace or a user goes through `escape` on the way into one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_TOKENS = _FOLDER.parent / "look" / "tokens.css"
DATA_ID = "report-data"
"""Id of the element whose text is the report's data as JSON: what `--json` prints."""


class ReportError(RuntimeError):
    """A report that cannot be made or written; the message is one sentence."""


@dataclass(frozen=True)
class Page:
    """A report.

    lead: one sentence under the title. warnings: what a reader must know before trusting figures. parts: HTML, in
    order.
    method: how it was made, at the end. data: what the scripts read and machines may take out again.
    scripts: files of this folder, run after the page is there. Without them, too, every figure is in the tables.
    """

    title: str
    lead: str
    parts: Sequence[str]
    method: str
    warnings: Sequence[str] = ()
    data: Mapping[str, Any] | Sequence[Any] | None = None
    scripts: Sequence[str] = field(default=())

    def html(self) -> str:
        """The whole file. Raises OSError when the installation lacks a part of it."""
        style = "".join(path.read_text(encoding="utf-8") for path in (_TOKENS, _FOLDER / "report.css"))
        scripts = [(_FOLDER / name).read_text(encoding="utf-8") for name in self.scripts]
        return "".join(
            [
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
                f"<title>{escape(self.title)}</title><style>{style}</style></head><body>",
                '<a class="skip" href="#report">Skip to the figures</a>',
                f"<header><h1>{escape(self.title)}</h1><p>{escape(self.lead)}</p>",
                *(f'<p class="warn">{escape(line)}</p>' for line in self.warnings),
                '</header><main id="report">',
                *self.parts,
                f"</main><footer>{escape(self.method)}</footer>",
                "" if self.data is None else _data(self.data),
                *(f"<script>{script}</script>" for script in scripts),
                "</body></html>\n",
            ]
        )


def _policy(scripts: Iterable[str]) -> str:
    """Nothing is fetched, and nothing runs but these scripts, whatever a name in the data looks like."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    allowed = " ".join(hashes) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


def _data(data: Mapping[str, Any] | Sequence[Any]) -> str:
    # A name may hold "</script>" or "<!--", which end or change the element whatever JSON says.
    text = json.dumps(_finite(data), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{DATA_ID}">{text}</script>'


def _finite(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(html: str, path: Path) -> None:
    """Writes the file in one step. Raises ReportError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ReportError(f"cannot write report {path}: {error.strerror or error}") from error


def section(title: str, *parts: str, note: str = "") -> str:
    """A part with a heading and a sentence under it."""
    words = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{words}{''.join(parts)}</section>"


def card(title: str, *parts: str, note: str = "") -> str:
    """A panel with a small heading."""
    words = f'<div class="note">{escape(note)}</div>' if note else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{words}{"".join(parts)}</div>'


def pair(*parts: str) -> str:
    """Side by side where there is room."""
    return f'<div class="pair">{"".join(parts)}</div>'


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures: (value, what it is) of each."""
    body = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(what)}</span></div>' for v, what in values)
    return f'<div class="tiles">{body}</div>'


def key(entries: Iterable[tuple[str, str, str]]) -> str:
    """What marks mean: (name, CSS colour, "solid", "dashed", "dotted" or "box") of each."""
    items = []
    for name, color, dash in entries:
        mark = '<i class="box"' if dash == "box" else "<i"
        style = f"--mark:{color}" if dash == "box" else f"--mark:{color};--dash:{dash}"
        items.append(f'<li>{mark} style="{style}"></i>{escape(name)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def check_html_option(path: Path | None) -> None:
    """Refuses before a long run what could not be written after it. Raises ReportError."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        why = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ReportError(f"cannot write --html {path}: {why}")
