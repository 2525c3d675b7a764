"""A router that can open no connection says so: it takes no replica for lost, and continues streams later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from llmc.runtime.router.app import RouterApp
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.exhausted import ExhaustionLog, why_exhausted
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.metrics import RouterMetrics
from llmc.runtime.router.prefixes import Ring
from llmc.runtime.router.relay import Inbound, Relay
from llmc.runtime.router.replica import Replica
from llmc.runtime.router.upstream import ReplicaLost

_JSON = (b"content-type", b"application/json")
_STREAM = b'data: {"a": 1}\n\n: llmc 0 5\n\n'


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """This process can open no further file or socket."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.asynccontextmanager
async def replica_of(fleet: Fleet, name: str, answer: Callable[[], bytes]) -> AsyncIterator[Replica]:
    """A replica that answers each request over a connection of its own, as `answer` says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line), 0)
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + answer())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    replica = Replica(name, url, None, fleet._has_room, fleet.changed)
    replica.state, replica.models, replica.artifact = "ready", ("m",), "x"
    fleet.replicas[name] = replica
    fleet._ring = Ring(fleet.replicas)
    try:
        yield replica
    finally:
        server.close()


def whole(body: bytes) -> bytes:
    return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def asked(app: RouterApp, path: str, headers: Any = ()) -> tuple[int, dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told.put_nowait({"type": "http.request", "body": b'{"prompt": "a"}'})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET" if path == "/v1/models" else "POST", "path": path, "query_string": b""}
    await app({**scope, "headers": [_JSON, *headers]}, told.get, send)
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent))


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes once a minute."""
    monkeypatch.setattr("llmc.runtime.router.upstream.EXHAUSTION", ExhaustionLog())


def test_a_request_gets_a_503_and_the_replica_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llmc.router")

    async def run() -> None:
        fleet = Fleet(RouterConfig(replica_key="k"))
        async with replica_of(fleet, "r", lambda: whole(b'{"data": []}')) as replica:
            app, epoch = RouterApp(fleet.config, fleet, RouterMetrics(), None), replica.epoch
            with no_files_left():
                for _ in range(3):
                    status, body = await asked(app, "/v1/completions")
                    assert (status, body["error"]["code"]) == (503, "router_exhausted")
                    assert "the router can open no connection to a replica (Too many open files)" in str(body)
                    await replica._once(5)
                # Whether a replica knows the key is not known.
                assert (await asked(app, "/v1/models", [(b"authorization", b"Bearer other")]))[0] == 503
                assert await replica.get_within(5, b"/metrics", []) is None
                assert (replica.state, replica.epoch, replica.num_lost) == ("ready", epoch, 0)
                assert (replica.active, replica.last_error) == (0, None)
            assert (await asked(app, "/v1/completions"))[0] == 200
            await replica._once(5)
            assert replica.ready

    asyncio.run(asyncio.wait_for(run(), 120))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "llmc.router"]
    assert warning.startswith("the router can open no connection to replicas (Too many open files), and answers")


@pytest.mark.parametrize(("patience_s", "goes_on"), [(60.0, True), (0.3, False)])
def test_a_stream_goes_on_once_there_is_a_connection(patience_s: float, goes_on: bool) -> None:
    async def run() -> None:
        fleet, sent = Fleet(RouterConfig(patience_s=patience_s)), bytearray()
        answers = [b"content-type: text/event-stream\r\n\r\n" + _STREAM]
        end = b"content-type: text/event-stream\r\n\r\n: llmc 0 end\n\ndata: [DONE]\n\n"
        limit = contextlib.ExitStack()

        def answer() -> bytes:
            return answers.pop() if answers else end

        async def send(message: Any) -> None:
            if message.get("body") and not sent:  # the stream has begun, and its replica ends it
                limit.enter_context(no_files_left())
            sent.extend(message.get("body", b""))

        async with replica_of(fleet, "a", answer), replica_of(fleet, "b", answer):
            body = b'{"prompt": "a", "stream": true, "model": "m"}'
            inbound = Inbound("POST", "/v1/completions", b"/v1/completions", [_JSON], body)
            with limit:
                relay = asyncio.create_task(Relay(fleet, RouterMetrics(), inbound, b"1").run(send))
                while not sent:
                    await asyncio.sleep(0.01)
                if not goes_on:
                    await relay
                await asyncio.sleep(0.3)
            await relay
        assert sent.startswith(b'data: {"a": 1}\n\n')
        assert sent.endswith(b"data: [DONE]\n\n")
        assert (b"router_exhausted" in sent) is not goes_on
        # The one that ended its stream early was lost, and no other.
        assert sum(one.num_lost for one in fleet.replicas.values()) == 1

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_name_that_is_not_looked_up_for_want_of_a_file() -> None:
    error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert why_exhausted(error) is None
    with no_files_left():
        assert why_exhausted(error) == "Too many open files"
    assert why_exhausted(ConnectionRefusedError(111, "Connection refused")) is None


def test_a_replica_that_refuses_is_lost_all_the_same() -> None:
    async def run() -> None:
        replica = Replica("r", "http://127.0.0.1:9", None, lambda one: None, lambda: None)
        replica.state = "ready"
        with pytest.raises(ReplicaLost):
            await replica.get(b"/ready")
        await replica._once(5)
        assert replica.num_lost == 1

    asyncio.run(run())
