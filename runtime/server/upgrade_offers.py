"""Declines a client's offer to change the protocol, and reads its request as the HTTP/1.1 that it is.

Java's HTTP client, for example, offers HTTP/2 with its first request. The parser takes every offer for accepted: it
leaves the request's body unread and stops.
"""

from __future__ import annotations

from typing import Any

import httptools

# What tells where a body ends.
_FRAMING = (b"content-length", b"transfer-encoding")


class DecliningParser:
    """An httptools.HttpRequestParser that never stops for another protocol. protocol: gets the parser's callbacks."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._head: list[tuple[bytes, bytes]] = []
        self._skipping = False  # the head of the request, which the protocol has already
        self._body_left = False
        self.on_body = protocol.on_body
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parses the next bytes. Raises httptools.HttpParserError for what is not HTTP."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            if self._body_left:
                self._read_body()

    def get_http_version(self) -> str:
        """As httptools, like the methods below."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        return False

    def close(self) -> None:
        """Drops the parser, which refers to this object."""
        del self._parser

    # --- callbacks ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._skipping:
            self._head = []
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._skipping:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skipping:
            if name.lower() in _FRAMING:
                self._head.append((name, value))
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._skipping:
            self._body_left = bool(self._head) and self._parser.should_upgrade()
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._body_left:
            self._protocol.on_message_complete()

    # -----------------------------------------------------------------------------------------------------------------

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn: a request may follow one that asks to close the connection.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _read_body(self) -> None:
        """Goes on with a parser that has seen the same head without the offer."""
        self._body_left = False
        self._parser = self._new_parser()
        head = b"".join(b"%s: %s\r\n" % field for field in self._head)
        self._skipping = True
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")
        finally:
            self._skipping = False
