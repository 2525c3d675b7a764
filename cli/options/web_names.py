"""Names that browsers send: hosts and origins, for `llmc serve` and `llmc route`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import typer

_HOST = re.compile(r"(\*\.)?[^\s*/:@?#\[\]]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@?#]+")


def allowed_hosts(values: Sequence[str]) -> tuple[str, ...]:
    """As given. Raises typer.BadParameter for what is never compared with a Host header, such as a URL or a port."""
    for value in values:
        if value != "*" and not _HOST.fullmatch(value) and not _is_ip(value):
            raise typer.BadParameter(
                f"--allowed-hosts {value!r} is no host name: give a name or an address without scheme, port and path, "
                "*.NAME, or *"
            )
    return tuple(values)


def allowed_origins(values: Sequence[str]) -> tuple[str, ...]:
    """In lower case, as browsers send them. Raises typer.BadParameter for what no browser sends."""
    origins = tuple(value.lower() for value in values)
    for origin, value in zip(origins, values, strict=True):
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"--allowed-origins {value!r} is no origin: write https://HOST or http://HOST:PORT without a path, or *"
            )
    return origins


def _is_ip(value: str) -> bool:
    """Whether it is an IP address; one of version 6 may have brackets."""
    try:
        ipaddress.ip_address(value[1:-1] if value.startswith("[") and value.endswith("]") else value)
    except ValueError:
        return False
    return True
