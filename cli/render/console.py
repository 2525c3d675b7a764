"""A rich console that escapes control characters in texts; rich itself would pass them to the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from llmc.cli.render.terminal_text import escaped


class Console(rich.console.Console):
    """Escapes control characters in everything it prints, but keeps rich's own sequences for colours and bars."""

    def render_str(self, text: str, **options: Any) -> Text:
        # Before measuring, so that tables keep their columns.
        return super().render_str(escaped(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escaped(text), style)
