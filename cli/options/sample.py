"""The text of a file that an option names."""

from __future__ import annotations

from pathlib import Path

import typer

from llmc.regular_file import read_text

_MOST_BYTES = 1 << 30


def read_sample(path: Path, flag: str = "--text") -> str:
    """The text of a file. flag: the option that names it. Raises BadParameter if it is not text, or empty."""
    try:
        sample = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise typer.BadParameter(f"{flag}: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{flag}: {path} is not UTF-8 text: convert it first") from None
    if not sample.strip():
        raise typer.BadParameter(f"{flag}: {path} is empty: give a file with text")
    return sample
