"""Addresses of servers, as command lines and other servers write them."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

_OTHER_NAME = (62, 64)  # OpenSSL's codes for a certificate of another host, and of another IP address


def why_not_connected(error: OSError) -> str:
    """Why a server cannot be connected to, and, where TLS is at fault, what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            return f"its certificate has other names ({error.verify_message}): address it by one of those"
        return f"its certificate is not trusted ({error.verify_message}): set SSL_CERT_FILE to that of its issuer"
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "it does not speak TLS: write http:// in place of https://"
    return error.strerror or str(error)


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
