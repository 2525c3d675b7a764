"""Prometheus metrics of a server: latencies of requests, and the engine's counters, read when they are scraped.

The engine keeps its own counters. They are read at collection, so no thread copies them. Only latencies and lengths of
finished requests are observed as they end. docs/observability.md lists every metric.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llmc.graphs_format import COLLECTIVES

from .without_created import WithoutCreated

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.binding.statistics import BucketMiss, EngineStats, GraphStats
    from llmc.runtime.warm_up.warm_up import WarmCounts

    from .request_memory import RequestMemory
    from .requests import RequestRecord

# Seconds. First tokens and whole requests span milliseconds to minutes; a token of a small model takes less than one.
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
LENGTH_BUCKETS = tuple(2**i for i in range(18))
MAX_MISS_SHAPES = 64
FINISH_REASONS = ("stop", "length", "cancelled", "timeout", "error")


@dataclass(frozen=True)
class EngineProbe:
    """Functions that read an engine; each may be called from any thread, even while the engine steps.

    graphs: the artifact's graphs, in the order of graph_stats. warm_counts: number of warm graphs. memory: what
    requests may hold and have reserved. adapters: requests per loaded adapter, by name. evictions: sequences preempted
    for higher priorities, by their own priority. failed_steps: steps that ended with an error.
    """

    stats: Callable[[], EngineStats]
    graph_stats: Callable[[], Sequence[GraphStats]]
    bucket_misses: Callable[[], Sequence[BucketMiss]]
    graphs: Sequence[GraphInfo]
    warm_counts: Callable[[], WarmCounts]
    memory: RequestMemory | None = None
    adapters: Callable[[], Mapping[str, int]] = dict
    evictions: Callable[[], Mapping[int, int]] = dict
    failed_steps: Callable[[], int] = int


class ServerMetrics:
    """The registry of one server. build: labels of llmc_build_info, such as version and model."""

    def __init__(self, probe: EngineProbe, build: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._requests = _RequestMetrics(self.registry)
        self._http = Counter("llmc_http_responses", "HTTP responses", ("route", "status"), registry=self.registry)
        self.registry.register(_EngineCollector(probe, build))
        ProcessCollector(registry=self.registry)

    def on_record(self, record: RequestRecord) -> None:
        """Observes a finished request; from any thread."""
        self._requests.observe(record)

    def on_response(self, route: str, status: int) -> None:
        """Counts an HTTP response. route: the path as declared, never as sent, so that clients cannot add series."""
        self._http.labels(route, str(status)).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, OpenMetrics when `accept` asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(WithoutCreated(self.registry)), content_type


class _RequestMetrics:
    """Latencies and lengths of finished requests. A stage that a request never reached is not observed, rather than as
    zero."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._ttft = histogram(
            "llmc_time_to_first_token_seconds", "From arrival to the first token of a request", LATENCY_BUCKETS
        )
        self._tpot = histogram(
            "llmc_time_per_output_token_seconds", "Mean time between the later tokens of a request", TOKEN_BUCKETS
        )
        self._gaps = _BulkHistogram(
            "llmc_inter_token_seconds", "From a token of a continuation to its next one", TOKEN_BUCKETS
        )
        registry.register(self._gaps)
        self._total = histogram(
            "llmc_request_duration_seconds", "From arrival to the last token of a request", LATENCY_BUCKETS
        )
        self._queue = histogram(
            "llmc_request_queue_seconds", "From arrival to the first step that has a request", LATENCY_BUCKETS
        )
        self._prompt = histogram("llmc_request_prompt_tokens", "Prompt tokens of a request", LENGTH_BUCKETS)
        self._output = histogram("llmc_request_output_tokens", "Tokens generated for a request", LENGTH_BUCKETS)
        self._finished = Counter(
            "llmc_outputs_finished", "Continuations by the reason they ended", ("finish_reason",), registry=registry
        )
        for reason in FINISH_REASONS:  # a series that exists from the start has a rate from its first event on
            self._finished.labels(reason)

    def observe(self, record: RequestRecord) -> None:
        self._prompt.observe(record.num_prompt_tokens)
        self._output.observe(record.num_output_tokens)
        for reason in record.finish_reasons:
            self._finished.labels(reason).inc()
        self._gaps.observe_ns(record.token_gaps_ns)
        times = Latencies.of(record)
        for metric, seconds in (
            (self._ttft, times.ttft_s),
            (self._tpot, times.tpot_s),
            (self._total, times.total_s),
            (self._queue, times.queue_s),
        ):
            if seconds is not None:
                metric.observe(seconds)


