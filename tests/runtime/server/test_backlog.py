"""Batches go to the engine a window at a time: nothing is lost, and nobody waits behind a whole batch."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.binding.handle import LlmcError
from llmc.runtime.outputs import RequestFailure
from llmc.runtime.params import SamplingParams
from llmc.runtime.server import async_engine
from llmc.runtime.server.backlog import Backlog
from llmc.runtime.server.request_stream import RequestStream
from llmc.runtime.server.requests import EngineRequest, QueueFull, RequestRecord

from support.server_harness import Running, error_of, running_server, slow_down, until

_INVALID = 1


class FakeEngine:
    """Holds `room` requests, refuses those whose prompt begins with 0, and ends sequences when told."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.live: dict[int, tuple[RequestStream, int]] = {}
        self.submitted: list[RequestStream] = []

    def submit(self, stream: RequestStream) -> int:
        if len(self.live) >= self.room:
            raise QueueFull("full", 1)
        self.submitted.append(stream)
        if stream.request.prompt_token_ids[0] == 0:
            raise LlmcError(_INVALID, "no")
        engine_id = len(self.submitted)
        self.live[engine_id] = stream, stream.request.params.n
        return engine_id

    def end_one(self, engine_id: int) -> bool:
        """Ends a sequence; True: it was the last of its request."""
        stream, num_left = self.live.pop(engine_id)
        if num_left > 1:
            self.live[engine_id] = stream, num_left - 1
        return num_left == 1

    def num_sequences(self, streams: list[RequestStream]) -> int:
        return sum(left for stream, left in self.live.values() if stream in streams)


def make_stream(n: int, first_token: int = 5) -> RequestStream:
    return RequestStream(EngineRequest("r", (first_token,), SamplingParams(n=n, max_tokens=1)), None)


@given(st.data())
def test_every_prompt_is_submitted_once_and_in_order(data: st.DataObject) -> None:
    """Whatever ends when, whoever leaves, and however little room the engine's queue has."""
    window = data.draw(st.integers(1, 6), label="window")
    engine = FakeEngine(data.draw(st.integers(1, 8), label="room"))
    backlog = Backlog(window, engine.submit)
    batches: list[list[RequestStream]] = []
    left: set[int] = set()
    to_open = deque(
        data.draw(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6)))
    )
    while to_open or engine.live:
        if to_open and (not engine.live or data.draw(st.booleans())):
            streams = [make_stream(n, first) for n, first in to_open.popleft()]
            before = len(engine.submitted)
            try:
                backlog.open(streams)
            except (QueueFull, LlmcError):
                # Whoever opened it ends those that run already; the others are never heard of.
                taken = engine.submitted[before:]
                engine.live = {i: one for i, one in engine.live.items() if one[0] not in taken}
                del engine.submitted[before:]
            else:
                batches.append(streams)
                assert 0 < engine.num_sequences(streams) < window + max(s.request.params.n for s in streams)
        elif data.draw(st.booleans()) and backlog.waiting():
            stream = data.draw(st.sampled_from(backlog.waiting()))
            stream.end_unsubmitted()
            left.add(id(stream))
        else:
            engine_id = data.draw(st.sampled_from(sorted(engine.live)))
            backlog.sequence_ended(engine_id, last=engine.end_one(engine_id))
        for streams in batches:
            waits = [stream for stream in streams if stream in backlog.waiting()]
            most = max(stream.request.params.n for stream in streams)
            assert engine.num_sequences(streams) < window + most
            if waits and engine.num_sequences(streams) < window:
                assert len(engine.live) >= engine.room or not engine.live
    for streams in batches:
        expected = [stream for stream in streams if id(stream) not in left]
        assert [stream for stream in engine.submitted if stream in streams] == expected
        for stream in expected:
            refused = stream.request.prompt_token_ids[0] == 0
            assert (stream.generation.failure is not None) == refused
    assert backlog.num_waiting == 0


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact, request_timeout_s=None, max_num_seqs=2) as running:
        yield running


