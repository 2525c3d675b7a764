"""A span for each HTTP request, exported over OTLP/HTTP, with child spans for queue, prefill and decode.

Attributes are those of OpenTelemetry's semantic conventions for HTTP servers and generative AI; latencies are named as
vLLM names them. `opentelemetry-sdk` reads the OTEL_* variables: service name, headers, sampler, sizes of batches.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llmc.version import __version__

from .access_log import QUIET_PATHS
from .metrics import Latencies

if TYPE_CHECKING:
    from .exchanges import Exchange
    from .requests import RequestRecord

log = logging.getLogger("llmc.server")
_EXPORT_TIMEOUT_S = 5.0
# At most that many prompts of a request get their own spans.
_MAX_PROMPTS = 16
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class SpanExport:
    """Makes spans of exchanges and sends them from its own thread. If the collector is unreachable, only spans are
    lost.

    endpoint: the collector's base URL, as in OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self, endpoint: str) -> None:
        url = endpoint.rstrip("/") + "/v1/traces"
        # Its complaint about each batch would fill the log; _TellOnce logs the essentials.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = _TellOnce(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S), url)
        facts = {SERVICE_NAME: "llmc", "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence, but not the SDK's "unknown_service".
        resource = Resource(facts).merge(Resource.create())
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "llmc"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("llmc", __version__)
        self._context_of = TraceContextTextMapPropagator().extract

    def write(self, exchange: Exchange) -> None:
        """Takes a finished exchange; from any thread, without blocking it."""
        if exchange.path in QUIET_PATHS:
            return
        given = {"traceparent": exchange.traceparent, "tracestate": exchange.tracestate}
        parent = self._context_of({name: value for name, value in given.items() if value is not None})
        to_unix = exchange.started_unix_ns - exchange.started_ns
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.route}",
            parent,
            SpanKind.SERVER,
            _attributes(exchange),
            start_time=exchange.started_unix_ns,
        )
        failed = any(record.error for record in exchange.records)
        if failed or exchange.status is None or exchange.status >= 500:
            why = next((record.error for record in exchange.records if record.error), None)
            span.set_status(Status(StatusCode.ERROR, why))
        below = set_span_in_context(span)
        for index, record in enumerate(exchange.records[:_MAX_PROMPTS]):
            facts = {"llmc.prompt_index": index, "llmc.prompt_tokens": record.num_prompt_tokens}
            for name, start_ns, end_ns in _stages(record):
                stage = self._tracer.start_span(name, below, attributes=facts, start_time=start_ns + to_unix)
                stage.end(end_ns + to_unix)
        span.end(exchange.ended_ns + to_unix)

    def flush(self) -> None:
        """Sends pending spans, for a few seconds at most."""
        self._processor.force_flush(int(_EXPORT_TIMEOUT_S * 1000))

    def close(self) -> None:
        """Sends pending spans, for a few seconds at most, and stops."""
        closing = threading.Thread(target=self._provider.shutdown, name="llmc-spans-close", daemon=True)
        closing.start()
        closing.join(_EXPORT_TIMEOUT_S)


def _stages(record: RequestRecord) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) on time.monotonic_ns() of the stages reached; the last one ends with the request."""
    times = [
        ("queue", record.arrival_ns),
        ("prefill", record.first_scheduled_ns),
        ("decode", record.first_token_ns),
    ]
    reached = [(name, start) for name, start in times if start]
    ends = [start for _, start in reached[1:]] + [record.finished_ns]
    for (name, start), end in zip(reached, ends, strict=True):
        yield name, start, max(start, end)


def _attributes(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "client.address": exchange.client,
        "llmc.request_id": exchange.request_id,
    }
    if exchange.status is None:
        found["error.type"] = "client_gone"
    else:
        found["http.response.status_code"] = exchange.status
        if exchange.status >= 500:
            found["error.type"] = str(exchange.status)
    if exchange.model is not None:
        found["gen_ai.provider.name"] = "llmc"
        found["gen_ai.request.model"] = exchange.model
        if (operation := _OPERATIONS.get(exchange.route)) is not None:
            found["gen_ai.operation.name"] = operation
    records = exchange.records
    if records:
        times = [Latencies.of(record) for record in records]
        found["gen_ai.usage.input_tokens"] = sum(record.num_prompt_tokens for record in records)
        found["gen_ai.usage.cache_read.input_tokens"] = sum(record.num_cached_tokens for record in records)
        found["gen_ai.usage.output_tokens"] = sum(record.num_output_tokens for record in records)
        found["gen_ai.response.finish_reasons"] = [reason for record in records for reason in record.finish_reasons]
        for name, seconds in (
            ("time_in_queue", [one.queue_s for one in times]),
            ("time_to_first_token", [one.ttft_s for one in times]),
            ("e2e", [one.total_s for one in times]),
        ):
            if known := [value for value in seconds if value is not None]:
                found[f"gen_ai.latency.{name}"] = max(known)
    return found


class _TellOnce(SpanExporter):
    """A span exporter that logs once that its collector is unreachable, and once that it is back."""

    def __init__(self, inner: SpanExporter, url: str) -> None:
        self._inner = inner
        self._url = url
        self._away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            log.warning("the collector at %s takes no spans: they are dropped until it does", self._url)
        if self._away and not away:
            log.warning("the collector at %s takes spans again", self._url)
        self._away = away
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)
