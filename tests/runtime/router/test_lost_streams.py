"""Streams of each API whose replica is lost after any of its events, or fails: clients get the undisturbed bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.metrics import RouterMetrics
from llmc.runtime.router.relay import Inbound, Relay
from llmc.runtime.router.replica import Replica

# Events of an answer's head, then those of each token; the second token settles nothing.
_DELTA = "content_block_delta"
_MESSAGE = (
    ("message_start", "ping"), ("content_block_start", _DELTA), (), (_DELTA, _DELTA),
    ("content_block_stop", "message_delta", "message_stop"),
)  # fmt: skip
_TEXT = "response.output_text.delta"
_RESPONSE = (
    ("response.created", "response.in_progress"), ("response.output_item.added", "response.content_part.added", _TEXT),
    (), (_TEXT,), ("response.output_text.done", "response.output_item.done", "response.completed"),
)  # fmt: skip
_CHUNKS = (("",), ("",), (), ("", ""), ("",))
SCRIPTS = {
    "/v1/completions": _CHUNKS, "/v1/chat/completions": _CHUNKS, "/v1/messages": _MESSAGE, "/v1/responses": _RESPONSE,
}  # fmt: skip
EVENTS_OF_ERRORS = {
    path: b'data: {"error":{"type":"%s","code":"%s","message":"m"}}\n\n' for path in list(SCRIPTS)[:2]
} | {
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"%s","code":"%s","message":"m"}}\n\n',
    "/v1/responses": b'event: response.failed\ndata: {"type":"response.failed",'
    b'"response":{"error":{"type":"%s","code":"%s"}}}\n\n',
}
each_path = pytest.mark.parametrize("path", SCRIPTS)


def stream_of(path: str, body: dict[str, Any]) -> bytes:
    """What a replica streams, with its comments: all of it, or what is missing of it."""
    failover = body["llmc_failover"]
    sent, number = failover.get("sent"), failover.get("num_events", 0)
    num_told = len(sent[0]["token_ids"]) if sent is not None else 0
    last = len(SCRIPTS[path]) - 1
    assert sent is None or sent == [{"token_ids": list(range(1, num_told + 1)), "ended": num_told == last}]
    text = ""
    for group, kinds in enumerate(SCRIPTS[path]):
        if group <= num_told and (group > 0 or sent is not None):
            continue
        for place, kind in enumerate(kinds):
            data = {"type": kind, "id": failover["id"], "what": f"{group}.{place}", "sequence_number": number}
            text += (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"
            number += 1
        text += ": llmc head\n\n" if group == 0 else f": llmc 0 {group}{' end' if group == last else ''}\n\n"
    return (text if path in list(SCRIPTS)[2:] else f"{text}data: [DONE]\n\n").encode()


@dataclass
class Stub:
    """A replica. change: of its next stream alone; a stream that is made shorter ends with the connection. status: of
    the answer behind that."""

    change: Callable[[bytes], bytes] | None = None
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(re.findall(r"content-length: (\d+)", head)[0])
                body = json.loads(await reader.readexactly(length))
                self.asked.append(body)
                if not self._answer(writer, head.split(" ")[1], body):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        change, self.change = self.change, None
        if change is None and self.status != 200:
            error = json.dumps({"type": "error", "error": {"type": "t", "code": "c", "message": "m", "param": None}})
            writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(error)}\r\n\r\n{error}".encode())
            return True
        whole = stream_of(path, body)
        told = whole if change is None else change(whole)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(told), told) if told else b"")
        if change is None:
            writer.write(b"0\r\n\r\n")
        return change is None


@dataclass
class Bench:
    """Two replicas at one stub."""

    stub: Stub
    fleet: Fleet
    metrics: RouterMetrics = field(default_factory=RouterMetrics)

    async def ask(self, path: str) -> bytes:
        """The bytes that a client gets, with the answer's id replaced."""
        self.stub.asked.clear()
        for one in self.fleet.replicas.values():
            one.state = "ready"
        told = bytearray()

        async def send(message: Any) -> None:
            told.extend(message.get("body", b""))

        json_type = (b"content-type", b"application/json")
        inbound = Inbound("POST", path, path.encode(), [json_type], b'{"prompt": "a", "stream": true}')
        await asyncio.wait_for(Relay(self.fleet, self.metrics, inbound, b"1").run(send), 60)
        (answer_id,) = {body["llmc_failover"]["id"] for body in self.stub.asked}
        return bytes(told).replace(answer_id.encode(), b"ID")


