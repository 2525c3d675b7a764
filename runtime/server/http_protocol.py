"""uvicorn's HTTP parser with a limit on what comes before a body: httptools itself takes heads of any length."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to a request line and headers of more than MAX_HEAD_BYTES, at the latest one read beyond that."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._num_heads = self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        before = self._in_head, self._num_heads
        super().data_received(data)
        # A read that ends one head may begin the next one, which is counted from the next read on.
        if self._in_head and before == (True, self._num_heads):
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            # The parser turns it into the error that is answered with a 400.
            raise ValueError("the head of the request is too long")
        self._in_head, self._head_bytes = False, 0
        self._num_heads += 1
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()
