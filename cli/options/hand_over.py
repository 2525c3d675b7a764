"""The key of hand-overs, which `llmc serve` and `llmc route` take."""

from __future__ import annotations

import typer

LEAST = 16


def hand_over_key(text: str | None) -> str | None:
    """The key; None if there is none. Raises typer.BadParameter for one that is short, or that no header can carry."""
    if not text:
        return None
    if len(text) < LEAST or not text.isascii() or not text.isprintable() or " " in text:
        raise typer.BadParameter(
            f"--hand-over-key has {len(text)} characters: use {LEAST} or more, ASCII and without spaces, such as those "
            "of openssl rand -hex 32"
        )
    return text
