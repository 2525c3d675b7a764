"""The site's Markdown is not quite that of other readers: what both make of a page is compared by its elements."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

_ELEMENTS = ("ul", "ol", "li", "pre", "table", "tr", "td", "em", "strong", "blockquote", "img", "h1", "h2", "h3", "h4")
_COMMONMARK = MarkdownIt("commonmark").enable("table")


def read_otherwise(markdown: str, page: str) -> Iterator[str]:
    """ "3 li where there are 2" for each kind of element of which `page`, HTML of the site, has another number than
    CommonMark, with tables, finds in its source."""
    body = re.search(r"<article\b[^>]*>(.*)</article>", page, re.DOTALL)
    if body is None:
        yield "no article"
        return
    # The theme's own, and the anchor that each heading gets.
    made = re.sub(r"<(form|nav|aside)\b.*?</\1>", "", body[1], flags=re.DOTALL)
    meant = _COMMONMARK.render(markdown)
    for element in _ELEMENTS:
        here, there = (len(re.findall(rf"<{element}[ >]", text)) for text in (made, meant))
        if here != there:
            yield f"{here} {element} where there are {there}"
