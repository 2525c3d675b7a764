"""One finding about the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """name: what was looked at; value: what it is; advice: what to change, None where nothing need be."""

    name: str
    value: str
    advice: str | None = None
