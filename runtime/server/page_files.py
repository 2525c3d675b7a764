"""The files of the live page, read once; no other file can be requested."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_SHARED = Path(__file__).parents[1] / "look"
_SCRIPTS = (
    "announcer answer api chart chat clipboard context conversation dom early heatmap markdown markdown_inline message "
    "page reasoning replan requests settings shortcuts speculation store tables theme tool_calls views"
)
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("page.css", "chat.css", "figures.css"), _STYLE),
    **{f"{name}.js": _SCRIPT for name in _SCRIPTS.split()},
}
# Colours and type, shared with reports.
_SHARED_TYPES = {"tokens.css": _STYLE}


def _path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


PAGE_PATHS = frozenset(_path_of(name) for name in (*_TYPES, *_SHARED_TYPES))


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent; etag changes with its bytes."""

    path: str
    content: bytes
    media_type: str
    etag: str


def read_page_files() -> list[PageFile]:
    """All files of the page. Raises OSError when the installation lacks one."""
    files = []
    for folder, types in ((_FOLDER, _TYPES), (_SHARED, _SHARED_TYPES)):
        for name, media_type in types.items():
            content = (folder / name).read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            files.append(PageFile(_path_of(name), content, media_type, tag))
    return files
