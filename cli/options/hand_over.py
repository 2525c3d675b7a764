"""The key of hand-overs, which `llmc serve`, `llmc route` and `llmc deploy` take."""

from __future__ import annotations

import typer

from llmc.runtime.server.hand_over_headers import fault_of_key


def hand_over_key(text: str | None) -> str | None:
    """The key; None if there is none. Raises typer.BadParameter for one that is short, or that no header can carry."""
    if not text:
        return None
    fault = fault_of_key(text)
    if fault is not None:
        raise typer.BadParameter(f"--hand-over-key {fault}")
    return text
