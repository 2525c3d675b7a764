"""Everything that watches a server, joined to the engine and the app: metrics, access log, spans, trace, live page."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.distribution import NAME
from llmc.runtime.replan.replanner import Replanner
from llmc.runtime.replan.retired import RetiredBuckets
from llmc.version import __version__

from .access_log import AccessLog
from .exchanges import ExchangeMiddleware, Exchanges, current_exchange
from .hand_over_metrics import HandOverCollector
from .image_metrics import ImageCollector
from .metrics import EngineProbe, ServerMetrics
from .profiler import Profiler
from .replan_metrics import ReplanCollector
from .routes import metrics as metrics_route
from .routes import page as page_route
from .routes import profile as profile_route
from .routes import replan as replan_route
from .state import LiveState, RecentLatencies
from .throughput import tell_throughput
from .timelines import Timelines
from .trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .context import ServerContext
    from .requests import EngineRequest
    from .spans import SpanExport


class SpansError(RuntimeError):
    """Spans cannot be exported; the message is one sentence."""


class PathRefused(RuntimeError):
    """A file or directory cannot be written; the message is one sentence."""


class Observers:
    """Made once per server.

    Raises PathRefused for what cannot be opened or written, TraceFileError for a file that is not a trace, and
    SpansError if OpenTelemetry is missing.
    """

    def __init__(self, server: ServerContext) -> None:
        config, engine = server.config, server.engine
        self._server = server
        self.metrics: ServerMetrics | None = None
        self._exchanges = Exchanges()
        self.access_log: AccessLog | None = None
        self.spans: SpanExport | None = None
        self.trace: TraceRecorder | None = None
        if config.enable_metrics:
            probe = EngineProbe(
                engine.stats,
                engine.graph_stats,
                engine.bucket_misses,
                engine.graphs,
                lambda: server.warm_up.counts,
                server.memory,
                engine.adapters.requests,
                engine.evictions,
                lambda: engine.thread.steps.num_failed,
            )
            self.metrics = ServerMetrics(probe, {"version": __version__, "model": server.model_name})
            engine.on_record.append(self.metrics.on_record)
            if engine.tower is not None:
                self.metrics.registry.register(ImageCollector(engine.tower.stats, lambda: server.images.num_waiting))
            if server.hand_over.sends or server.hand_over.receives:
                self.metrics.registry.register(HandOverCollector(server.hand_over.counts))
        if config.access_log:
            with _naming("--access-log-file", config.access_log_file):
                self.access_log = AccessLog(config.access_log_file)
            self._exchanges.on_done.append(self.access_log.write)
        if config.otlp_endpoint is not None:
            self.spans = _export_spans(config.otlp_endpoint)
            self._exchanges.on_done.append(self.spans.write)
        if self._exchanges.on_done:
            engine.on_submit.append(self._track)
            engine.on_record.append(self._exchanges.on_record)
        if config.record_trace is not None:
            with _naming("--record-trace", config.record_trace):
                self.trace = TraceRecorder(config.record_trace, config.record_trace_max_bytes)
            engine.on_submit.append(self.trace.on_submit)
            engine.on_record.append(self.trace.on_record)
        self.profiler: Profiler | None = None
        if config.profiler_dir is not None:
            with _naming("--profiler-dir", config.profiler_dir):
                self.profiler = Profiler(config.profiler_dir, engine.stats, engine.graph_stats, engine.graphs)
            engine.thread.profiler = self.profiler
            engine.on_record.append(self.profiler.on_record)
        self.replanner: Replanner | None = None
        if config.replan.mode != "off":
            self.replanner = _replan(server)
            if self.metrics is not None:
                self.metrics.registry.register(ReplanCollector(self.replanner.state))
        self._latencies = RecentLatencies()
        self._telling: asyncio.Task[None] | None = None

    def install(self, app: FastAPI) -> None:
        """Adds the endpoints, and a middleware that sees each request before all others, and its response after
        them."""
        if self.metrics is not None:
            app.include_router(metrics_route.router(self.metrics))
        if self.profiler is not None:
            app.include_router(profile_route.router(self.profiler))
        if self.replanner is not None:
            app.include_router(replan_route.router(self.replanner))
        if self._server.config.enable_page:
            self._server.engine.on_record.append(self._latencies.on_record)
            timelines = Timelines(self._server.engine)
            self._server.engine.on_record.append(timelines.on_record)
            live = LiveState(self._server, self._latencies, self.replanner)
            app.include_router(page_route.router(live, timelines))
        if self._exchanges.on_done or self.metrics is not None:
            app.add_middleware(ExchangeMiddleware, exchanges=self._exchanges, metrics=self.metrics)

    def start(self) -> None:
        """Starts reporting throughput, and makes SIGHUP reopen the files where the system has it. Call it from the
        event loop."""
        if interval_s := self._server.config.stats_interval_s:
            told = tell_throughput(self._server.engine.stats, interval_s, _say, time.monotonic)
            self._telling = asyncio.create_task(told)
        # Not on Windows, nor where the loop runs outside the main thread, as in tests.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError, AttributeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reopen)

    def reopen(self) -> None:
        """Reopens the files after a rotator renamed them."""
        for file in (self.access_log, self.trace):
            if file is not None:
                file.reopen()

    def close(self) -> None:
        """Writes and sends what is pending, and closes the files."""
        if self._telling is not None:
            self._telling.cancel()
        self._exchanges.close()
        for sink in (self.access_log, self.trace, self.spans):
            if sink is not None:
                sink.close()

    def _track(self, request: EngineRequest) -> None:
        exchange, tokenizer = current_exchange(), self._server.engine.tokenizer
        if exchange is None:
            return
        self._exchanges.track(exchange, request.request_id)
        if self._server.config.log_prompts and tokenizer is not None:
            exchange.prompts.append(tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))


@contextlib.contextmanager
def _naming(flag: str, path: Path | None) -> Iterator[None]:
    """Names the flag in errors of the system about its path."""
    try:
        yield
    except OSError as error:
        raise PathRefused(f"cannot write {flag} {path}: {error.strerror or error}; name another path") from error


def _say(line: str) -> None:
    print(f"llmc: {line}", file=sys.stderr, flush=True)


def _replan(server: ServerContext) -> Replanner:
    """A replanner that begins once the server is ready, and ends before its engine does."""
    engine, warm_up = server.engine, server.warm_up
    replanner = Replanner(
        engine,
        server.config.replan,
        may_act=lambda: warm_up.done,
        never=warm_up.plan.dropped,
        tell=_say,
        retired=RetiredBuckets.beside(engine.path),
    )
    server.on_ready.append(replanner.start)
    server.on_stop.append(replanner.close)
    return replanner


def _export_spans(endpoint: str) -> SpanExport:
    try:
        from .spans import SpanExport
    except ImportError as error:
        raise SpansError(f"--otlp-endpoint needs OpenTelemetry: pip install '{NAME}[otel]'") from error
    return SpanExport(endpoint)
