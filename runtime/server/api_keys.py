"""Keys of clients: in a file, and in a request."""

from __future__ import annotations

import contextlib
import hmac
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


class KnownKeys:
    """Finds the key that a client sends, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(number, form) for number, key in enumerate(keys) for form in _forms(key)]

    def number(self, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
        """Number of the key in a request; None if it is unknown or missing."""
        sent = dict(headers)
        # Bytes, not text: white space in Latin-1 may be part of a character in UTF-8.
        scheme, _, bearer = sent.get(b"authorization", b"").partition(b" ")
        shown = [bearer if scheme.lower() == b"bearer" else b"", sent.get(b"x-api-key", b"")]
        # Every key is compared, in constant time, so that the answer does not tell how close a guess was.
        tokens = [token.strip(b" \t") for token in shown]
        known = [number for token in tokens for number, key in self._keys if hmac.compare_digest(token, key)]
        return known[0] if known else None


def _forms(key: str) -> list[bytes]:
    """Bytes of a key as clients send it: in UTF-8, or in Latin-1 as some libraries write headers."""
    forms = [key.encode("utf-8", "surrogateescape")]
    if not key.isascii():
        with contextlib.suppress(UnicodeEncodeError):
            forms.append(key.encode("latin-1"))
    return forms
