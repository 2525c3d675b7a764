"""One finding about the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """name: the subject. value: the finding. advice: what to change; None for nothing."""

    name: str
    value: str
    advice: str | None = None
