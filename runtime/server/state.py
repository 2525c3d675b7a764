"""State of the server for the live page: what runs, how fast, and in which buckets. Never text of requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.version import __version__

from .metrics import Latencies, padding_seconds

if TYPE_CHECKING:
    from llmc.runtime.replan.replanner import Replanner
    from llmc.runtime.server.request_stream import RequestStream

    from .context import ServerContext
    from .requests import RequestRecord

_WINDOW = 1000
_WINDOW_S = 300
_MAX_REQUESTS = 100


class RecentLatencies:
    """Latencies of the requests that ended in the last five minutes, at most the newest thousand."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Latencies]] = deque(maxlen=_WINDOW)
        self._lock = threading.Lock()

    def on_record(self, record: RequestRecord) -> None:
        """Takes a request that ended; from any thread."""
        with self._lock:
            self._ended.append((time.monotonic(), Latencies.of(record)))

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Seconds by name: {"ttft": {"p50", "p95", "p99"}, …}; names without requests are left out."""
        result = {}
        for name, values in self._values().items():
            p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
            result[name] = {"p50": p50, "p95": p95, "p99": p99}
        return result

    def quantiles(self) -> dict[str, dict[str, Any]]:
        """By name: `count`, the number of requests, and `values`, their quantiles in steps of a hundredth [101]. A
        router joins those of several servers."""
        percents = np.linspace(0, 100, 101)
        return {
            name: {"count": len(values), "values": np.percentile(values, percents).round(9).tolist()}
            for name, values in self._values().items()
        }

    def _values(self) -> dict[str, list[float]]:
        since = time.monotonic() - _WINDOW_S
        with self._lock:
            recent = [latencies for ended, latencies in self._ended if ended >= since]
        every = {
            name: [value for one in recent if (value := getattr(one, f"{name}_s")) is not None]
            for name in ("queue", "ttft", "tpot", "total")
        }
        return {name: values for name, values in every.items() if values}


class LiveState:
    """Makes the object that the page reads."""

    def __init__(self, server: ServerContext, latencies: RecentLatencies, replanner: Replanner | None = None) -> None:
        self._server, self._replanner = server, replanner
        self._latencies = latencies
        self._started = time.monotonic()

    def snapshot(self, *, quantiles: bool = False) -> dict[str, Any]:
        """The current state as plain values; counters are since the start. Call it on the event loop.

        quantiles: also those of the latencies, which a router needs."""
        server, engine = self._server, self._server.engine
        stats = engine.stats()
        streams = engine.live_streams()
        return {
            "model": server.model_name,
            "version": __version__,
            "ready": server.ready,
            "chat": engine.tokenizer is not None
            and (engine.tokenizer.has_chat_template or server.config.chat_template is not None),
            "uptime_s": time.monotonic() - self._started,
            "max_model_len": engine.max_model_len,
            "speculate": str(server.config.speculation),
            "num_requests": len(streams),
            "requests": [_request(stream) for stream in streams[:_MAX_REQUESTS]],
            "latency": self._latencies.percentiles(),
            **({"latency_quantiles": self._latencies.quantiles()} if quantiles else {}),
            "engine": {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "threads": stats.device.get("threads", 0),
                "threads_working": stats.device.get("working_threads", 0),
                "steps": stats.num_steps,
                "kv_blocks": stats.num_blocks,
                "kv_blocks_used": stats.num_blocks - stats.num_free_blocks,
                "kv_blocks_cached": stats.num_cached_blocks,
                "states": stats.num_states,
                "states_used": stats.num_states - stats.num_free_states - stats.num_kept_states,
                "states_kept": stats.num_kept_states,
                "prompt_tokens": stats.prompt_tokens,
                "generation_tokens": stats.output_tokens,
                "scheduled_tokens": stats.scheduled_tokens,
                "padding_tokens": stats.padded_tokens,
                "prefix_query_tokens": stats.prefix_query_tokens,
                "prefix_hit_tokens": stats.prefix_hit_tokens,
                "preemptions": stats.num_preemptions,
                "evictions": stats.num_evictions,
                "speculative_steps": stats.num_speculative_steps,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "bucket_misses": stats.num_bucket_misses,
            },
            "adapters": [{"name": name, "requests": num} for name, num in engine.adapters.requests().items()],
            "replan": None if self._replanner is None else self._replanner.summary(),
            "buckets": [
                {
                    "phase": graph.phase,
                    "batch": graph.batch,
                    "seq": graph.seq,
                    **({"total": True} if graph.bucket.total else {}),
                    "replays": use.replays,
                    "tokens": use.tokens,
                    "padding_tokens": use.padded_tokens,
                    "replay_s": use.replay_ns / 1e9,
                    "padding_s": padding_seconds(use),
                }
                for graph, use in zip(engine.graphs, engine.graph_stats(), strict=False)
            ],
        }


def _request(stream: RequestStream) -> dict[str, Any]:
    request = stream.request
    return {
        "id": request.request_id,
        "age_s": (time.monotonic_ns() - stream.started_ns) / 1e9,
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": stream.num_cached_tokens,
        "output_tokens": stream.num_output_tokens,
        "max_tokens": request.params.max_tokens * request.params.n,
    }
