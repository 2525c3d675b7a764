"""HTTP requests with their responses, each joined with the engine requests it started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import ServerMetrics
    from .requests import RequestRecord

_current: ContextVar[Exchange | None] = ContextVar("llmc_exchange", default=None)


@dataclass
class Exchange:
    """What is known about one HTTP request so far. Prompts stay empty unless they are to be logged.

    route: the path with its parameters unfilled; "other" if no route answered. traceparent, tracestate: the caller's
    W3C trace context, unchecked. status: None until the response begins. Times are on time.monotonic_ns().
    """

    client: str
    method: str
    path: str
    traceparent: str | None = None
    tracestate: str | None = None
    route: str = "other"
    request_id: str = ""
    model: str | None = None
    status: int | None = None
    prompts: list[str] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    started_ns: int = field(default_factory=time.monotonic_ns)
    started_unix_ns: int = field(default_factory=time.time_ns)
    ended_ns: int = 0
    num_open: int = 0  # engine requests without a record yet


def current_exchange() -> Exchange | None:
    """The exchange that the current task serves; None outside of one."""
    return _current.get()


def note_model(name: str) -> None:
    """Records the model of the request that the current task serves."""
    exchange = _current.get()
    if exchange is not None:
        exchange.model = name


class Exchanges:
    """Joins what HTTP and the engine report about a request, in any order.

    Each of on_done gets an exchange once: when its response is over and the engine has released all its requests. It is
    called in the thread that brought the last piece, and may not raise.
    """

    def __init__(self) -> None:
        self.on_done: list[Callable[[Exchange], None]] = []
        self._lock = threading.Lock()
        # Clients choose ids, so several requests may share one.
        self._tracked: dict[str, list[Exchange]] = {}

    def track(self, exchange: Exchange, engine_request_id: str) -> None:
        """Makes `exchange` wait for the record of an engine request. Call it before that record can come."""
        with self._lock:
            self._tracked.setdefault(engine_request_id, []).append(exchange)
            exchange.num_open += 1

    def on_record(self, record: RequestRecord) -> None:
        """Takes the engine's record of a request that ended; from any thread."""
        with self._lock:
            waiting = self._tracked.get(record.request_id)
            if not waiting:
                return
            exchange = waiting.pop(0)
            if not waiting:
                del self._tracked[record.request_id]
            exchange.records.append(record)
            exchange.num_open -= 1
            done = exchange.ended_ns != 0 and exchange.num_open == 0
        if done:
            self._tell(exchange)

    def end(self, exchange: Exchange) -> None:
        """Marks the response as over."""
        with self._lock:
            exchange.ended_ns = time.monotonic_ns()
            done = exchange.num_open == 0
        if done:
            self._tell(exchange)

    def close(self) -> None:
        """Reports exchanges that ended but whose engine requests never will."""
        with self._lock:
            tracked = [exchange for waiting in self._tracked.values() for exchange in waiting]
            left = {id(exchange): exchange for exchange in tracked if exchange.ended_ns}
            self._tracked.clear()
        for exchange in left.values():
            self._tell(exchange)

    def _tell(self, exchange: Exchange) -> None:
        for callback in self.on_done:
            callback(exchange)


class ExchangeMiddleware:
    """Notes each HTTP request in `exchanges`, and counts its response in the metrics (None: no metrics)."""

    def __init__(self, app: ASGIApp, exchanges: Exchanges, metrics: ServerMetrics | None = None) -> None:
        self.app = app
        self._exchanges = exchanges
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client = scope.get("client")
        exchange = Exchange(client[0] if client else "", scope["method"], scope["path"])
        for name, value in scope["headers"]:
            if name == b"traceparent":
                exchange.traceparent = value.decode("latin-1")
            elif name == b"tracestate":
                exchange.tracestate = value.decode("latin-1")

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                for name, value in message.get("headers", ()):
                    if name.lower() == b"x-request-id":
                        exchange.request_id = value.decode("latin-1")
            await send(message)

        token = _current.set(exchange)
        try:
            await self.app(scope, receive, note)
        except Exception:  # whatever it is, the server answers it with a 500
            exchange.status = exchange.status or 500
            raise
        finally:
            _current.reset(token)
            exchange.route = getattr(scope.get("route"), "path", None) or "other"
            if self._metrics is not None and exchange.status is not None:
                self._metrics.on_response(exchange.route, exchange.status)
            self._exchanges.end(exchange)
