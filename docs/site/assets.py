"""What a page of the site loads by itself: nothing that is not in the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Tags and attributes that make a browser load something; a link of prose does not.
_TAG = re.compile(r"<(?:script|img|iframe|source|video|audio|object|embed|link)\b[^>]*>", re.IGNORECASE)
_ADDRESS = re.compile(r"\b(?:src|href|data|srcset|poster)\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE)
# Relations of <link> by which nothing is loaded.
_NOT_LOADED = re.compile(r"\brel\s*=\s*[\"']?(?:canonical|alternate|next|prev|edit)\b", re.IGNORECASE)
_IN_STYLES = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """ "PAGE loads ADDRESS" for every script, style, font and picture that a page or style takes from elsewhere."""
    for file in sorted(site.rglob("*")):
        if file.suffix not in (".html", ".css"):
            continue
        text = file.read_text(encoding="utf-8")
        found = _IN_STYLES.findall(text) if file.suffix == ".css" else list(_by_tags(text))
        yield from (f"{file.relative_to(site)} loads {address}" for address in found)


def _by_tags(page: str) -> Iterator[str]:
    for tag in _TAG.findall(page):
        if not _NOT_LOADED.search(tag):
            yield from _ADDRESS.findall(tag)