class _BulkHistogram(Collector):
    """A histogram that takes all values of a request at once; one by one, many tokens cost milliseconds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = np.array(bounds)
        self._lock = threading.Lock()
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe_ns(self, values: Sequence[int]) -> None:
        """Observes values in nanoseconds."""
        seconds = np.array(values, np.float64) / 1e9
        counts = np.bincount(np.searchsorted(self._bounds, seconds), minlength=len(self._counts))
        with self._lock:
            self._counts += counts
            self._sum += float(seconds.sum())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            cumulative, total = np.cumsum(self._counts).tolist(), self._sum
        names = [*map(floatToGoString, self._bounds.tolist()), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(names, cumulative, strict=True)), total)
        yield family


@dataclass(frozen=True)
class Latencies:
    """Seconds of one request; None for stages it never reached. tpot_s: mean time between tokens after the first."""

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float

    @staticmethod
    def of(record: RequestRecord) -> Latencies:
        def since(start_ns: int, end_ns: int) -> float | None:
            return max(0, end_ns - start_ns) / 1e9 if start_ns and end_ns else None

        # The continuations of a request advance together, so on average a step makes one token of the longest.
        later = record.num_output_tokens / max(1, len(record.finish_reasons)) - 1
        decode_s = since(record.first_token_ns, record.finished_ns)
        return Latencies(
            queue_s=since(record.arrival_ns, record.first_scheduled_ns),
            ttft_s=since(record.arrival_ns, record.first_token_ns),
            tpot_s=decode_s / later if decode_s is not None and later > 0 else None,
            total_s=since(record.arrival_ns, record.finished_ns) or 0.0,
        )


def padding_seconds(graph: GraphStats) -> float:
    """The part of a graph's wall time that its padding rows cost if every row cost the same."""
    rows = graph.tokens + graph.padded_tokens
    return graph.replay_ns / 1e9 * graph.padded_tokens / rows if rows else 0.0


