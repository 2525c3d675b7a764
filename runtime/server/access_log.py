"""The access log: one line of JSON per HTTP request, with the engine's figures.

Prompts are logged only on request.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .line_file import LineFile
from .metrics import Latencies
from .page_files import PAGE_PATHS

if TYPE_CHECKING:
    from .exchanges import Exchange

# Paths polled by machines or loaded by the page; logged only on failure.
QUIET_PATHS = PAGE_PATHS | {"/health", "/ready", "/metrics", "/v1/llmc/state", "/v1/llmc/requests"}
_MAX_FIELD = 1024


class AccessLog:
    """Writes the lines. path None: standard output. Raises OSError when the file cannot be opened."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = LineFile(path)

    def write(self, exchange: Exchange) -> None:
        """Writes a finished exchange; thread-safe."""
        if not _is_quiet(exchange):
            self._file.write(format_line(exchange))

    def reopen(self) -> None:
        """Reopens the file's path, as after SIGHUP."""
        self._file.reopen()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _is_quiet(exchange: Exchange) -> bool:
    status = exchange.status or 500
    return exchange.path in QUIET_PATHS and (status < 400 or status == 503)  # 503: not ready yet


def format_line(exchange: Exchange) -> str:
    """The line: ASCII, control characters escaped, long fields cut. With several prompts, times are those of the
    slowest.

    status is 499 if the client left before the response began.
    """
    started = datetime.fromtimestamp(exchange.started_unix_ns / 1e9, UTC)
    line: dict[str, Any] = {
        "time": started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": exchange.request_id[:_MAX_FIELD],
        "client": exchange.client,
        "method": exchange.method[:_MAX_FIELD],
        "path": exchange.path[:_MAX_FIELD],
        "status": exchange.status,
        "model": exchange.model[:_MAX_FIELD] if exchange.model is not None else None,
    }
    records = exchange.records
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
    line["total_ms"] = round((exchange.ended_ns - exchange.started_ns) / 1e6, 3)
    if exchange.prompts:
        line["prompts"] = exchange.prompts
    # json escapes every control character but DEL.
    return json.dumps(line, separators=(",", ":")).replace("\x7f", "\\u007f")


def _slowest_ms(seconds: list[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return round(max(known) * 1e3, 3) if known else None
