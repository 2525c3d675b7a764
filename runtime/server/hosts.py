"""Host names that a server answers to.

A web page may point its own name at 127.0.0.1 and read a local server through its visitor's browser (DNS rebinding).
The browser then sends the page's name as Host. A server that listens only to this machine and asks for no key therefore
answers only to names of this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .config import ServerConfig
from .errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"


def hosts_of(config: ServerConfig) -> tuple[str, ...]:
    """Host names that a server with this configuration answers to; ANY for all."""
    if config.allowed_hosts:
        return config.allowed_hosts
    if config.api_keys or not is_loopback(config.host):
        return (ANY,)
    return (*LOOPBACK, config.host)


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """Answers 403 to a Host that is not in `hosts`; ports are ignored. "*.name" allows all names below `name`.

    Requests without Host pass; browsers always send one.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        names = [_bracketed(host.lower().rstrip(".")) for host in hosts]
        self._any = ANY in names
        self._names = frozenset(names)
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._any:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("host")
        wrong = next((host for host in given if host and not self._allows(host)), None)
        if wrong is None:
            await self._app(scope, receive, send)
            return
        message = f"the host {wrong[:100]!r} is not served here: start the server with --allowed-hosts to allow it"
        await ApiError(message, status=403, code="host_not_allowed").response()(scope, receive, send)

    def _allows(self, host: str) -> bool:
        name = _without_port(host).lower().rstrip(".")
        return name in self._names or name.endswith(self._endings)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() and (":" not in name or name.endswith("]")) else host


def _bracketed(host: str) -> str:
    """An IPv6 address as it appears in a Host header."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
