"""Options in bytes, which Python takes as the command line does."""

from __future__ import annotations

from numbers import Real
from typing import Any

from llmc.shown import shown
from llmc.units import num_bytes

from .request_error import RequestError


def size_option(name: str, value: Any) -> int:
    """Bytes of a whole number, or of a text such as "2GiB". Raises RequestError."""
    if isinstance(value, str):
        try:
            return num_bytes(value)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from error
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value >= 0 or value % 1:
        raise RequestError(f'{name} {shown(value)} is not a size: give bytes as a whole number, or a text as "2GiB"')
    return int(value)
