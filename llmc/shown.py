"""A user-supplied value for an error message: one line of limited length."""

from __future__ import annotations

_MOST = 60
_MOST_BITS = 256


def shown(value: object) -> str:
    """Its `repr`, shortened; control characters are escaped."""
    # An integer of thousands of digits cannot be printed at all.
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        value = value[: 2 * _MOST]
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
