"""Which form of decode buckets suits the steps of a server: for the longest context, or for the total of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llmc.buckets.contexts import Contexts

from .shapes import ShapeUse

_CLEARLY = 0.1
"""A smaller share of empty context is no reason for another form."""


@dataclass(frozen=True, slots=True)
class Evenness:
    """Decode steps of a server. rectangle: tokens of sequences × longest context. contexts: of those, the ones that
    belong to a sequence."""

    steps: float
    rectangle: float
    contexts: float

    @classmethod
    def of(cls, uses: Iterable[ShapeUse]) -> Evenness:
        mine = [use for use in uses if use.shape.phase == "decode"]
        return cls(
            sum(use.steps for use in mine),
            sum(use.steps * use.shape.rectangle for use in mine),
            sum(use.steps * min(use.shape.total, use.shape.rectangle) for use in mine),
        )

    @property
    def uneven(self) -> float:
        """Share of sequences × longest context that no sequence has, 0 … 1."""
        return 1 - self.contexts / self.rectangle if self.rectangle else 0.0

    @property
    def suits(self) -> Contexts | None:
        """The form with the smaller tables; None if both are about alike."""
        return Contexts.total if self.uneven >= _CLEARLY else None

    def line(self, padding: str) -> str:
        """One sentence for people. padding: "skipped" or "computed", as the target treats it."""
        if not self.rectangle:
            return "no decode step yet"
        share = f"{self.uneven:.0%} of sequences × longest context belongs to no sequence"
        if self.suits is None:
            return f"contexts of decode steps are alike: {share}, so either form of buckets suits them"
        costs = "which costs time" if padding == "computed" else "which takes table entries and graphs, but no time"
        return f"contexts of decode steps differ: {share}, {costs}; buckets for a total suit them"

    def as_dict(self, padding: str) -> dict[str, Any]:
        """As plain values."""
        suits = None if self.suits is None else self.suits.value
        return {"steps": self.steps, "uneven": self.uneven, "suits": suits, "line": self.line(padding)}
