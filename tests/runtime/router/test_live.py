"""What the router shows of its replicas: to whom, and which replicas it asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families as parse

from llmc.runtime.router.app import RouterApp
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.metrics import RouterMetrics
from llmc.runtime.router.replica import Replica
from llmc.runtime.server.security import ApiKeys

from support.paths import ROOT

STATE = {
    "model": "m", "ready": True, "uptime_s": 1.0, "num_requests": 0, "requests": [], "engine": {"steps": 1},
    "adapters": [], "buckets": [],
}  # fmt: skip
REQUESTS = {"complete": True, "requests": []}
ANSWERS: dict[str, Any] = {"/v1/llmc/state": STATE, "/v1/llmc/requests": REQUESTS, "/metrics": "steps 1\n"}
App = Callable[[Any, Any, Any], Any]


def server_of(answers: Mapping[str, Any]) -> App:
    async def serve(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        found = answers.get(scope["path"], "")
        body = (found if isinstance(found, str) else json.dumps(found)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return serve


@contextlib.asynccontextmanager
async def router_of(servers: Mapping[str, App], key: str | None = None) -> AsyncIterator[tuple[Fleet, Any]]:
    """A fleet of ready replicas, which nobody looks at, and a client of its router. key: --replica-api-key."""
    fleet, running = Fleet(RouterConfig(replica_key=key)), []
    for name, app in servers.items():
        options = uvicorn.Config(app, lifespan="off", log_level="error")
        server, listener = uvicorn.Server(options), socket.create_server(("127.0.0.1", 0))
        running.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fleet.replicas[name] = one = Replica(name, url, key, fleet._has_room, fleet.changed)
        one.state = "ready"
    router = RouterApp(fleet.config, fleet, RouterMetrics(), None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://router") as client:
        yield fleet, client
    for server, serving in running:
        server.should_exit = True
        await serving


def test_the_routers_own_key_shows_nothing_to_a_client_without_one() -> None:
    async def run() -> None:
        async with router_of({"a": ApiKeys(server_of(ANSWERS), ["secret"])}, key="secret") as (fleet, client):
            own, key = 'steps{replica="a"} 1', {"authorization": "Bearer secret"}
            for path in ("/v1/llmc/state", "/v1/llmc/requests"):
                refused = await client.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
                assert (await client.get(path, headers=key)).status_code == 200
            assert own not in (await client.get("/metrics")).text
            assert own in (await client.get("/metrics", headers=key)).text
            assert (await fleet.replicas["a"].get(b"/metrics"))[0] == 200  # the router's own questions have its key

    asyncio.run(asyncio.wait_for(run(), 60))


def test_models_need_the_key_that_replicas_ask_for() -> None:
    models = {"/v1/models": {"data": [{"id": "m"}]}}

    async def run() -> None:
        async with router_of({"a": ApiKeys(server_of(models), ["secret", "other"])}, key="secret") as (fleet, client):
            fleet.replicas["a"].listed = [{"id": "m"}]
            for key in ("secret", "other"):
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    assert (await client.get("/v1/models", headers=headers)).json()["data"] == [{"id": "m"}]
            for headers in ({}, {"authorization": "Bearer wrong"}):
                refused = await client.get("/v1/models", headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            fleet.replicas["a"].state = "lost"
            assert (await client.get("/v1/models", headers={"x-api-key": "secret"})).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
        async with router_of({"a": server_of(models)}) as (_, client):
            assert (await client.get("/v1/models")).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    """A client that asks whether to send it is not told to go on."""

    async def run() -> None:
        async with router_of({}) as (fleet, client):
            router = client._transport.app
            options = uvicorn.Config(router, lifespan="off", log_level="error")
            server, listener = uvicorn.Server(options), socket.create_server(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            size = fleet.config.max_body_bytes + 1
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % size)
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(run(), 60))


_ROW = re.compile(r"^\| `(llmc_router_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def test_the_page_lists_every_metric_with_type_and_labels() -> None:
    documented = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in _ROW.findall((ROOT / "docs/replicas.md").read_text(encoding="utf-8"))
    }

    async def run() -> None:
        async with router_of({"a": server_of({})}) as (_, client):
            await client.post("/v1/completions", json={})
            actual = {
                family.name + ("_total" if family.type == "counter" else ""): (
                    family.type,
                    frozenset(label for sample in family.samples for label in sample.labels),
                )
                for family in parse((await client.get("/metrics")).text)
            }
            assert documented == actual

    asyncio.run(asyncio.wait_for(run(), 60))


def test_requests_for_replicas_are_counted_and_looks_are_not() -> None:
    async def run() -> None:
        async with router_of({"a": server_of({})}) as (fleet, client):
            for path in ("/ready", "/health", "/v1/models", "/v1/llmc/state", "/v1/llmc/replicas", "/version"):
                await client.get(path)
                await client.head(path)
            await client.post("/v1/llmc/update")
            fleet.replicas["a"].state = "lost"
            assert (await client.get("/ready")).status_code == 503
            assert "llmc_router_requests_total{" not in (await client.get("/metrics")).text
            fleet.replicas["a"].state = "ready"
            for path in ("/v1/completions", "/ready"):  # replicas refuse the second one
                await client.post(path, json={})
            assert 'llmc_router_requests_total{status="200"} 2.0' in (await client.get("/metrics")).text

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_stored_response_is_found_wherever_it_is() -> None:
    """Also at a replica of another model; one that nobody has gets the replicas' refusal."""

    def replica(stored: str) -> App:
        async def serve(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
            body = b""
            while (message := await receive()).get("more_body"):
                body += message["body"]
            chained = json.loads(body + message["body"] or b"{}").get("previous_response_id")
            asked = chained or scope["path"].split("/")[3]
            status, told = 200, {"id": asked, "at": stored}
            if asked != stored:
                status = 404 if chained is None else 400
                told = {"error": {"code": "response_not_found" if chained is None else "previous_response_not_found"}}
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(told, separators=(",", ":")).encode()})

        return serve

    async def run() -> None:
        async with router_of({name: replica(name) for name in "abc"}) as (fleet, client):
            for name, one in fleet.replicas.items():
                one.models = ("n",) if name == "b" else ("m",)
            for name in "abc":
                assert (await client.get(f"/v1/responses/{name}")).json()["at"] == name
                assert (await client.delete(f"/v1/responses/{name}")).json()["at"] == name
                body = {"input": "x", "previous_response_id": name, "model": "n" if name == "b" else "m"}
                assert (await client.post("/v1/responses", json=body)).json()["at"] == name
            assert (await client.get("/v1/responses/d")).status_code == 404
            refused = await client.post("/v1/responses", json={"input": "x", "previous_response_id": "d"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_slash_behind_a_path_changes_nothing() -> None:
    async def tells_its_path(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await server_of({scope["path"]: scope["path"]})(scope, receive, send)

    async def run() -> None:
        async with router_of({"a": tells_its_path}) as (_, client):
            assert (await client.get("/v1/models/")).json() == {"object": "list", "data": []}
            assert (await client.get("/v1/llmc/replicas/")).json()["object"] == "list"
            for path in ("/v1/completions", "/", "/v1/responses/r1"):
                assert (await client.post(f"{path}/?a=b/".replace("//", "/"), json={})).text == path

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_page_waits_for_no_replica_that_is_lost_or_slow() -> None:
    async def hangs(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        asked.append(scope["path"])
        await over.wait()

    async def run() -> None:
        servers = {"lost": hangs, "new": hangs, "slow": hangs, "a": server_of(ANSWERS), "b": server_of(ANSWERS)}
        async with router_of(servers) as (fleet, client):
            fleet.replicas["lost"].state, fleet.replicas["new"].state = "lost", "starting"
            fleet.replicas["b"].draining = True
            since = time.monotonic()
            state = (await client.get("/v1/llmc/state")).json()
            assert time.monotonic() - since < fleet.config.health_timeout_s / 2
            assert (state["replicas"], state["engine"]) == (["a", "b"], {"steps": 2})
            assert asked == ["/v1/llmc/state"]
            over.set()

    asked, over = list[str](), asyncio.Event()
    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_answer_of_another_shape_counts_as_none() -> None:
    """Of an older version, which lacks a part, or of a foreign server; a field that some replicas lack is summed."""
    newer = STATE | {"engine": {"steps": 2, "guesses": 3, "device": "x"}}
    broken = [
        *({name: value for name, value in STATE.items() if name != left_out} for left_out in set(STATE) - {"model"}),
        STATE | {"requests": [{"id": "r"}]}, STATE | {"buckets": [{"phase": []}]}, STATE | {"engine": 3},
        STATE | {"latency_quantiles": {"ttft": {"count": 1, "values": []}}}, [1], "no JSON",
    ]  # fmt: skip

    async def run() -> None:
        given: dict[str, Any] = {"/v1/llmc/requests": {"requests": [{"state": "running"}], "complete": True}}
        other: dict[str, Any] = {}
        async with router_of({"b": server_of(given), "a": server_of(other)}) as (_, client):
            assert (await client.get("/v1/llmc/requests")).status_code == 503
            for given["/v1/llmc/state"] in broken:
                nobody = await client.get("/v1/llmc/state")
                assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_replica")
            other.update(ANSWERS)
            assert (await client.get("/v1/llmc/state")).json()["replicas"] == ["a"]
            given["/v1/llmc/state"] = newer
            state = (await client.get("/v1/llmc/state")).json()
            assert (state["replicas"], state["engine"]) == (["a", "b"], {"steps": 3, "guesses": 3})

    asyncio.run(asyncio.wait_for(run(), 60))
