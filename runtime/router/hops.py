"""Routers that a request has passed. One that is among its own replicas would otherwise ask itself without end."""

from __future__ import annotations

from collections.abc import Iterable

from llmc.runtime.server.errors import ApiError

from .upstream import Headers

HEADER = b"x-llmc-routers"
"""Has their ids, separated by commas."""
LOOP = 508


def passed(headers: Headers) -> list[bytes]:
    """The header as it came, if it did."""
    return [value for name, value in headers if name == HEADER]


def behind(headers: Headers, router_id: str) -> tuple[bytes, bytes]:
    """The header of what a router sends on for a request with these headers."""
    return HEADER, b",".join([*passed(headers), router_id.encode()])


def check_no_loop(headers: Headers, router_id: str) -> None:
    """Raises ApiError for a request that this router has sent."""
    ids: Iterable[bytes] = (one for value in passed(headers) for one in value.split(b","))
    if router_id.encode() in ids:
        raise ApiError(
            "this request has come back to the router that sent it: take the router out of the replicas of "
            "those that it routes to",
            status=LOOP,
            code="router_loop",
        )
