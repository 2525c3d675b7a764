"""The access log: one JSON object a line for each HTTP request, with what the engine says of it.

Prompts are logged only when asked for. A line is written when the response is over and the engine has let go of all
that the request started, whichever comes last.
"""

from __future__ import annotations

import json
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .line_file import LineFile
from .metrics import Latencies
from .page_files import PAGE_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import ServerMetrics
    from .requests import RequestRecord

# What machines poll and the page loads: logged only when it fails.
_QUIET_PATHS = PAGE_PATHS | {"/health", "/ready", "/metrics", "/v1/llmc/state"}
_MAX_FIELD = 1024
_current: ContextVar[AccessEntry | None] = ContextVar("llmc_access_entry", default=None)


@dataclass
class AccessEntry:
    """What is known of one HTTP request so far; prompts stay empty unless they are to be logged."""

    log: AccessLog | None
    client: str
    method: str
    path: str
    request_id: str = ""
    model: str | None = None
    status: int | None = None
    prompts: list[str] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    started_ns: int = field(default_factory=time.monotonic_ns)
    ended_ns: int = 0
    num_open: int = 0  # engine requests without a record yet
    time: datetime = field(default_factory=lambda: datetime.now(UTC))


def current_entry() -> AccessEntry | None:
    """The entry of the HTTP request that this task serves; None outside of one."""
    return _current.get()


def note_model(name: str) -> None:
    """Puts the model into the line of the HTTP request that this task serves."""
    entry = _current.get()
    if entry is not None:
        entry.model = name


def track(engine_request_id: str) -> None:
    """Joins an engine request to the line of the HTTP request that this task serves, before its record can come."""
    entry = _current.get()
    if entry is not None and entry.log is not None:
        entry.log.track(entry, engine_request_id)


class AccessLog:
    """Writes the lines. path None: standard output. Raises OSError when the file cannot be opened."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = LineFile(path)
        self._lock = threading.Lock()
        # Clients choose ids, so several requests may have the same one.
        self._tracked: dict[str, list[AccessEntry]] = {}

    def track(self, entry: AccessEntry, engine_request_id: str) -> None:
        """Makes the line of `entry` wait for the record of an engine request."""
        with self._lock:
            self._tracked.setdefault(engine_request_id, []).append(entry)
            entry.num_open += 1

    def on_record(self, record: RequestRecord) -> None:
        """Takes what the engine says of a request that ended; from any thread."""
        with self._lock:
            entries = self._tracked.get(record.request_id)
            if not entries:
                return
            entry = entries.pop(0)
            if not entries:
                del self._tracked[record.request_id]
            entry.records.append(record)
            entry.num_open -= 1
            done = entry.ended_ns != 0 and entry.num_open == 0
        if done:
            self._file.write(format_entry(entry))

    def end(self, entry: AccessEntry) -> None:
        """The response is over."""
        with self._lock:
            entry.ended_ns = time.monotonic_ns()
            done = entry.num_open == 0
        if done and not _is_quiet(entry):
            self._file.write(format_entry(entry))

    def reopen(self) -> None:
        """Opens the file's path again, as after SIGHUP."""
        self._file.reopen()

    def close(self) -> None:
        """Writes the lines of requests that ended and whose engine requests never will; closes the file."""
        with self._lock:
            tracked = [entry for entries in self._tracked.values() for entry in entries]
            left = {id(entry): entry for entry in tracked if entry.ended_ns}
            self._tracked.clear()
        for entry in left.values():
            self._file.write(format_entry(entry))
        self._file.close()


def _is_quiet(entry: AccessEntry) -> bool:
    status = entry.status or 500
    return entry.path in _QUIET_PATHS and (status < 400 or status == 503)  # 503: not ready yet


def format_entry(entry: AccessEntry) -> str:
    """The line: ASCII, control characters escaped, long fields cut. Times of several prompts are those of the slowest.

    status is null when the client left before the response began.
    """
    line: dict[str, Any] = {
        "time": entry.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": entry.request_id[:_MAX_FIELD],
        "client": entry.client,
        "method": entry.method[:_MAX_FIELD],
        "path": entry.path[:_MAX_FIELD],
        "status": entry.status,
        "model": entry.model[:_MAX_FIELD] if entry.model is not None else None,
    }
    records = entry.records
    if records:
        times = [Latencies.of(record) for record in records]
        line["prompt_tokens"] = sum(record.num_prompt_tokens for record in records)
        line["cached_tokens"] = sum(record.num_cached_tokens for record in records)
        line["output_tokens"] = sum(record.num_output_tokens for record in records)
        line["finish_reasons"] = [reason for record in records for reason in record.finish_reasons]
        line["queue_ms"] = _slowest_ms([one.queue_s for one in times])
        line["ttft_ms"] = _slowest_ms([one.ttft_s for one in times])
        errors = [record.error for record in records if record.error]
        if errors:
            line["error"] = errors[0][:_MAX_FIELD]
    line["total_ms"] = round((entry.ended_ns - entry.started_ns) / 1e6, 3)
    if entry.prompts:
        line["prompts"] = entry.prompts
    # json escapes every control character but DEL.
    return json.dumps(line, separators=(",", ":")).replace("\x7f", "\\u007f")


def _slowest_ms(seconds: list[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return round(max(known) * 1e3, 3) if known else None


class AccessLogMiddleware:
    """Notes each HTTP request for the log (None: no log) and counts its response in the metrics (None: no metrics)."""

    def __init__(self, app: ASGIApp, log: AccessLog | None = None, metrics: ServerMetrics | None = None) -> None:
        self.app = app
        self._log = log
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client = scope.get("client")
        entry = AccessEntry(self._log, client[0] if client else "", scope["method"], scope["path"])

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                for name, value in message.get("headers", ()):
                    if name.lower() == b"x-request-id":
                        entry.request_id = value.decode("latin-1")
            await send(message)

        token = _current.set(entry)
        try:
            await self.app(scope, receive, note)
        except Exception:  # whatever it is, the server answers it with a 500
            entry.status = entry.status or 500
            raise
        finally:
            _current.reset(token)
            if self._metrics is not None and entry.status is not None:
                self._metrics.on_response(_declared_path(scope), entry.status)
            if self._log is not None:
                self._log.end(entry)


def _declared_path(scope: Scope) -> str:
    """The path of the route that answered, with its parameters unfilled; "other" when there was none."""
    return getattr(scope.get("route"), "path", None) or "other"
