"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", re.IGNORECASE)
AGE_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def format_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def parse_size(text: str) -> int:
    """Bytes of `500M`, `2GiB`, `1024`; units are powers of 1024. Raises typer.BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes or a number with K, M, G or T, as in 500M")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def parse_age(text: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `60s`, `2w`. Raises typer.BadParameter."""
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not an age; write a number with s, m, h, d or w, as in 30d")
    return float(match[1]) * AGE_SECONDS[match[2].lower()]
