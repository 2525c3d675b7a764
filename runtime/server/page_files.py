"""The files of the live page, read once: what is not among them cannot be asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "api.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "context.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "heatmap.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "replan.js": "text/javascript; charset=utf-8",
    "speculation.js": "text/javascript; charset=utf-8",
}


def _path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


PAGE_PATHS = frozenset(_path_of(name) for name in _TYPES)


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent; etag changes with its bytes."""

    path: str
    content: bytes
    media_type: str
    etag: str


def read_page_files() -> list[PageFile]:
    """Every file of the page. Raises OSError when the installation lacks one."""
    files = []
    for name, media_type in _TYPES.items():
        content = (_FOLDER / name).read_bytes()
        files.append(PageFile(_path_of(name), content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"'))
    return files
