"""Headers in which a router tells a decode server where a prompt is computed; those of clients are dropped there.

INTERIM_HEADER asks for an interim answer of status HANDED_OVER: the hand-over has ended, and the router need not wait
for the answer. KEY_ENV: environment variable with the key, which no list of processes shows."""

from __future__ import annotations

URL_HEADER = "x-llmc-prefill-url"
KEY_HEADER = "x-llmc-hand-over-key"
INTERIM_HEADER = "x-llmc-interim"
HANDED_OVER = 102
KEY_ENV = "LLMC_HAND_OVER_KEY"
_LEAST = 16


def fault_of_key(key: str) -> str | None:
    """Why a key of hand-overs is refused, behind its name: it is short, or no header can carry it. None: it is not."""
    if len(key) >= _LEAST and key.isascii() and key.isprintable() and " " not in key:
        return None
    use = f"use {_LEAST} or more, ASCII and without spaces, such as those of openssl rand -hex 32"
    return f"has {len(key)} characters: {use}"
