"""Connections to a host that says nothing any more, which it does not end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from llmc.runtime.router import replica as replica_module
from llmc.runtime.router import upstream as upstream_module
from llmc.runtime.router.replica import Replica
from llmc.runtime.router.upstream import ReplicaLost, Upstream

PATIENCE_S = 300.0


@pytest.mark.parametrize("then", ["refused", "another server"])
def test_requests_leave_a_host_that_says_nothing_any_more(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without power ends no connection. New ones fail at once, or reach whoever has its address now."""
    now = [1.0]
    for module in (replica_module, upstream_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def run() -> None:
        silent: list[asyncio.StreamWriter] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                silent.append(writer)
                return
            body = b"" if head.startswith(b"GET /ready") else b'{"data": []}'
            status = b"404 Not Found" if silent else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body)
            writer.close()

        host = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = host.sockets[0].getsockname()[1]
        replica = Replica("r", f"http://127.0.0.1:{port}", None, lambda one: None, lambda: None)
        await replica._once(PATIENCE_S)
        assert replica.ready
        assert replica.upstream is not None
        asked = asyncio.create_task(replica.upstream.request("POST", b"/v1/completions", [], b"{}"))
        while not silent:
            await asyncio.sleep(0)
        if then == "refused":
            host.close()
        for wait_s in (0, PATIENCE_S - 1, 1):
            assert not asked.done()  # it may be heard of again
            now[0] += wait_s
            await replica._once(PATIENCE_S)
            assert not replica.ready
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(asked, PATIENCE_S)
        for writer in silent:
            writer.close()
        host.close()
        await host.wait_closed()

    asyncio.run(run())


def test_a_stream_that_goes_on_is_kept() -> None:
    async def run() -> None:
        talking: list[asyncio.StreamWriter] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
            talking.append(writer)

        host = await asyncio.start_server(answer, "127.0.0.1", 0)
        upstream = Upstream(f"http://127.0.0.1:{host.sockets[0].getsockname()[1]}")
        answered = await upstream.request("GET", b"/", [], b"")
        upstream.abort_silent(PATIENCE_S)
        talking[0].write(b"half")
        assert await answered.body() == b"halfhalf"
        answered.close()
        talking[0].close()
        host.close()
        await host.wait_closed()

    asyncio.run(run())