@asynccontextmanager
async def benched() -> AsyncIterator[Bench]:
    stub = Stub()
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    fleet = Fleet(RouterConfig(patience_s=0.1))
    for name in ("a", "b"):
        one = Replica(
            name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, fleet._has_room, fleet.changed
        )
        one.artifact = "x"
        fleet.replicas[name] = one
    try:
        yield Bench(stub, fleet)
    finally:
        for one in fleet.replicas.values():
            assert one.upstream is not None
            one.upstream.abort_all()
        server.close()


def places(stream: bytes) -> Iterator[int]:
    """Behind each event and comment, and within it."""
    for found in re.finditer(rb"\n\n", stream):
        yield found.end()
        yield found.end() - 7


@each_path
def test_a_replica_is_lost_anywhere(path: str) -> None:
    async def run() -> None:
        async with benched() as bench:
            wanted = await bench.ask(path)
            assert b": llmc" not in wanted
            whole = stream_of(path, bench.stub.asked[0])
            numbers = [int(number) for number in re.findall(rb'"sequence_number": (\d+)', wanted)]
            assert numbers == list(range(len(numbers)))
            for place in places(whole):
                bench.stub.change = lambda stream, place=place: stream[:place]
                assert await bench.ask(path) == wanted, place
                assert len(bench.stub.asked) == (1 if place == len(whole) else 2)
            assert bench.metrics.broken._value.get() == 0

    asyncio.run(run())


@each_path
def test_a_replica_fails(path: str) -> None:
    """Its own errors are not told while another one is there; those of a request are, and end the stream."""
    own = {"/v1/messages": b"api_error"}.get(path, b"server_error")
    error = EVENTS_OF_ERRORS[path]

    async def run() -> None:
        async with benched() as bench:
            wanted = await bench.ask(path)
            head = wanted[: wanted.index(b'"1.0"')].rpartition(b"\n\n")[0] + b"\n\n"

            def cut(stream: bytes) -> bytes:
                return stream[: stream.index(b": llmc head\n\n") + 13]

            def fails(kind: bytes, behind: bytes) -> Callable[[bytes], bytes]:
                return lambda stream: stream[: stream.index(behind) + len(behind)] + error % (kind, kind)

            for behind in (b": llmc head\n\n", b": llmc 0 3\n\n"):
                bench.stub.change = fails(own, behind)
                assert await bench.ask(path) == wanted
            done = b"" if path in ("/v1/messages", "/v1/responses") else b"data: [DONE]\n\n"
            bench.stub.change = lambda stream: fails(b"invalid", b": llmc head\n\n")(stream) + done
            assert await bench.ask(path) == head + error % (b"invalid", b"invalid") + done

            # Nobody else may continue: the replica's own error, one that the next replica answers, and the router's.
            bench.fleet.config = RouterConfig(patience_s=0.1, retries=0)
            bench.stub.change = fails(own, b": llmc head\n\n")
            told = await asyncio.wait_for(Bench(bench.stub, bench.fleet).ask(path), 60)
            assert told == head + error % (own, own) + done
            for status, retries, lost, code in (
                (500, 1, False, "c"),
                (500, 16, False, "no_replica"),
                (400, 16, False, "c"),
                (400, 16, True, "no_replica"),
            ):
                bench.fleet.config = RouterConfig(patience_s=0.1, retries=retries)
                bench.stub.change, bench.stub.status = cut, status
                if lost:
                    bench.fleet.replicas.pop("b")
                told = await bench.ask(path)
                assert told.startswith(head)
                assert told.endswith(done)
                (event,) = told[len(head) : len(told) - len(done)].strip().splitlines()[-1:]
                data = json.loads(event.removeprefix(b"data: "))
                assert data.get("error", data)["code"] == code
                assert data.get("sequence_number", 2) == 2
                assert len(bench.stub.asked) == (1 if lost else 2)

    asyncio.run(run())


def test_a_replica_has_no_room_for_the_rest() -> None:
    """It is asked until it has; as bytes were sent, these are no retries."""
    path = "/v1/completions"

    async def run() -> None:
        async with benched() as bench:
            wanted = await bench.ask(path)
            bench.stub.change, bench.stub.status = lambda stream: stream[: len(stream) // 2], 429
            bench.stub.asked.clear()
            asking = asyncio.create_task(bench.ask(path))
            while len(bench.stub.asked) < 3:
                await asyncio.sleep(0.01)
            bench.stub.status = 200
            assert await asking == wanted
            assert (bench.metrics.failovers._value.get(), bench.metrics.retries._value.get()) == (1, 0)

    asyncio.run(run())
