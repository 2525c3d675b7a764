"""Prints texts on stdout while their tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from llmc.cli.render.terminal_text import exact, printable

if TYPE_CHECKING:
    from llmc.runtime.outputs import TokenDelta


class LiveText:
    """Prints continuations in input order as they arrive, each ended by a newline.

    heads: text before each prompt's continuations. Text for a later continuation is kept until its turn. ids: print
    token ids in place of texts.
    """

    def __init__(self, heads: Sequence[str], n: int, out: TextIO, *, ids: bool = False) -> None:
        self._ids = ids
        self._heads = heads
        self._n = n
        self._out = exact(out)
        # A program that reads the texts gets them unchanged.
        self._shown = printable if out.isatty() else str
        self._kept: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        self._turn = 0
        self._begun = False

    def take(self, delta: TokenDelta) -> None:
        """Takes the new text of a continuation."""
        which = delta.index * self._n + delta.output_index
        text = "".join(f"{token} " for token in delta.token_ids) if self._ids else delta.text
        self._kept.setdefault(which, []).append(text)
        if delta.finish_reason is not None:
            self._ended.add(which)
        if which == self._turn:
            self._print()

    def close(self) -> None:
        """Ends the line of an interrupted continuation."""
        if self._begun:
            self._write("\n")
            self._begun = False

    def _print(self) -> None:
        while self._turn in self._kept:
            text = "".join(self._kept.pop(self._turn))
            self._write(text if self._begun else self._heads[self._turn // self._n] + text)
            self._begun = True
            if self._turn not in self._ended:
                return
            self.close()
            self._ended.remove(self._turn)
            self._turn += 1

    def _write(self, text: str) -> None:
        if text:
            self._out.write(self._shown(text))
            self._out.flush()
