"""--speculate and --draft: where an engine's guesses of next tokens come from, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.shown import shown

from .request_error import RequestError

SOURCES, DEFAULT_GUESSES, MAX_GUESSES = ("ngram", "draft"), 16, 64
SPECULATE_METAVAR = "off|ngram|draft"


@dataclass(frozen=True)
class Speculation:
    """tokens: most guesses per sequence and step; 0: none. always: as many as a graph holds even if they do not pay;
    for tests and measurements. draft: artifact of the model that guesses; None: guesses come from prompt and output."""

    tokens: int = 0
    always: bool = False
    draft: Path | None = None

    def engine_options(self) -> dict[str, Any]:
        """The fields of the engine's options."""
        return {"speculate_tokens": self.tokens, "speculate_always": int(self.always)}

    def __str__(self) -> str:
        source = "ngram" if self.draft is None else "draft"
        return f"{source}:{self.tokens}" if self.tokens else "off"


def parse_speculation(text: str | None, draft: str | Path | None = None, name: str = "speculate") -> Speculation:
    """Reads "off", "ngram", "ngram:K", or with a draft "draft" and "draft:K". None means "draft" with a draft, else
    "off". "ngram:K:always" checks K guesses in every step. Raises RequestError."""
    if text is None:
        text = "off" if draft is None else "draft"
    if text == "off":
        return Speculation()
    source, *rest = str(text).split(":")
    always = rest[1:] == ["always"]
    most = rest[0] if rest else str(DEFAULT_GUESSES)
    known = source in SOURCES and len(rest) <= (2 if always else 1)
    if not (known and most.isascii() and most.isdigit() and len(most) < 4 and 1 <= int(most) <= MAX_GUESSES):
        raise RequestError(
            f"{name} {shown(text)} is unknown: use off, ngram or draft, or ngram:K with 1 to {MAX_GUESSES} guesses"
        )
    if source == "draft" and draft is None:
        raise RequestError(f"{name} {shown(text)} needs a model that guesses: give its artifact as draft")
    if source != "draft" and draft is not None:
        raise RequestError(f"{name} {shown(text)} leaves the draft {draft} nothing to do: use draft:K, or leave it out")
    return Speculation(int(most), always, None if draft is None else Path(draft))
