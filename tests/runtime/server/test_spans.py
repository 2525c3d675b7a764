"""Spans over OTLP: what a collector gets, whose trace they belong to, and that one that is away costs nothing."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from llmc.runtime.server import observers
from llmc.runtime.server.exchanges import Exchange
from llmc.runtime.server.observers import SpansError
from llmc.runtime.server.requests import RequestRecord
from llmc.runtime.server.spans import SpanExport

from support.server_harness import running_server, until

MS = 1_000_000
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORD = RequestRecord("r", 100 * MS, 102 * MS, 110 * MS, 190 * MS, 20, 16, 9, ("stop",))


class Collector:
    """What arrived: resources and spans."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.paths: set[str] = set()
        self.status = 200

    @property
    def spans(self) -> list[Any]:
        return [
            s for r in self.requests for part in r.resource_spans for scope in part.scope_spans for s in scope.spans
        ]


@contextmanager
def collector() -> Iterator[tuple[str, Collector]]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if found.status == 200:
                found.paths.add(self.path)
                found.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", found
    server.shutdown()
    server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {item.key: plain(item.value) for item in attributes}


def test_a_request_through_the_server(english_artifact: Path) -> None:
    with collector() as (url, got):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        with running_server(english_artifact, otlp_endpoint=url, access_log=False, enable_metrics=False) as server:
            body = {"prompt": ["The evening", "She"], "max_tokens": 4, "temperature": 0}
            assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
            refused = server.client.post("/v1/completions", json={"prompt": 1.5}, headers={"traceparent": "nonsense"})
            assert refused.status_code == 400
            server.client.get("/health")
        assert got.paths == {"/v1/traces"}
        facts = values(got.requests[0].resource_spans[0].resource.attributes)
        assert facts["service.name"] == "llmc"
        ours = [span for span in got.spans if span.trace_id.hex() == TRACE]
        (root,) = (span for span in ours if span.parent_span_id.hex() == PARENT)
        assert root.name == "POST /v1/completions"
        told = values(root.attributes)
        assert told["http.response.status_code"] == 200
        assert told["gen_ai.operation.name"] == "text_completion"
        assert told["gen_ai.usage.output_tokens"] == 8
        assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
        assert told["gen_ai.latency.time_to_first_token"] > 0
        stages = [span for span in ours if span.parent_span_id == root.span_id]
        assert sorted(span.name for span in stages) == ["decode", "decode", "prefill", "prefill", "queue", "queue"]
        for span in stages:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        (other,) = (span for span in got.spans if not span.parent_span_id)
        assert values(other.attributes)["http.response.status_code"] == 400
        assert len(got.spans) == 8, "the health check has no span"


def ended(**changes: Any) -> Exchange:
    made = Exchange("127.0.0.1", "POST", "/v1/chat/completions", started_ns=90 * MS, started_unix_ns=1000 * MS)
    made.route, made.status, made.ended_ns = made.path, 200, 200 * MS
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_stages_are_where_the_engine_was(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as (url, got):
        export = SpanExport(url)
        export.write(ended(records=[RECORD], model="tiny"))
        export.close()
    times = {span.name: (span.start_time_unix_nano // MS, span.end_time_unix_nano // MS) for span in got.spans}
    whole = times.pop("POST /v1/chat/completions")
    assert whole == (1000, 1110)
    assert times == {"queue": (1010, 1012), "prefill": (1012, 1020), "decode": (1020, 1100)}


def test_what_was_not_reached_has_no_span_and_failures_are_errors() -> None:
    never = RequestRecord("r", 100 * MS, 0, 0, 190 * MS, 20, 0, 0, ("error",), error="out of blocks")
    with collector() as (url, got):
        export = SpanExport(url)
        export.write(ended(records=[never], traceparent=f"00-{TRACE}-{PARENT}-01"))
        export.write(ended(status=None, traceparent=f"00-{TRACE}-{PARENT}-00"))
        export.close()
    assert sorted(span.name for span in got.spans) == ["POST /v1/chat/completions", "queue"], "00: not sampled"
    (root,) = (span for span in got.spans if span.name != "queue")
    assert (root.status.code, root.status.message) == (2, "out of blocks")


def test_a_collector_that_is_away_is_told_once_and_its_return_too(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as (url, got):
        export = SpanExport(url)
        got.status = 400
        for _ in range(2):
            export.write(ended())
            export.flush()
        got.status = 200
        export.write(ended())
        export.flush()
        export.close()
    told = [record.getMessage() for record in caplog.records if record.name == "llmc.server"]
    assert told == [
        f"the collector at {url}/v1/traces takes no spans: they are dropped until it does",
        f"the collector at {url}/v1/traces takes spans again",
    ]
    assert len(got.spans) == 1


def test_a_server_without_its_collector_serves_and_stops(english_artifact: Path) -> None:
    with running_server(english_artifact, otlp_endpoint="http://127.0.0.1:1") as server:
        body = {"prompt": "The", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        until(lambda: server.engine.num_active == 0)


def test_without_opentelemetry_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llmc.runtime.server.spans", None)
    with pytest.raises(SpansError, match=r"--otlp-endpoint needs OpenTelemetry: pip install 'llmc-aot\[otel\]'"):
        observers._export_spans("http://127.0.0.1:4318")
