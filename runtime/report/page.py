"""The template of all reports: one self-contained HTML file, and parts to fill it.

Parts are HTML; text from a model, a trace or a user must pass through `escape`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from llmc.replaced_file import write_replaced

_FOLDER = Path(__file__).parent
_TOKENS = _FOLDER.parent / "look" / "tokens.css"
DATA_ID = "report-data"
"""Id of the element that contains the report's data as JSON, as printed by `--json`."""


class ReportError(RuntimeError):
    """A report cannot be made or written; the message is one sentence."""


@dataclass(frozen=True)
class Page:
    """A report.

    lead: one sentence under the title. warnings: caveats on the figures. parts: HTML, in order.
    method: how the report was made, shown at the end. data: read by the scripts, and extractable by tools.
    scripts: files of this folder, run after loading. Tables have every figure even without them.
    """

    title: str
    lead: str
    parts: Sequence[str]
    method: str
    warnings: Sequence[str] = ()
    data: Mapping[str, Any] | Sequence[Any] | None = None
    scripts: Sequence[str] = field(default=())

    def html(self) -> str:
        """The whole file. Raises OSError if the installation lacks a part."""
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
    """The policy: nothing is fetched, and only these scripts run, whatever the data contains."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    allowed = " ".join(hashes) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


def _data(data: Mapping[str, Any] | Sequence[Any]) -> str:
    # A name may contain "</script>" or "<!--", which would end or change the element regardless of JSON.
    text = json.dumps(_finite(data), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{DATA_ID}">{text}</script>'


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent by null."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(html: str, path: Path) -> None:
    """Writes the file atomically. Raises ReportError."""
    try:
        write_replaced(path, html)
    except OSError as error:
        raise ReportError(f"cannot write report {path}: {error.strerror or error}") from error


def section(title: str, *parts: str, note: str = "") -> str:
    """A section with a heading and a sentence below it."""
    words = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{words}{''.join(parts)}</section>"


def card(title: str, *parts: str, note: str = "") -> str:
    """A panel with a small heading."""
    words = f'<div class="note">{escape(note)}</div>' if note else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{words}{"".join(parts)}</div>'


def pair(*parts: str) -> str:
    """Two parts side by side, if there is room."""
    return f'<div class="pair">{"".join(parts)}</div>'


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures: (value, label) of each."""
    body = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(what)}</span></div>' for v, what in values)
    return f'<div class="tiles">{body}</div>'


def key(entries: Iterable[tuple[str, str, str]]) -> str:
    """A legend: (name, CSS colour, "solid", "dashed", "dotted" or "box") of each mark."""
    items = []
    for name, color, dash in entries:
        mark = '<i class="box"' if dash == "box" else "<i"
        style = f"--mark:{color}" if dash == "box" else f"--mark:{color};--dash:{dash}"
        items.append(f'<li>{mark} style="{style}"></i>{escape(name)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'
