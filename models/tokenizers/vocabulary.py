"""Tokens with their kinds, and which of them begin and end texts, whatever format they come from."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""As SentencePiece numbers them, and llama.cpp after it."""


@dataclass(frozen=True)
class Vocabulary:
    """texts, kinds: by token id. origin: the file. bos, eos, unknown, padding: ids, None where there is none.

    ends: every token that ends a text, `eos` first. prefix: tokens that every text begins with, before bos.
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
        """Token ids by text, without tokens that only fill the embedding; of equal texts the first."""
        found: dict[str, int] = {}
        for token, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind != UNUSED:
                found.setdefault(text, token)
        return found