class _EngineCollector(Collector):
    """The engine's own counters, read at each collection."""

    def __init__(self, probe: EngineProbe, build: dict[str, str]) -> None:
        self._probe = probe
        self._build = build

    def describe(self) -> list[Metric]:
        """Returns no names, so that registering does not collect: the engine may not be ready yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._probe.stats()
        yield from self._engine(stats)
        yield from self._memory()
        yield from self._work(stats)
        yield from self._buckets()
        yield from self._misses(stats)
        yield from self._adapters()

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        build = GaugeMetricFamily("llmc_build_info", "Always 1; the labels tell what runs", labels=tuple(self._build))
        build.add_metric(tuple(self._build.values()), 1)
        yield build
        warm = self._probe.warm_counts()
        yield from (
            GaugeMetricFamily(name, text, value)
            for name, text, value in (
                ("llmc_sequences_running", "Sequences that hold KV blocks and take part in steps", stats.num_running),
                ("llmc_sequences_waiting", "Sequences queued for their first step or preempted", stats.num_waiting),
                ("llmc_kv_blocks", "KV blocks of the pool", stats.num_blocks),
                (
                    "llmc_kv_blocks_used",
                    "KV blocks that running sequences hold",
                    stats.num_blocks - stats.num_free_blocks,
                ),
                ("llmc_kv_blocks_cached", "KV blocks that the prefix cache can find", stats.num_cached_blocks),
                ("llmc_states", "Slots for states of sequences, 0 for a model without states", stats.num_states),
                (
                    "llmc_states_used",
                    "Slots of states that running sequences hold",
                    stats.num_states - stats.num_free_states - stats.num_kept_states,
                ),
                ("llmc_states_kept", "States from which the prefix cache goes on", stats.num_kept_states),
                ("llmc_draft_kv_blocks", "KV blocks of the draft's pool, 0 without one", stats.num_draft_blocks),
                (
                    "llmc_draft_kv_blocks_used",
                    "KV blocks that texts have in the draft's pool",
                    stats.num_draft_blocks - stats.num_free_draft_blocks,
                ),
                (
                    "llmc_max_request_tokens",
                    "Tokens a request may have, prompt and output",
                    stats.max_request_tokens,
                ),
                ("llmc_threads", "Threads that replay graphs", stats.device.get("threads", 0)),
                ("llmc_threads_working", "Threads that work now", stats.device.get("working_threads", 0)),
                ("llmc_ranks", "Processes that run each step together", stats.device.get("ranks", 1)),
                (
                    "llmc_ranks_working",
                    "Ranks that work; 0 once one has failed",
                    stats.device.get("working_ranks", 1),
                ),
                ("llmc_graphs", "Graphs of the artifact", len(self._probe.graphs)),
                ("llmc_graphs_warm", "Graphs that are warm: replayed or walked through", warm.warm),
                ("llmc_graphs_replayed", "Graphs replayed with rows, at warm-up or when they joined", warm.replayed),
                ("llmc_graphs_walked", "Graphs walked through at warm-up, without a row", warm.walked),
                (
                    "llmc_graphs_launched",
                    "Graphs that run as launches of kernels: eagerly, or without room for their recordings",
                    stats.device.get("launched_graphs", 0),
                ),
            )
        )

    def _adapters(self) -> Iterator[Metric]:
        found = self._probe.adapters()
        yield GaugeMetricFamily("llmc_adapters", "LoRA adapters that are loaded", len(found))
        requests = CounterMetricFamily(
            "llmc_adapter_requests", "Requests of each LoRA adapter since it was loaded", labels=("adapter",)
        )
        for name, count in found.items():
            requests.add_metric((name,), count)
        yield requests

    def _memory(self) -> Iterator[Metric]:
        memory = self._probe.memory
        if memory is None:
            return
        for name, text, value in (
            ("llmc_request_memory_bytes", "Limit of the worst-case memory of all requests", memory.limits.total),
            (
                "llmc_request_memory_request_bytes",
                "Limit of the worst-case memory of one request",
                memory.limits.request,
            ),
            ("llmc_request_memory_reserved_bytes", "Memory reserved for waiting and running requests", memory.reserved),
            ("llmc_request_memory_peak_bytes", "Largest reserve since the start", memory.peak),
        ):
            yield GaugeMetricFamily(name, text, value)

    def _work(self, stats: EngineStats) -> Iterator[Metric]:
        cuts = stats.device.get("thread_cuts", 0)
        yield from (
            CounterMetricFamily(name, text, value)
            for name, text, value in (
                ("llmc_prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
                ("llmc_generation_tokens", "Tokens generated", stats.output_tokens),
                ("llmc_prefix_cache_query_tokens", "Prompt tokens looked up", stats.prefix_query_tokens),
                ("llmc_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
                ("llmc_preemptions", "Sequences that gave up their KV blocks to others", stats.num_preemptions),
                (
                    "llmc_failed_steps",
                    "Steps that the device failed or that ran out of memory, and requests with them",
                    self._probe.failed_steps(),
                ),
                ("llmc_promotions", "Requests that got the highest priority after a long wait", stats.num_promotions),
                (
                    "llmc_thread_cuts",
                    "Times that other programs left the engine fewer threads",
                    cuts,
                ),
                ("llmc_scheduled_tokens", "Valid tokens replayed", stats.scheduled_tokens),
                ("llmc_padding_tokens", "Padding tokens in replays", stats.padded_tokens),
                ("llmc_speculative_steps", "Decode steps that checked guesses", stats.num_speculative_steps),
                ("llmc_drafted_tokens", "Guesses of next tokens that were checked", stats.drafted_tokens),
                ("llmc_accepted_tokens", "Guesses that were right", stats.accepted_tokens),
                ("llmc_judged_tokens", "Guesses up to the first wrong one of a sequence", stats.judged_tokens),
                ("llmc_draft_seconds", "Wall time in which a draft made guesses or read texts", stats.draft_ns / 1e9),
                ("llmc_ahead_steps", "Steps prepared while the one before ran", stats.num_ahead_steps),
                (
                    "llmc_thrown_rows",
                    "Tokens that steps prepared ahead computed for ended sequences",
                    stats.num_thrown_rows,
                ),
                (
                    "llmc_mask_wait_seconds",
                    "Waits of steps for masks of guided requests that were about to come",
                    stats.mask_wait_ns / 1e9,
                ),
                ("llmc_decode_step_seconds", "Wall time of steps that only decode", stats.decode_step_ns / 1e9),
            )
        )
        steps = CounterMetricFamily("llmc_steps", "Steps by phase: prefill, decode or mixed", labels=("phase",))
        steps.add_metric(("prefill",), stats.num_prefill_steps - stats.num_mixed_steps)
        steps.add_metric(("mixed",), stats.num_mixed_steps)
        steps.add_metric(("decode",), stats.num_decode_steps)
        yield steps
        yield from _collectives(stats.device)
        parts = CounterMetricFamily("llmc_step_seconds", "Wall time of steps by what it went to", labels=("part",))
        known = {
            "schedule": stats.schedule_ns,
            "prepare": stats.prepare_ns,
            "replay": stats.replay_ns,
            "sample": stats.sample_ns,
        }
        for part, ns in (known | {"other": max(0, stats.step_ns - sum(known.values()))}).items():
            parts.add_metric((part,), ns / 1e9)
        yield parts
        evictions = CounterMetricFamily(
            "llmc_evictions", "Sequences that made way for a higher priority, by their own", labels=("priority",)
        )
        known_evictions = self._probe.evictions()
        for priority, count in known_evictions.items():
            evictions.add_metric((str(priority),), count)
        # The counts are read after the sum.
        evictions.add_metric(("other",), max(0, stats.num_evictions - sum(known_evictions.values())))
        yield evictions

    def _buckets(self) -> Iterator[Metric]:
        labels = ("phase", "batch", "seq")
        replays = CounterMetricFamily("llmc_bucket_replays", "Replays of a bucket's graph", labels=labels)
        tokens = CounterMetricFamily("llmc_bucket_tokens", "Valid tokens a bucket carried", labels=labels)
        padding = CounterMetricFamily(
            "llmc_bucket_padding_tokens", "Padding tokens in a bucket's replays", labels=labels
        )
        seconds = CounterMetricFamily("llmc_bucket_replay_seconds", "Wall time of a bucket's replays", labels=labels)
        wasted = CounterMetricFamily(
            "llmc_bucket_padding_seconds", "Share of the replay time by padding rows", labels=labels
        )
        for graph, stats in zip(self._probe.graphs, self._probe.graph_stats(), strict=False):
            key = (graph.phase, str(graph.batch), graph.bucket.length)
            replays.add_metric(key, stats.replays)
            tokens.add_metric(key, stats.tokens)
            padding.add_metric(key, stats.padded_tokens)
            seconds.add_metric(key, stats.replay_ns / 1e9)
            wasted.add_metric(key, padding_seconds(stats))
        yield from (replays, tokens, padding, seconds, wasted)

    def _misses(self, stats: EngineStats) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "llmc_bucket_misses", "Steps that no bucket of their phase fits", stats.num_bucket_misses
        )
        shapes = CounterMetricFamily(
            "llmc_bucket_misses_by_shape",
            f"Bucket misses by shape, for the first {MAX_MISS_SHAPES} shapes; blocks are those of the longest sequence",
            labels=("phase", "sequences", "tokens", "blocks"),
        )
        counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        for miss in self._probe.bucket_misses():
            shape: tuple[str, ...] = (miss.phase, str(miss.num_seqs), str(miss.num_tokens), str(miss.num_blocks))
            if shape in counts or len(counts) < MAX_MISS_SHAPES:
                counts[shape] += miss.count
        for labels, count in counts.items():
            shapes.add_metric(labels, count)
        yield shapes


def _collectives(device: Mapping[str, int]) -> Iterator[Metric]:
    """Collective operations of the ranks, by operation."""
    count = CounterMetricFamily("llmc_collectives", "Results that ranks have joined or passed on", labels=("op",))
    seconds = CounterMetricFamily(
        "llmc_collective_seconds", "Time of rank 0 in collectives, with its wait for the others", labels=("op",)
    )
    hidden = CounterMetricFamily(
        "llmc_collective_hidden_seconds", "Time in which results were on their way beside kernels", labels=("op",)
    )
    for op in COLLECTIVES:
        count.add_metric((op,), device.get(f"{op}s", 0))
        seconds.add_metric((op,), device.get(f"{op}_ns", 0) / 1e9)
        hidden.add_metric((op,), device.get(f"{op}_hidden_ns", 0) / 1e9)
    yield from (count, seconds, hidden)
