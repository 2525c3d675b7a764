"""Tokens with their kinds, and those that begin and end texts, from any format."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""SentencePiece's numbering, which llama.cpp shares."""


@dataclass(frozen=True)
class Vocabulary:
    """texts, kinds: by token id. origin: the file. bos, eos, unknown, padding: ids, or None.

    ends: all tokens that end a text, `eos` first. prefix: tokens before bos at the start of every text.
    """

    texts: tuple[str, ...]
    kinds: tuple[int, ...]
    origin: str
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    padding: int | None = None
    ends: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()

    def ids(self) -> dict[str, int]:
        """Token ids by text, without tokens that only pad the embedding; the first of equal texts."""
        found: dict[str, int] = {}
        for token, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind != UNUSED:
                found.setdefault(text, token)
        return found
