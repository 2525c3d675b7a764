"""The load generator against a stub: bytes on the wire, events, workloads, arrivals, figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.address import Address
from llmc.runtime.loadgen.answer import Outcome, read_answer
from llmc.runtime.loadgen.arrivals import arrivals
from llmc.runtime.loadgen.http import HttpClient, HttpError, Reply
from llmc.runtime.loadgen.load import LoadConfig, ServerError, run_load, server_facts
from llmc.runtime.loadgen.measure import Spread, peak_concurrency, report
from llmc.runtime.loadgen.sse import TornStream, events
from llmc.runtime.loadgen.workload import (
    FIRST_ID,
    Ask,
    GivenPrompts,
    Lengths,
    RandomTokens,
    WorkloadError,
    request_body,
)

from support.stub_server import Stub, serving

LENGTHS = Lengths(np.full(12, 20), np.full(12, 5))
WORKLOAD = RandomTokens(LENGTHS, vocab_size=300)


def with_client(url: str, use: Callable[[HttpClient], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        client = HttpClient(Address.parse(url), **options)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def load(stub: Stub, workload: Any = WORKLOAD, timeout_s: float = 60.0, **config: Any) -> list[Outcome]:
    times = [0.0] * len(workload)
    return with_client(  # type: ignore[no-any-return]
        stub.url, lambda client: run_load(client, workload, times, LoadConfig(**config)), timeout_s=timeout_s
    )


# The wire.


@pytest.mark.parametrize("split", [0, 1, 7, 100])
@pytest.mark.parametrize("keep_alive", [True, False])
def test_answers_are_read_however_they_are_cut(split: int, keep_alive: bool) -> None:
    with serving(Stub(split=split, keep_alive=keep_alive)) as stub:
        outcomes = load(stub, concurrency=4, strict=True)
    assert [o.index for o in outcomes] == list(range(12))
    for outcome in outcomes:
        assert (outcome.failure, outcome.detail) == (None, "")
        assert outcome.text == "t0 t1 t2 t3 t4 "
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (20, 5, 2)
        assert len(outcome.token_ns) == 5
        assert outcome.finish_reason == "length"
        assert outcome.due_ns <= outcome.start_ns <= outcome.token_ns[0] <= outcome.token_ns[-1] <= outcome.end_ns
    assert stub.num_connections == (4 if keep_alive else 12)
    assert stub.peak <= 4


def test_chat_counts_tokens_and_not_the_role() -> None:
    with serving(Stub(usage=False)) as stub:
        outcomes = load(stub, endpoint="chat")
    assert all(o.ok and o.output_tokens == 5 and not o.has_usage and o.text == "t0 t1 t2 t3 t4 " for o in outcomes)
    assert report(outcomes).tokens_counted == 12
    (message,) = stub.bodies[0]["messages"]
    assert len(message["content"].split()) == 20


@pytest.mark.parametrize(
    ("fault", "cause", "sentence"),
    [
        ("status", "HTTP 429", "the queue is full"),
        ("torn", "torn stream", "in the middle of an event"),
        ("no_done", "torn stream", "without [DONE]"),
        ("bad_json", "bad event", "Expecting property name"),
        ("error_event", "stream error", "the engine stopped"),
        ("no_tokens", "no tokens", "no token"),
        ("cut", "disconnect", "in the middle"),
        ("not_http", "protocol", "not HTTP"),
    ],
)
def test_faults_are_failures_by_cause(fault: str, cause: str, sentence: str) -> None:
    with serving(Stub(fault=fault, every=3)) as stub:
        outcomes = load(stub, concurrency=1)
    failures = [o.failure for o in outcomes]
    assert failures == [cause if i % 3 == 0 else None for i in range(12)]
    assert sentence in outcomes[0].detail
    found = report(outcomes)
    assert (found.completed, found.failed, found.failures) == (8, 4, {cause: 4})
    assert found.output_tokens == 8 * 5


def test_a_hang_is_a_timeout() -> None:
    with serving(Stub(fault="hang")) as stub:
        (outcome,) = load(stub, RandomTokens(Lengths(np.array([20]), np.array([5])), vocab_size=300), timeout_s=0.2)
    assert outcome.failure == "timeout"
    assert "no whole answer within 0.2 s" in outcome.detail


@pytest.mark.parametrize(("miscount", "usage"), [(1, True), (-1, True), (0, False)])
def test_strict_lengths(miscount: int, usage: bool) -> None:
    with serving(Stub(miscount=miscount, usage=usage)) as stub:
        outcomes = load(stub, strict=True)
    assert {o.failure for o in outcomes} == {"wrong lengths"}


def test_no_server_is_a_failure_and_one_sentence() -> None:
    with serving(Stub()) as stub:
        pass
    assert {o.failure for o in load(stub)} == {"connect"}
    with pytest.raises(ServerError, match="cannot connect"):
        with_client(stub.url, lambda client: server_facts(client, None))


def test_leaving_breaks_the_connection_off() -> None:
    with serving(Stub(split=20)) as stub:
        body = request_body(WORKLOAD.ask(0), "completions", "", {}, ignore_eos=False)

        async def leave(client: HttpClient) -> Reply:
            reply = await client.request("POST", "/v1/completions", body, leave_after=2)
            assert len((await client.request("GET", "/v1/models")).body) > 0
            return reply

        reply = with_client(stub.url, leave)
    assert reply.left
    outcome = read_answer(0, 0, reply)
    assert outcome.left
    assert outcome.failure is None
    assert not outcome.ok


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    with serving(Stub()) as stub:

        async def twice(client: HttpClient) -> list[int]:
            first = await client.request("GET", "/v1/models")
            client._idle[0]._transport.close()  # type: ignore[union-attr]
            second = await client.request("GET", "/v1/models")
            return [first.status, second.status]

        assert with_client(stub.url, twice) == [200, 200]
        assert stub.num_connections == 2


def test_facts_and_key() -> None:
    with serving(Stub()) as stub:
        facts = with_client(stub.url, lambda client: server_facts(client, "stub"))
        assert (facts.model, facts.max_model_len, facts.vocab_size) == ("stub", 512, 300)
        with pytest.raises(ServerError, match=r"no model 'other'.*stub"):
            with_client(stub.url, lambda client: server_facts(client, "other"))


# Events.

_EVENTS = [b"one", b"two\nlines", b"[DONE]"]
_STREAM = b"data: one\r\n\r\n: ping\n\nevent: x\ndata: two\ndata:lines\n\ndata: [DONE]\n\n"


@given(st.lists(st.integers(0, len(_STREAM)), max_size=6))
def test_events_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(_STREAM)]
    pieces = [(i, _STREAM[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    found = list(events(pieces))
    assert [data for _, data in found] == _EVENTS
    times = [time for time, _ in found]
    assert times == sorted(times)


def test_an_event_has_the_time_of_its_last_byte() -> None:
    assert list(events([(1, b"data: a"), (2, b"\n\ndata: b"), (3, b"\n\n")])) == [(2, b"a"), (3, b"b")]


def test_a_torn_event_is_told_after_the_whole_ones() -> None:
    stream = events([(1, b"data: a\n\ndata: b\n")])
    assert next(stream) == (1, b"a")
    with pytest.raises(TornStream, match="middle"):
        next(stream)


# What is asked, and when.


def test_random_prompts_are_reproducible_and_of_exact_lengths() -> None:
    lengths = Lengths.uniform(50, 100, 40, 0.5, seed=7)
    assert (lengths.input_len.min() >= 50) & (lengths.input_len.max() <= 150) & (len(set(lengths.input_len)) > 10)
    assert (lengths.output_len.min() >= 20) & (lengths.output_len.max() <= 60)
    one, same = (RandomTokens(lengths, 1000, seed=7) for _ in range(2))
    other = RandomTokens(lengths, 1000, seed=8)
    asks = [one.ask(i) for i in range(50)]
    assert asks == [same.ask(i) for i in reversed(range(50))][::-1]
    assert asks != [other.ask(i) for i in range(50)]
    for ask, length in zip(asks, lengths.input_len, strict=True):
        assert len(ask.prompt) == ask.input_len == length
        assert all(FIRST_ID <= token < 1000 for token in ask.prompt)  # type: ignore[operator]
    fixed = Lengths.uniform(9, 100, 40, 0.0, seed=7)
    assert set(fixed.input_len) == {100}
    assert set(fixed.output_len) == {40}


def test_shared_prefixes_and_blocks_are_equal_tokens() -> None:
    prefixed = RandomTokens(LENGTHS, 300, prefix_len=8)
    first, second = prefixed.ask(0).prompt, prefixed.ask(1).prompt
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    blocks = [np.array(ids) for ids in ([5, 6, 7], [5, 9], [8, 6])]
    lengths = Lengths(np.array([20, 20, 18]), np.array([1, 1, 1]))
    a, b, c = (RandomTokens(lengths, 300, blocks=blocks, block_len=8).ask(i).prompt for i in range(3))
    assert [len(prompt) for prompt in (a, b, c)] == [20, 20, 18]
    assert a[:8] == b[:8] != c[:8]
    assert a[8:16] == c[8:16] != b[8:16]


def test_lengths_are_clipped_to_the_model() -> None:
    lengths = Lengths(np.array([10, 1000, 10, 60]), np.array([10, 10, 1000, 40]))
    clipped = lengths.clipped(100)
    assert clipped.input_len.tolist() == [10, 90, 10, 60]
    assert clipped.output_len.tolist() == [10, 10, 50, 40]
    assert clipped.num_clipped == 2
    assert lengths.clipped(None) is lengths


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_wrong_range_ratio(ratio: float) -> None:
    with pytest.raises(WorkloadError, match="range ratio"):
        Lengths.uniform(3, 4, 4, ratio, 0)


def test_bodies() -> None:
    ask = Ask([9, 8], 2, 7)
    body = json.loads(request_body(ask, "completions", "m", {"top_k": 3, "temperature": 1}, ignore_eos=True))
    assert body == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "prompt": [9, 8], "max_tokens": 7,
        "temperature": 1, "ignore_eos": True, "min_tokens": 7, "top_k": 3,
    }  # fmt: skip
    chat = Ask([{"role": "user", "content": "hi"}], None, 7)
    assert json.loads(request_body(chat, "chat", "m", {}, ignore_eos=False))["messages"] == chat.prompt
    with pytest.raises(WorkloadError, match="--endpoint chat"):
        request_body(chat, "completions", "m", {}, ignore_eos=False)


def test_given_prompts_start_again() -> None:
    workload = GivenPrompts(["a", [9, 9]], 3, 4)
    assert [workload.ask(i) for i in range(len(workload))] == [Ask("a", None, 4), Ask([9, 9], 2, 4), Ask("a", None, 4)]


@pytest.mark.parametrize(("burstiness", "low", "high"), [(1.0, 0.9, 1.1), (0.25, 1.8, 2.2), (16.0, 0.2, 0.3)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, low: float, high: float) -> None:
    times = arrivals(20_000, 50.0, burstiness, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert 0.95 < gaps.mean() * 50 < 1.05
    assert low < gaps.std() / gaps.mean() < high
    assert np.array_equal(times, arrivals(20_000, 50.0, burstiness, seed=3))


def test_an_endless_rate_sends_all_at_once() -> None:
    assert arrivals(3, math.inf).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)])
def test_wrong_rates(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="not above 0"):
        arrivals(3, rate, burstiness)


def test_requests_are_not_sent_before_they_are_due() -> None:
    with serving(Stub()) as stub:
        due = [0.0, 0.05, 0.1]
        outcomes = with_client(stub.url, lambda client: run_load(client, GivenPrompts(["x"], 3, 2), due, LoadConfig()))
    zero = outcomes[0].due_ns
    assert [round((o.due_ns - zero) / 1e9, 3) for o in outcomes] == due
    assert all(o.start_ns >= o.due_ns for o in outcomes)


# Figures.


def outcome(start_ms: float, token_ms: list[float], output_tokens: int | None = None, **more: Any) -> Outcome:
    tokens = tuple(int(t * 1e6) for t in token_ms)
    start = int(start_ms * 1e6)
    count = len(tokens) if output_tokens is None else output_tokens
    end = tokens[-1] if tokens else start
    return Outcome(0, start, start, end, tokens, 10, count, has_usage=True, **more)


def test_figures_of_a_run() -> None:
    run = [
        outcome(0, [100, 110, 120]),
        outcome(50, [250, 290], output_tokens=5),
        outcome(300, [400]),
        outcome(310, [], failure="HTTP 500", detail="no"),
        outcome(1000, [2000]),
    ]
    found = report(run, {"ttft": 150.0, "tpot": 10.0})
    assert (found.requests, found.completed, found.failed, found.failures) == (5, 4, 1, {"HTTP 500": 1})
    assert found.examples == {"HTTP 500": "no"}
    assert found.duration_s == 2.0
    assert (found.input_tokens, found.output_tokens) == (40, 10)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (2.0, 5.0, 25.0)
    assert found.peak_output_tokens_per_s == pytest.approx(9)
    assert found.peak_concurrency == 2
    assert found.goodput == pytest.approx(2 / 2.0)
    assert found.ttft_ms is not None
    assert (found.ttft_ms.min, found.ttft_ms.p50, found.ttft_ms.max) == (100, 150, 1000)
    assert found.tpot_ms is not None
    assert (found.tpot_ms.count, found.tpot_ms.mean) == (2, 10)
    assert found.itl_ms is not None
    assert (found.itl_ms.count, found.itl_ms.mean) == (3, 20)
    assert found.e2e_ms is not None
    assert found.e2e_ms.mean == pytest.approx((120 + 240 + 100 + 1000) / 4)
    assert json.loads(json.dumps(found.as_dict()))["ttft_ms"]["p50"] == 150


def test_a_run_without_answers_has_no_latencies() -> None:
    found = report([outcome(0, [], failure="connect", detail="refused")])
    assert (found.completed, found.output_tokens_per_s, found.peak_output_tokens_per_s) == (0, 0, 0)
    assert found.ttft_ms is found.tpot_ms is found.itl_ms is found.e2e_ms is None
    assert found.goodput is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_spread_is_that_of_numpy(values: list[float]) -> None:
    found = Spread.of(iter(values))
    assert found is not None
    assert (found.count, found.min, found.max) == (len(values), min(values), max(values))
    assert found.p95 == pytest.approx(np.percentile(values, 95))
    assert found.std == pytest.approx(np.std(values))


def test_a_request_that_starts_when_another_ends_is_not_beside_it() -> None:
    assert peak_concurrency([outcome(0, [10]), outcome(10, [20]), outcome(15, [16])]) == 2


def test_http_error_has_its_cause() -> None:
    error = HttpError("timeout", "late")
    assert (error.cause, str(error)) == ("timeout", "late")
