"""Renders foreign values for error messages: short, and without control sequences for a terminal."""

from __future__ import annotations

import reprlib
from typing import Any

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80
_BRIEF.maxlist = _BRIEF.maxtuple = 16
_BRIEF.maxdict = 8


def brief(value: Any) -> str:
    """The value's repr, shortened and with control characters escaped."""
    return _BRIEF.repr(value)


def brief_name(name: str) -> str:
    """A name unchanged, or its `brief` if it is long or not printable."""
    return name if name.isprintable() and len(name) <= 200 else brief(name)
