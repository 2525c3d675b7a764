"""Timelines of requests for the live page: when they waited, computed their prompt, drew tokens, were preempted.

They contain lengths and times, no text. The engine records chunks and preemptions only while somebody asks. A request
that ended leaves its record here, without the gaps between its tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.binding.statistics import RequestMark

    from .async_engine import AsyncEngine
    from .request_stream import RequestStream
    from .requests import RequestRecord

MAX_RECENT = 100
MAX_LIVE = 100
# Per request: enough for a long prompt in small chunks, or one that is preempted again and again.
MAX_MARKS = 128


class Timelines:
    """Running requests of an engine, and the last MAX_RECENT that ended. Belongs to the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._recent: deque[RequestRecord] = deque(maxlen=MAX_RECENT)
        self._marks: dict[int, list[RequestMark]] = {}

    def on_record(self, record: RequestRecord) -> None:
        """Takes a request that ended."""
        self._recent.append(dataclasses.replace(record, token_gaps_ns=()))

    def snapshot(self) -> dict[str, Any]:
        """{"complete", "requests"}: newest first, running ones before those that ended.

        complete: whether every chunk since the last call is included. Not so at the first call, nor long after the last
        one.
        """
        streams = self._engine.live_streams()[:MAX_LIVE]
        complete = self._take_marks(streams)
        now_ns = time.monotonic_ns()
        live = [self._live(stream, now_ns) for stream in reversed(streams)]
        ended = [self._ended(record, now_ns) for record in reversed(self._recent)]
        return {"complete": complete, "requests": live + ended}

    def _take_marks(self, streams: Sequence[RequestStream]) -> bool:
        marks, complete = self._engine.engine.take_request_marks()
        known = {stream.engine_id for stream in streams} | {record.engine_id for record in self._recent}
        self._marks = {engine_id: found for engine_id, found in self._marks.items() if engine_id in known}
        for mark in marks:
            if mark.request_id in known:
                found = self._marks.setdefault(mark.request_id, [])
                if len(found) < MAX_MARKS:
                    found.append(mark)
        return complete

    def _live(self, stream: RequestStream, now_ns: int) -> dict[str, Any]:
        request, marks = stream.request, self._marks.get(stream.engine_id, [])
        first_token_ns = stream.first_token_ns
        scheduled_ns = marks[0].begin_ns if marks else first_token_ns
        moments = (stream.started_ns, scheduled_ns, first_token_ns, now_ns)
        return {
            "id": request.request_id,
            "state": _state(moments, marks),
            "age_s": (now_ns - stream.started_ns) / 1e9,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": stream.num_cached_tokens,
            "output_tokens": stream.num_output_tokens,
            "max_tokens": request.params.max_tokens * request.params.n,
            "finish_reasons": [],
            "error": None,
            "spans": spans_of(moments, marks, self._engine.graphs),
        }

    def _ended(self, record: RequestRecord, now_ns: int) -> dict[str, Any]:
        marks = self._marks.get(record.engine_id, [])
        moments = (record.arrival_ns, record.first_scheduled_ns, record.first_token_ns, record.finished_ns)
        return {
            "id": record.request_id,
            "state": "finished",
            "age_s": (now_ns - record.arrival_ns) / 1e9,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "max_tokens": None,
            "finish_reasons": list(record.finish_reasons),
            "error": record.error,
            "spans": spans_of(moments, marks, self._engine.graphs),
        }


def _state(moments: tuple[int, int, int, int], marks: Sequence[RequestMark]) -> str:
    _, scheduled_ns, first_token_ns, _ = moments
    if marks and marks[-1].kind == "preempted":
        return "preempted"
    if first_token_ns:
        return "decode"
    return "prefill" if scheduled_ns else "queued"


def spans_of(
    moments: tuple[int, int, int, int], marks: Sequence[RequestMark], graphs: Sequence[GraphInfo]
) -> list[dict[str, Any]]:
    """The stages of a request, in seconds since its arrival; later ones are drawn over earlier ones.

    moments: arrival, first step, first token, end (or now), in ns, 0 for never. Without marks the prompt is one span. A
    preemption lasts until its continuation is computed again.
    """
    arrival_ns, scheduled_ns, first_token_ns, end_ns = moments
    spans: list[dict[str, Any]] = []

    def add(kind: str, begin_ns: int, finish_ns: int, **more: Any) -> None:
        begin_s = max(0, begin_ns - arrival_ns) / 1e9
        spans.append({"kind": kind, "begin_s": begin_s, "end_s": max(begin_s, (finish_ns - arrival_ns) / 1e9), **more})

    add("queued", arrival_ns, scheduled_ns or end_ns)
    chunks = [mark for mark in marks if mark.kind == "prefill"]
    if scheduled_ns and not chunks:
        add("prefill", scheduled_ns, first_token_ns or end_ns)
    if first_token_ns:
        add("decode", first_token_ns, end_ns)
    for index, mark in enumerate(marks):
        if mark.kind == "preempted":
            again = (
                later.begin_ns
                for later in marks[index + 1 :]
                if later.kind == "prefill" and later.output_index == mark.output_index
            )
            add("preempted", mark.begin_ns, next(again, end_ns))
    for mark in chunks:
        graph = graphs[mark.graph]
        bucket = f"{graph.phase} {graph.batch} × {graph.bucket.length}"
        add("prefill", mark.begin_ns, mark.end_ns, start=mark.start, tokens=mark.count, bucket=bucket)
    return spans
