"""What became of requests, from the marks of the engine: spans, and the bound on what is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llmc.buckets import Bucket
from llmc.runtime.binding.statistics import RequestMark
from llmc.runtime.server.requests import RequestRecord
from llmc.runtime.server.timelines import MAX_MARKS, MAX_RECENT, Timelines, spans_of

GRAPHS: Any = [SimpleNamespace(phase="prefill", batch=1, seq=32, bucket=Bucket("prefill", 1, 32))]
S = 1_000_000_000


def mark(kind: str, begin_s: int, end_s: int, *, request_id: int = 1, output_index: int = 0) -> RequestMark:
    return RequestMark(kind, request_id, output_index, 0, 0, 8, begin_s * S, end_s * S)


def bare(spans: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(span["kind"], span["begin_s"], span["end_s"]) for span in spans]


def test_without_marks_a_request_has_its_stages() -> None:
    moments = (10 * S, 11 * S, 13 * S, 16 * S)
    assert bare(spans_of(moments, [], GRAPHS)) == [("queued", 0, 1), ("prefill", 1, 3), ("decode", 3, 6)]
    assert bare(spans_of((10 * S, 0, 0, 12 * S), [], GRAPHS)) == [("queued", 0, 2)]


def test_a_preemption_lasts_until_its_continuation_is_computed_again() -> None:
    marks = [
        mark("prefill", 11, 12),
        mark("preempted", 14, 14),
        mark("prefill", 15, 16, output_index=1),
        mark("prefill", 17, 18),
        mark("preempted", 19, 19),
    ]
    spans = spans_of((10 * S, 11 * S, 12 * S, 20 * S), marks, GRAPHS)
    assert [span for span in bare(spans) if span[0] == "preempted"] == [("preempted", 4, 7), ("preempted", 9, 10)]
    chunk = next(span for span in spans if span["kind"] == "prefill")
    assert chunk == {
        "kind": "prefill", "begin_s": 1, "end_s": 2, "start": 0, "tokens": 8, "bucket": "prefill 1 × 32",
    }  # fmt: skip


def record(engine_id: int) -> RequestRecord:
    return RequestRecord(f"r{engine_id}", S, 2 * S, 3 * S, 4 * S, 8, 0, 3, ("length",), None, (1, 2), engine_id)


def test_what_is_kept_is_bounded() -> None:
    marks = [mark("prefill", 2, 3, request_id=id_) for id_ in range(1, 4 * MAX_RECENT)]
    marks += [mark("preempted", 3, 3, request_id=4 * MAX_RECENT)] * (3 * MAX_MARKS)
    batches = [(marks, True), ([], True)]
    native = SimpleNamespace(take_request_marks=lambda: batches.pop(0))
    engine: Any = SimpleNamespace(engine=native, live_streams=lambda: [], graphs=GRAPHS)
    timelines = Timelines(engine)
    for engine_id in range(1, 4 * MAX_RECENT + 1):
        timelines.on_record(record(engine_id))
    found = timelines.snapshot()["requests"]
    assert [one["id"] for one in found] == [f"r{4 * MAX_RECENT - place}" for place in range(MAX_RECENT)]
    assert sum(span["kind"] == "preempted" for span in found[0]["spans"]) == MAX_MARKS
    assert found[1]["state"] == "finished"
    assert found[1]["finish_reasons"] == ["length"]
    timelines.on_record(record(0))  # the engine never heard of it
    assert timelines.snapshot()["requests"][0]["id"] == "r0"
