"""Sizes and times in readable form."""

from __future__ import annotations

import re
from fractions import Fraction

import typer

from llmc.shown import shown

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", re.IGNORECASE)
_MOST_BYTES = 2**63 - 1
AGE_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def format_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def num_bytes(text: str) -> int:
    """Bytes of `1024`, `500M`, `2GiB`, `500MB`. KB, MB, GB and TB are powers of 1000, all other units powers of 1024.

    Raises ValueError; the message is one sentence.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{shown(text)} is not a size; write bytes, or a number as in 500M, 500MB or 2GiB")
    number, prefix, suffix = match[1], (match[2] or " ").lower(), (match[3] or "").lower()
    size = Fraction(number) * (1000 if suffix == "b" else 1024) ** " kmgt".index(prefix)
    if size > _MOST_BYTES:
        raise ValueError(f"{shown(text)} is more than any machine has: write at most {_MOST_BYTES >> 40}TiB")
    return int(size)


def parse_size(text: str | int) -> int:
    """As num_bytes, for the command line: as the parser of an option it also gets the default, already in bytes.

    Raises typer.BadParameter.
    """
    if isinstance(text, int):
        return text
    try:
        return num_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_age(text: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `60s`, `2w`. Raises typer.BadParameter."""
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not an age; write a number with s, m, h, d or w, as in 30d")
    return float(match[1]) * AGE_SECONDS[match[2].lower()]