def test_a_batch_keeps_nobody_waiting(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes after a batch ends while most of the batch has not started."""
    slow_down(running.engine, monkeypatch, 0.002)
    ended: list[RequestRecord] = []
    running.engine.on_record.append(ended.append)
    batch = {"prompt": ["the cat"] * 40, "n": 2, "max_tokens": 3, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(lambda: running.complete(**batch))
        until(lambda: running.engine.num_active == 40)
        assert running.engine.stats().num_waiting > running.engine.engine.stats.num_waiting
        running.complete("a dog", max_tokens=1)
        place = [record.num_prompt_tokens for record in ended].index(len(running.server.tokenizer.encode("a dog")))
        choices = answer.result()["choices"]
    running.engine.on_record.remove(ended.append)
    assert place < 20, "it waited behind the batch"
    alone = running.complete(**{**batch, "prompt": "the cat"})["choices"]
    assert [choice["index"] for choice in choices] == list(range(80))
    assert {choice["finish_reason"] for choice in choices} == {choice["finish_reason"] for choice in alone}


def test_a_batch_that_streams_tells_all(running: Running) -> None:
    body = {"prompt": ["the cat", "a dog", "one"] * 10, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    texts = [""] * 30
    for event in running.events("/v1/completions", **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in running.complete(**body)["choices"]]


def test_prompts_that_wait_are_recorded_when_their_client_leaves(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(running.engine, monkeypatch)
    ended: list[RequestRecord] = []
    running.engine.on_record.append(ended.append)
    body = json.dumps({"prompt": ["the cat"] * 20, "max_tokens": 400, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(running.url).port)) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: running.engine.num_active == 20)
    until(lambda: len(ended) == 20)
    assert {record.finish_reasons for record in ended} == {("cancelled",)}
    assert sum(record.first_scheduled_ns == 0 for record in ended) >= 12
    until(lambda: running.engine.num_active == 0)
    assert running.server.memory.reserved == 0


def test_a_batch_that_does_not_fit_the_queue_is_refused(english_artifact: Path) -> None:
    with running_server(english_artifact, max_num_seqs=1, max_queue=10) as running:
        error = error_of(running.post("/v1/completions", prompt=["x"] * 11, max_tokens=1), 429)
        assert "the most allowed is 10: " in error["message"]
        assert error["message"].endswith(", or raise --max-queue")
        assert len(running.complete(["x"] * 10, max_tokens=1)["choices"]) == 10


def test_prompts_that_wait_end_with_the_server(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(english_artifact, drain_timeout_s=0.0, max_num_seqs=1) as running, ThreadPoolExecutor() as pool:
        slow_down(running.engine, monkeypatch)
        whole = pool.submit(running.post, "/v1/completions", prompt=["x"] * 9, max_tokens=400, ignore_eos=True)
        until(lambda: running.engine.num_active == 9)

        async def drain() -> int:
            return await running.server.begin_drain()

        assert running.on_loop(drain) == 9
        assert error_of(whole.result(), 503)["code"] == "draining"
        assert running.engine.num_active == 0


def test_draining_lets_prompts_that_wait_finish(english_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(english_artifact, drain_timeout_s=None, max_num_seqs=1) as running:
        slow_down(running.engine, monkeypatch, 0.01)
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(running.complete, ["x"] * 9, max_tokens=2, ignore_eos=True)
            until(lambda: running.engine.num_active == 9)

            async def drain() -> int:
                return await running.server.begin_drain()

            assert running.on_loop(drain) == 0
            assert whole.result()["usage"]["completion_tokens"] == 18


def test_the_deadline_of_prompts_that_wait_counts_from_their_arrival(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late() -> list[str | None]:
        request = EngineRequest("r", (5, 6), SamplingParams(max_tokens=400, ignore_eos=True), deadline_s=0.2)
        streams = running.engine.batch([request] * 12)
        return [[delta async for delta in stream][-1].finish_reason for stream in streams]

    slow_down(running.engine, monkeypatch, 0.05)
    steps = running.engine.stats().num_steps
    assert running.on_loop(late) == ["timeout"] * 12
    assert running.engine.stats().num_steps - steps < 400


def test_events_are_taken_in_turns_with_the_loops_other_work(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of the loop takes a few; meanwhile the engine waits, and the answers are the same."""
    body = {"prompt": ["the cat"] * 8, "n": 2, "max_tokens": 20, "ignore_eos": True, "seed": 3, "temperature": 1.0}
    expected = [choice["text"] for choice in running.complete(**body)["choices"]]
    monkeypatch.setattr(async_engine, "_EVENTS_AT_ONCE", 2)
    monkeypatch.setattr(async_engine, "_TAKING_S", 0.0)
    monkeypatch.setattr(running.engine.thread, "most_ahead", 2)
    poll = running.engine.engine.poll
    behind: list[bool] = []

    def watched(most: int | None = None) -> list[object]:
        events = poll(most)
        assert len(events) <= 2
        behind.append(running.engine.thread.is_behind)
        assert running.engine.thread.steps_ahead <= 2
        return list(events)

    monkeypatch.setattr(running.engine.engine, "poll", watched)
    assert [choice["text"] for choice in running.complete(**body)["choices"]] == expected
    assert any(behind), "the engine never waited"


def test_what_the_engine_refuses_later_fails_alone() -> None:
    engine = FakeEngine(room=9)
    backlog = Backlog(1, engine.submit)
    streams = [make_stream(1), make_stream(1, first_token=0), make_stream(1)]
    backlog.open(streams)
    backlog.sequence_ended(1, last=engine.end_one(1))
    assert streams[1].generation.failure == RequestFailure("invalid_argument", "no")
    assert engine.submitted == streams
