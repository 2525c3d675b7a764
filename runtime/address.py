"""Addresses of servers, as command lines and other servers write them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit


class UrlError(ValueError):
    """An unusable server address."""


@dataclass(frozen=True)
class Address:
    """A server's address. prefix: path in front of every request path, without a trailing slash."""

    host: str
    port: int
    tls: bool
    prefix: str

    @property
    def authority(self) -> str:
        """Host and port, as in a URL."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def origin(self) -> str:
        """The URL without the prefix."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can be meant."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parses http://host[:port][/prefix], or https; a trailing /v1 is dropped. Raises UrlError."""
        wrong = f"{url!r} is not the address of a server: write http://HOST:PORT"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise UrlError(wrong) from error
        given_more = parts.query or parts.fragment or parts.username is not None
        is_plain = parts.path.isascii() and all(sign.isprintable() and sign != " " for sign in url)
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or given_more or not is_plain:
            raise UrlError(wrong)
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))
