"""Routers among the replicas of routers: a request never comes back to the one that sent it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import uvicorn

from llmc.runtime.router.app import RouterApp
from llmc.runtime.router.config import RouterConfig
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.metrics import RouterMetrics
from llmc.runtime.router.replica import Replica

MODELS = {"data": [{"id": "m", "artifact": "x"}]}
ANSWER = {"choices": [{"text": "a"}]}


async def server(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """A replica."""
    body = json.dumps(ANSWER if scope["method"] == "POST" else MODELS).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(apps: Sequence[Any]) -> AsyncIterator[list[str]]:
    """The addresses of applications."""
    running, urls = [], []
    for app in apps:
        one = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
        listener = socket.create_server(("127.0.0.1", 0))
        running.append((one, asyncio.create_task(one.serve(sockets=[listener]))))
        urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield urls
    finally:
        for one, task in running:
            one.should_exit = one.force_exit = True
            await task


def router() -> RouterApp:
    fleet = Fleet(RouterConfig(patience_s=0.5, health_interval_s=0.05))
    return RouterApp(fleet.config, fleet, RouterMetrics(), None)


def give(app: RouterApp, *urls: str) -> None:
    """Replicas that it takes for ready; nobody looks after them."""
    for url in urls:
        fleet = app._fleet
        one = Replica(url, url, None, fleet._has_room, fleet.changed, fleet.router_id)
        one.state, one.models = "ready", ("m",)
        fleet.replicas[url] = one


async def ask(client: httpx.AsyncClient, url: str) -> tuple[int, Any]:
    answer = await client.post(f"{url}/v1/completions", json={"prompt": "a"})
    return answer.status_code, answer.json()


def test_a_request_that_comes_back_is_refused() -> None:
    async def run() -> None:
        a, b, c = router(), router(), router()
        async with serving([a, b, c, server]) as (url_a, url_b, url_c, url), httpx.AsyncClient(timeout=60) as client:
            give(a, url_a)
            give(b, url_c)
            give(c, url_b)
            for one in (url_a, url_b):
                status, body = await ask(client, one)
                assert (status, body["error"]["code"]) == (508, "router_loop")
                assert "llmc_router_requests_total" in (await client.get(f"{one}/metrics")).text
                assert (await client.get(f"{one}/v1/llmc/state")).status_code == 508
            # Where there is another replica, that one answers.
            give(c, url)
            for _ in range(4):
                assert await ask(client, url_b) == (200, ANSWER)
            assert await ask(client, url_c) == (200, ANSWER)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_router_never_takes_itself_for_a_replica() -> None:
    async def run() -> None:
        a, b = router(), router()
        async with serving([a, b, server]) as (url_a, url_b, url):
            a._fleet.add("self", url_a)
            a._fleet.add("router", url_b)
            b._fleet.add("server", url)
            found = a._fleet.replicas
            while not (found["router"].ready and found["self"].last_error):
                await asyncio.sleep(0.01)
            assert found["self"].state == "starting"
            assert "it is this router" in str(found["self"].last_error)
            for one in (a, b):
                await one._fleet.close()

    asyncio.run(asyncio.wait_for(run(), 60))
