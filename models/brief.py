"""What an error says of a value from somebody else: not too much, and nothing that a terminal would obey."""

from __future__ import annotations

import reprlib
from typing import Any

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80
_BRIEF.maxlist = _BRIEF.maxtuple = 16
_BRIEF.maxdict = 8


def brief(value: Any) -> str:
    """Its repr, which shortens long ones and escapes control characters."""
    return _BRIEF.repr(value)


def brief_name(name: str) -> str:
    """A name as it is, or its `brief` where it is long or not printable."""
    return name if name.isprintable() and len(name) <= 200 else brief(name)
