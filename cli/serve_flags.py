"""Flags of `llmc serve`, given as one text to the commands that start servers."""

from __future__ import annotations

import shlex

import typer


def serve_flags(text: str | None) -> tuple[str, ...]:
    """The words of `text`. Raises typer.BadParameter for what no `llmc serve` would start with."""
    from llmc.cli.serve import register

    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise typer.BadParameter(f"--serve-flags {text!r} cannot be split into words: {error}") from None
    if not words:
        return ()
    app = typer.Typer(add_completion=False)
    register(app)
    command = typer.main.get_command(app)
    try:
        # Its flags alone: a model may lie on other machines.
        command.make_context("llmc serve", ["MODEL", *words]).close()
    except Exception as error:
        if type(error).__name__ == "Exit":
            raise typer.BadParameter("--serve-flags has --help, which starts no server") from None
        # Some versions of typer include their own click, so its exceptions are recognized by their attributes.
        if not hasattr(error, "format_message"):
            raise
        raise typer.BadParameter(f"--serve-flags for llmc serve: {error.format_message().rstrip('.')}") from None
    return tuple(words)
