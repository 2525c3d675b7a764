"""The parts of the router by themselves: marks in streams, prefixes, merged metrics, who gets a request."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import uvicorn

from llmc.runtime.router.config import RouterConfig, SpawnPlan
from llmc.runtime.router.dialects import DIALECTS
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.live import merged_states
from llmc.runtime.router.metrics import RouterMetrics, merged
from llmc.runtime.router.prefixes import PrefixTable, Ring, block_hashes, prompt_text
from llmc.runtime.router.relay import Inbound, Relay
from llmc.runtime.router.replica import Replica
from llmc.runtime.router.spawn import Local
from llmc.runtime.router.stream_marks import StreamFailed, StreamMarks
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.hand_over_headers import URL_HEADER
from llmc.runtime.server.http_protocol import INTERIM, bounded_protocol
from llmc.runtime.server.protocol.common import MAX_OUTPUTS
from llmc.runtime.server.protocol.completions import MAX_PROMPTS
from llmc.runtime.server.protocol.failover import MAX_SENT

COMPLETIONS = DIALECTS["/v1/completions"]
STREAM = (
    b'data: {"a":"\\n: llmc 0 9"}\n\n: llmc head\n\n'
    b'data: {"b":1}\n\ndata: {"b":2}\n\n: llmc 1 17,4\n\n: llmc 0 5\n\n'
    b'data: {"c":1}\n\n: llmc 1 8 end\n\ndata: {"d":1}\n\n: llmc 0 end\n\ndata: [DONE]\n\n'
)
_JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize("seed", range(20))
def test_wherever_a_stream_is_cut_nothing_is_told_that_is_not_known(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(STREAM)), 12))
    marks, told = StreamMarks(COMPLETIONS, 2), b""
    for start, end in itertools.pairwise([0, *cuts, len(STREAM)]):
        told += marks.feed(STREAM[start:end])
        assert (b'"b":2' in told) == (b": llmc 1 17,4\n\n" in STREAM[:end])
        assert (b'"c":1' in told) == (b": llmc 1 8 end\n\n" in STREAM[:end])
    assert marks.done
    assert told == b"".join(part + b"\n\n" for part in STREAM.split(b"\n\n") if part and not part.startswith(b":"))
    assert marks.sent() == [{"token_ids": [5], "ended": True}, {"token_ids": [17, 4, 8], "ended": True}]


def test_what_was_held_back_is_forgotten_with_its_replica() -> None:
    marks = StreamMarks(COMPLETIONS, 1)
    assert marks.sent() is None
    assert marks.feed(b"data: 1\n\n: llmc head\n\ndata: 2\n\ndata: 3") == b"data: 1\n\n"
    marks.restart()
    assert marks.sent() == [{"token_ids": [], "ended": False}]
    assert marks.feed(b"data: 2\n\n: llmc 0 7\n\n") == b"data: 2\n\n"


def test_errors_of_a_replica_are_not_told_and_those_of_a_request_are() -> None:
    own = b'data: {"error":{"type":"server_error","code":"draining"}}\n\n'
    marks = StreamMarks(COMPLETIONS, 1)
    # What comes before it is told all the same, even in one piece with it.
    assert marks.feed(b"data: 1\n\n: llmc 0 5\n\ndata: 2\n\n" + own) == b"data: 1\n\n"
    assert isinstance(marks.failure, StreamFailed)
    assert marks.failure.event == own
    marks.restart()
    assert marks.sent() == [{"token_ids": [5], "ended": False}]
    blamed = b'data: {"error":{"type":"invalid_request_error"}}\n\ndata: [DONE]\n\n'
    assert StreamMarks(COMPLETIONS, 1).feed(blamed) == blamed


@pytest.mark.parametrize(
    ("path", "broken"),
    [
        ("/v1/completions", b'data: {"error": "x"}\n\n'),
        ("/v1/chat/completions", b'data: {"error": ["x"]}\n\n'),
        ("/v1/messages", b'event: error\ndata: {"error": "x"}\n\n'),
        ("/v1/responses", b'event: response.failed\ndata: {"response": "x"}\n\n'),
    ],
)
def test_errors_that_no_replica_sends_are_told_as_the_routers(path: str, broken: bytes) -> None:
    """A proxy before a replica may answer with its own."""
    dialect = DIALECTS[path]
    refused = ApiError("a replica refused the rest of the answer", status=502, code="replica_refused")
    for body in (b"<html>\n\n</html>", b'{"detail": "x"}', b'{"error": "x"}', b"[]", b"", b"[" * 100_000):
        assert dialect.refusal_event(body, 7) == dialect.error_event(refused, 7)
    marks = StreamMarks(dialect, 1)
    assert marks.feed(broken) == b""
    assert isinstance(marks.failure, ValueError)


@pytest.mark.parametrize("coding", ["identity", " Identity ", "gzip"])
def test_a_body_that_is_not_packed_is_read(coding: str) -> None:
    body = b'{"model": "other", "prompt": "a"}'
    inbound = Inbound(
        "POST", "/v1/completions", b"/v1/completions", [_JSON, (b"content-encoding", coding.encode())], body
    )
    relay = Relay(fleet_of([("a", "m", "x")]), RouterMetrics(), inbound, b"1")
    assert relay._model == ("m" if coding == "gzip" else "other")


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": ["a", "b"], "messages": []}, 2),
        ("/v1/completions", {"prompt": [[1], [2], [3]], "n": None}, 3),
        ("/v1/completions", {"prompt": [1, 2], "n": 3.0}, 3),
        ("/v1/completions", {"prompt": ["a"] * MAX_PROMPTS, "n": MAX_OUTPUTS}, MAX_SENT),
        ("/v1/chat/completions", {"messages": [], "prompt": ["a", "b"], "n": 2}, 2),
        ("/v1/messages", {"messages": [], "prompt": ["a", "b"]}, 1),
        ("/v1/responses", {"input": ["a", "b"]}, 1),
    ],
)
def test_choices_of_a_stream_are_counted_as_its_api_does(path: str, body: dict[str, Any], choices: int) -> None:
    """A field of another API has no effect. With fewer choices than the replica tells of, each would count as lost."""
    inbound = Inbound("POST", path, path.encode(), [_JSON], json.dumps({**body, "stream": True}).encode())
    marks = Relay(fleet_of([("a", "m", "x")]), RouterMetrics(), inbound, b"1")._marks
    assert marks is not None
    assert marks.feed(b": llmc head\n\n") == b""
    sent = marks.sent()
    assert sent is not None
    assert len(sent) == choices


def test_prompts_with_one_beginning_share_hashes() -> None:
    first, second = (block_hashes(b"x" * 600 + end, 256) for end in (b"a" * 300, b"b" * 300))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert len(block_hashes(b"short", 256)) == 1
    assert len(block_hashes(b"x" * 10**6, 256)) == 64
    messages = [{"role": "user", "content": "a"}]
    assert prompt_text({"messages": messages}) == prompt_text({"messages": messages, "seed": 5})
    assert prompt_text({"prompt": ["a", "b"]}) == prompt_text({"prompt": "a"})
    assert prompt_text({"prompt": [1, 2]}) != prompt_text({"prompt": [1, 3]})
    assert prompt_text({"input": messages}) == prompt_text({"messages": messages})
    assert prompt_text({"input": messages * 2}) != prompt_text({"input": messages})


def test_a_replica_that_goes_moves_no_key_of_the_others() -> None:
    names = ["a", "b", "c", "d"]
    keys = [str(number).encode() for number in range(2000)]
    whole, without = Ring(names), Ring(["a", "b", "c"])
    owners = {key: list(whole.order(key)) for key in keys}
    for key, order in owners.items():
        assert sorted(order) == names
        assert next(without.order(key)) == next(name for name in order if name != "d")
    shares = [sum(order[0] == name for order in owners.values()) for name in names]
    assert min(shares) > 200


def test_the_table_of_prefixes_is_bounded() -> None:
    table = PrefixTable(max_entries=3)
    for number in range(10):
        table.note([b"%d" % number], f"r{number}")
    assert len(table) == 3
    assert table.find([b"9", b"1"]) == "r9"
    assert table.find([b"1"]) is None


def test_states_of_replicas_are_summed() -> None:
    def state(name: str, ended: np.ndarray, **engine: int) -> dict[str, Any]:
        values = np.percentile(ended, np.linspace(0, 100, 101)).tolist()
        return {
            "model": "m", "version": "0", "ready": name == "b", "uptime_s": len(ended), "num_requests": 2,
            "requests": [{"id": name, "age_s": len(ended)}], "engine": {"threads": 1, **engine},
            "latency": {}, "latency_quantiles": {"ttft": {"count": len(ended), "values": values}}, "replan": {},
            "adapters": [{"name": "x", "requests": 1}, {"name": name, "requests": 3}],
            "buckets": [{"phase": "decode", "batch": 1, "seq": 8, "replays": 5},
                        {"phase": "decode", "batch": 1, "seq": 8, "total": True, "replays": 1}],
        }  # fmt: skip

    rng = np.random.default_rng(0)
    quick, slow = rng.exponential(1, 900), rng.exponential(20, 300)
    merged_state = merged_states({"b": state("b", quick, steps=3), "a": state("a", slow, steps=4)})
    assert merged_state["engine"] == {"threads": 2, "steps": 7}
    assert (merged_state["ready"], merged_state["uptime_s"], merged_state["num_requests"]) == (True, 300, 4)
    assert merged_state["replicas"] == ["a", "b"]
    assert [(one["id"], one["replica"]) for one in merged_state["requests"]] == [("b", "b"), ("a", "a")]
    assert [(one["name"], one["requests"]) for one in merged_state["adapters"]] == [("x", 2), ("b", 3), ("a", 3)]
    assert [(one.get("total"), one["replays"]) for one in merged_state["buckets"]] == [(None, 10), (True, 2)]
    both = np.concatenate([quick, slow])
    for percent, found in zip((50, 95, 99), merged_state["latency"]["ttft"].values(), strict=True):
        rank = 100 * float(np.mean(both <= found))
        assert rank == pytest.approx(percent, abs=1)
    assert "latency_quantiles" not in merged_state


def test_metrics_of_replicas_stand_together_by_family() -> None:
    text = b'# HELP a_total A.\n# TYPE a_total counter\na_total 1.0\n# TYPE h histogram\nh_bucket{le="1"} 2\nh_sum 3\n'
    lines = merged({"r0": text, "r1": text}).decode().splitlines()
    assert lines == [
        *("# HELP a_total A.", "# TYPE a_total counter", 'a_total{replica="r0"} 1.0', 'a_total{replica="r1"} 1.0'),
        "# TYPE h histogram",
        *('h_bucket{replica="r0",le="1"} 2', 'h_sum{replica="r0"} 3'),
        *('h_bucket{replica="r1",le="1"} 2', 'h_sum{replica="r1"} 3'),
    ]


def fleet_of(states: Sequence[tuple[str, str, str]], **options: Any) -> Fleet:
    """Replicas (name, model, artifact) that are ready, and that nobody looks at."""
    fleet = Fleet(RouterConfig(**options))
    for name, model, artifact in states:
        one = Replica(name, None, None, fleet._has_room, fleet.changed)
        one.state, one.models, one.artifact = "ready", (model,), artifact
        fleet.replicas[name] = one
    fleet._ring = Ring(fleet.replicas)
    return fleet


def test_a_prefix_goes_where_it_was_unless_that_is_busy() -> None:
    async def run() -> None:
        fleet = fleet_of([(name, "m", "a") for name in "abcd"])
        hashes = block_hashes(b"prompt" * 100, 256)
        first = await fleet.acquire("m", hashes, set())
        first.end()
        chosen = [await fleet.acquire("m", hashes, set()) for _ in range(8)]
        assert chosen[0] is first
        # 1.25 × 8 requests / 4 replicas.
        assert max(one.active for one in fleet.replicas.values()) <= 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("https://host:8443/", "https://host:8443"),
        ("https://host/a/v1", "https://host:443/a"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("host:8000", "http://host:8000"),
    ],
)
def test_the_address_that_is_told_is_the_one_that_is_asked(given: str, told: str) -> None:
    replica = Replica("a", given, None, lambda _: None, lambda: None)
    assert replica.to_json()["url"] == told


def test_why_a_replica_is_not_ready_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async def absent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()

        other = await asyncio.start_server(absent, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        replica = Replica("r", f"http://127.0.0.1:{port}", None, lambda one: None, lambda: None)
        for _ in range(2):
            await replica._once(5)
        other.close()
        await other.wait_closed()
        for _ in range(2):
            await replica._once(5)
        await Replica("local", None, None, lambda one: None, lambda: None)._once(5)

    asyncio.run(run())
    answers, gone = (record.getMessage() for record in caplog.records)
    assert answers == "replica r is not ready: GET /ready gives status 404: give the address of llmc serve"
    assert gone.startswith("replica r is not ready: 127.0.0.1:")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo well >&2; kill -9 $$", "killed by signal 9; its last line: well"),
        ("echo no room >&2; exit 1", "ended with exit code 1; its last line: no room"),
        ("exit 1", "ended with exit code 1"),
    ],
)
def test_a_last_line_is_not_told_as_the_reason(caplog: pytest.LogCaptureFixture, script: str, why: str) -> None:
    async def run() -> None:
        replica = Replica("r0", None, None, lambda one: None, lambda: None)
        local = Local(replica, SpawnPlan("a", 1, ("sh", "-c", script)), lambda line: None)
        while not caplog.records:
            await asyncio.sleep(0.01)
        # A look at its health in the meantime finds no reason of its own.
        looks = asyncio.create_task(replica.watch(0.01, 1))
        for _ in range(3):
            await asyncio.sleep(0.01)
            assert replica.last_error == why
        looks.cancel()
        await local.stop()

    asyncio.run(run())
    assert caplog.records[0].getMessage() == f"replica r0 is started again: {why}"


def test_who_waits_is_served_in_turn_and_too_many_are_refused() -> None:
    async def run() -> None:
        fleet = fleet_of([("a", "m", "x")], max_inflight=1, max_waiting=2, patience_s=60)
        replica = await fleet.acquire("m", (), set())
        order: list[int] = []

        async def wait(number: int) -> None:
            one = await fleet.acquire("m", (), set())
            order.append(number)
            one.end()

        waiting = [asyncio.create_task(wait(number)) for number in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await fleet.acquire("m", (), set())
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
        replica.end()
        await asyncio.gather(*waiting)
        assert sorted(order) == [0, 1]
        assert fleet.num_waiting == 0

    asyncio.run(run())


def test_models_and_artifacts_are_kept_apart() -> None:
    async def run() -> None:
        fleet = fleet_of([("a", "m", "x"), ("b", "m", "y"), ("c", "n", "z")], patience_s=0)
        assert (await fleet.acquire("n", (), set())).name == "c"
        fleet.replicas["b"].draining = True
        assert {(await fleet.acquire("m", (), set())).name for _ in range(3)} == {"a"}
        assert (await fleet.acquire("m", (), set(), artifact="y")).name == "b"
        with pytest.raises(ApiError) as unknown:
            await fleet.acquire("o", (), set())
        assert unknown.value.status == 404
        fleet.replicas["c"].state = "lost"
        with pytest.raises(ApiError) as lost:
            await fleet.acquire("n", (), set())
        assert lost.value.status == 503
        assert json.dumps(fleet.to_json())

    asyncio.run(run())


def test_a_prefill_replica_is_free_again_before_the_answer_is_whole() -> None:
    """A decode server says when the blocks have come; the answer, which does not stream, begins long after."""

    async def run() -> None:
        asked, handed_over, answer = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def decode_server(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
            assert dict(scope["headers"])[URL_HEADER.encode()] == b"http://127.0.0.1:9"
            await receive()
            asked.set()
            await handed_over.wait()
            scope[INTERIM]()
            await answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"{}"})
            scope[INTERIM]()  # too late: it would be taken for the next answer

        options = uvicorn.Config(decode_server, http=bounded_protocol(None), lifespan="off", log_level="error")
        server, listener = uvicorn.Server(options), socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        fleet = fleet_of([("p", "m", "x"), ("d", "m", "x")], hand_over_key="k", hand_over_chars=1)
        prefill, decode = fleet.replicas["p"], fleet.replicas["d"]
        for one, role, url in (
            (prefill, "prefill", "http://127.0.0.1:9"),
            (decode, "decode", f"http://127.0.0.1:{listener.getsockname()[1]}"),
        ):
            one.move(url)
            one.state, one.role, one.blocks = "ready", role, "b"
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        for _ in range(2):
            for event in (asked, handed_over, answer):
                event.clear()
            inbound = Inbound("POST", "/v1/completions", b"/v1/completions", [_JSON], b'{"prompt": "a b"}')
            relay = asyncio.create_task(Relay(fleet, RouterMetrics(), inbound, b"1").run(send))
            await asyncio.wait_for(asked.wait(), 60)
            assert prefill.num_prefills == 1
            handed_over.set()
            while prefill.num_prefills:
                await asyncio.sleep(0.001)
            assert not relay.done()
            answer.set()
            await asyncio.wait_for(relay, 60)
            assert prefill.num_prefills == 0
        assert [one["status"] for one in sent if "status" in one] == [200, 200]
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_slow_replica_gets_less_work_and_fails_no_stream() -> None:
    """All prompts begin alike, so that by prefix the slow one would get all of them."""

    async def run() -> None:
        hashes = block_hashes(b"prompt", RouterConfig().block_chars)
        fleet = fleet_of([("a", "m", "x"), ("b", "m", "x")])
        slow, fast = (fleet.replicas[name] for name in fleet._ring.order(hashes[0]))
        done = {slow.name: 0, fast.name: 0}

        def server_of(own: Replica) -> Callable[..., Any]:
            async def serve(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
                await receive()
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                events = [
                    b'data: {"a":1}\n\n: llmc head\n\n',
                    b'data: {"b":1}\n\n: llmc 0 5 end\n\n',
                    b"data: [DONE]\n\n",
                ]
                for event in events:
                    # Each of its events takes as long as three streams of the other one.
                    others = done[fast.name] + 3
                    while own is slow and done[fast.name] < others and fast.active:
                        await asyncio.sleep(0.001)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                done[own.name] += 1
                await send({"type": "http.response.body", "body": b""})

            return serve

        servers = []
        for one in (slow, fast):
            options = uvicorn.Config(server_of(one), lifespan="off", log_level="error")
            server, listener = uvicorn.Server(options), socket.create_server(("127.0.0.1", 0))
            servers.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
            one.move(f"http://127.0.0.1:{listener.getsockname()[1]}")
            one.state = "ready"
        metrics, texts = RouterMetrics(), list[bytes]()

        async def client() -> None:
            for _ in range(6):
                body = b'{"prompt": "prompt", "stream": true}'
                inbound = Inbound("POST", "/v1/completions", b"/v1/completions", [_JSON], body)
                told = bytearray()

                async def send(message: Any, told: bytearray = told) -> None:
                    told.extend(message.get("body", b""))

                await Relay(fleet, metrics, inbound, b"1").run(send)
                texts.append(bytes(told))

        await asyncio.gather(*(client() for _ in range(8)))
        assert texts == [b'data: {"a":1}\n\ndata: {"b":1}\n\ndata: [DONE]\n\n'] * 48
        assert 0 < slow.num_requests < fast.num_requests
        assert slow.num_requests + fast.num_requests == 48  # none was asked for twice
        assert slow.num_lost == fast.num_lost == 0
        for server, serving in servers:
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(run(), 120))
