"""Keys of clients in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.regular_file import read_text


class KeysError(ValueError):
    """A file that gives no keys; the message is one sentence."""


def read_keys(file: Path) -> Sequence[str]:
    """Keys of a file, one a line; blank lines and those that start with # are left out. Raises KeysError."""
    try:
        lines = [line.strip() for line in read_text(file, 1 << 20).splitlines()]
    except OSError as error:
        raise KeysError(f"cannot read --api-key-file {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise KeysError(f"cannot read --api-key-file {file}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise KeysError(f"--api-key-file {file} has no key: write one a line")
    return keys
