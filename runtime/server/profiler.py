"""A profile of the running server: every step of the engine and every request, as a trace for Perfetto.

The file has the Trace Event Format that chrome://tracing and https://ui.perfetto.dev read: times in microseconds. It
contains lengths and times of requests, never their text.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.replaced_file import replaced
from llmc.runtime.binding import GraphInfo
from llmc.runtime.binding.statistics import EngineStats, GraphStats

from .requests import RequestRecord

MAX_STEPS = 50_000
_PARTS = ("schedule", "prepare", "replay", "sample")
_ENGINE, _REQUESTS = 1, 2  # "processes" of the trace


class ProfilerBusy(RuntimeError):
    """Started twice, or stopped without a start; the message is one sentence."""


@dataclass(frozen=True)
class Step:
    """One step: its end, its duration by part, its graph and the load. Times in ns."""

    end_ns: int
    step_ns: int
    parts_ns: tuple[int, ...]
    kernel_ns: int
    barrier_ns: int
    graph: int | None
    tokens: int
    padded_tokens: int
    running: int
    waiting: int
    used_blocks: int


class Profiler:
    """Records steps on the engine's thread and requests as they end, between `start` and `stop`.

    It stops recording after max_steps steps. on_step is set to the function that the engine's thread calls after a
    step. It is None while nothing is recorded, so that a server without a profile pays nothing.
    """

    def __init__(
        self,
        directory: Path,
        stats: Callable[[], EngineStats],
        graph_stats: Callable[[], Sequence[GraphStats]],
        graphs: Sequence[GraphInfo],
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Raises OSError when the directory is not writable."""
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(directory))
        self._directory, self._stats, self._graph_stats, self._graphs = directory, stats, graph_stats, graphs
        self._max_steps = max_steps
        self._lock = threading.Lock()
        self._started_ns: int | None = None
        self._steps: list[Step] = []
        self._requests: list[RequestRecord] = []
        self._dropped = 0
        self._last: tuple[EngineStats, list[GraphStats]] | None = None
        self.on_step: Callable[[], None] | None = None

    def start(self) -> None:
        """Begins a profile. Raises ProfilerBusy while there is one."""
        with self._lock:
            if self._started_ns is not None:
                raise ProfilerBusy("a profile is being taken: stop it with POST /stop_profile first")
            self._steps, self._requests, self._dropped = [], [], 0
            self._last = (self._stats(), list(self._graph_stats()))
            self._started_ns = time.monotonic_ns()
            self.on_step = self._note

    def stop(self) -> dict[str, Any]:
        """Ends the profile and writes it: {"file", "seconds", "steps", "dropped_steps", "requests"}.

        Raises ProfilerBusy if none was started, and OSError when the file cannot be written; the profile is then kept.
        """
        with self._lock:
            if self._started_ns is None:
                raise ProfilerBusy("no profile is being taken: start one with POST /start_profile")
            self.on_step = None
            now_ns = time.monotonic_ns()
            path = self._free_path()
            with replaced(path) as new, new.open("w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                for index, event in enumerate(self._events()):
                    file.write((",\n" if index else "") + json.dumps(event))
                file.write("\n]}\n")
            summary = {
                "file": str(path),
                "seconds": (now_ns - self._started_ns) / 1e9,
                "steps": len(self._steps),
                "dropped_steps": self._dropped,
                "requests": len(self._requests),
            }
            self._started_ns, self._steps, self._requests, self._last = None, [], [], None
            return summary

    def on_record(self, record: RequestRecord) -> None:
        """Takes a request that ended; from any thread."""
        with self._lock:
            if self._started_ns is not None and len(self._requests) < self._max_steps:
                self._requests.append(record)

    def _note(self) -> None:
        """Records a step; called after it on the engine's thread."""
        stats, graph_stats = self._stats(), list(self._graph_stats())
        with self._lock:
            if self._last is None:
                return
            last, last_graphs = self._last
            self._last = (stats, graph_stats)
            if stats.num_steps == last.num_steps:
                return
            if len(self._steps) >= self._max_steps:
                self._dropped += 1
                return
            before = [use.replays for use in last_graphs] + [0] * (len(graph_stats) - len(last_graphs))
            ran = [i for i, use in enumerate(graph_stats) if use.replays != before[i]]
            self._steps.append(
                Step(
                    end_ns=time.monotonic_ns(),
                    step_ns=stats.step_ns - last.step_ns,
                    parts_ns=tuple(getattr(stats, f"{part}_ns") - getattr(last, f"{part}_ns") for part in _PARTS),
                    kernel_ns=stats.kernel_ns - last.kernel_ns,
                    barrier_ns=stats.barrier_ns - last.barrier_ns,
                    graph=ran[0] if ran else None,
                    tokens=stats.scheduled_tokens - last.scheduled_tokens,
                    padded_tokens=stats.padded_tokens - last.padded_tokens,
                    running=stats.num_running,
                    waiting=stats.num_waiting,
                    used_blocks=stats.num_blocks - stats.num_free_blocks,
                )
            )

    def _free_path(self) -> Path:
        base = time.strftime("llmc-profile-%Y%m%d-%H%M%S")
        names = (f"{base}.json", *(f"{base}-{n}.json" for n in range(1, 1000)))
        return next(path for name in names if not (path := self._directory / name).exists())

    def _events(self) -> Iterator[dict[str, Any]]:
        for process, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        for step in self._steps:
            yield from self._step_events(step)
        for record in self._requests:
            yield from _request_events(record)

    def _step_events(self, step: Step) -> Iterator[dict[str, Any]]:
        begin_ns = step.end_ns - step.step_ns
        common = {"ph": "X", "pid": _ENGINE, "tid": 1, "cat": "step"}
        graph = "no graph" if step.graph is None else _bucket(self._graphs[step.graph])
        load = {"tokens": step.tokens, "padding_tokens": step.padded_tokens}
        times = {"kernel_us": step.kernel_ns / 1e3, "barrier_us": step.barrier_ns / 1e3}
        yield {**common, "name": graph, "ts": begin_ns / 1e3, "dur": step.step_ns / 1e3, "args": {**load, **times}}
        for part, part_ns in zip(_PARTS, step.parts_ns, strict=True):
            yield {**common, "name": part, "ts": begin_ns / 1e3, "dur": part_ns / 1e3}
            begin_ns += part_ns
        counts = {"running": step.running, "waiting": step.waiting}
        for name, values in (("sequences", counts), ("KV blocks", {"used": step.used_blocks})):
            yield {"ph": "C", "name": name, "pid": _ENGINE, "tid": 1, "ts": step.end_ns / 1e3, "args": values}


def _bucket(graph: GraphInfo) -> str:
    return str(graph.bucket)


def _request_events(record: RequestRecord) -> Iterator[dict[str, Any]]:
    """Spans of the stages that a request reached."""
    moments = (record.arrival_ns, record.first_scheduled_ns, record.first_token_ns, record.finished_ns)
    facts = {
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "finish_reasons": list(record.finish_reasons),
    }
    common = {"pid": _REQUESTS, "tid": 1, "cat": "request", "id": record.request_id}
    spans = [("request", moments[0], moments[-1], facts)]
    for index, name in enumerate(("queue", "prefill", "decode")):
        begin_ns, end_ns = moments[index], moments[index + 1] or moments[-1]
        if begin_ns:
            spans.append((name, begin_ns, end_ns, {}))
    for name, begin_ns, end_ns, args in spans:
        yield {**common, "ph": "b", "name": name, "ts": begin_ns / 1e3, "args": args}
        yield {**common, "ph": "e", "name": name, "ts": end_ns / 1e3}
