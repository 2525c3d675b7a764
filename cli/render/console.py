"""rich's console for texts that may hold control characters, which it would pass on to the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from llmc.cli.render.terminal_text import escaped


class Console(rich.console.Console):
    """Escapes control characters in all that it prints; rich's own sequences, of colours and bars, stay."""

    def render_str(self, text: str, **options: Any) -> Text:
        # Before it is measured, so that tables keep their columns.
        return super().render_str(escaped(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escaped(text), style)
