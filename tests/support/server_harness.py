"""Shared by the server's tests: a real server on a free port, in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn

from llmc.runtime.binding.events import Event
from llmc.runtime.server.app import create_app
from llmc.runtime.server.async_engine import AsyncEngine
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.context import ServerContext
from llmc.runtime.server.run import open_engine

_Value = TypeVar("_Value")
PATIENCE_S = 300.0  # only a hang takes that long


@dataclass
class Running:
    """A server that runs; `client` talks to it."""

    url: str
    client: httpx.Client
    server: ServerContext
    loop: asyncio.AbstractEventLoop
    process: uvicorn.Server

    @property
    def engine(self) -> AsyncEngine:
        return self.server.engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, content: str, **body: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions to one message, which must succeed."""
        response = self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events("".join(response.iter_text()))

    def on_loop(self, work: Callable[[], Awaitable[_Value]]) -> _Value:
        """Runs a coroutine on the server's event loop."""

        async def run() -> _Value:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)


def parse_events(text: str) -> list[dict[str, Any]]:
    """The JSON of each event but [DONE], which must be the last."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def until(condition: Callable[[], bool]) -> None:
    """Waits for what must come to pass; only a hang fails."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def engine_event(kind: str, **fields: Any) -> Event:
    """An event of the engine; fields not given are those of nothing special."""
    plain = {field.name: 0 for field in dataclasses.fields(Event)}
    return Event(**{**plain, "token_id": -1, "finish_reason": None, "top_logprobs": (), "kind": kind, **fields})


def slow_down(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.1) -> None:
    """Steps of step_s and more: what is to happen during a request has the time to, on a busy machine, too."""
    step = engine.engine.step

    def slow() -> object:
        time.sleep(step_s)
        return step()

    monkeypatch.setattr(engine.engine, "step", slow)


def make_config(artifact: Path, **options: Any) -> ServerConfig:
    """A quiet configuration; options are its fields."""
    quiet = ServerConfig(artifact=artifact, served_model_names=("tiny",), port=0, num_threads=1, access_log=False)
    return dataclasses.replace(quiet, **options)


@contextmanager
def running_server(artifact: Path, *, wait_ready: bool = True, **options: Any) -> Iterator[Running]:
    """Serves `artifact` on a free port, in a thread; options are fields of ServerConfig."""
    config = make_config(artifact, **options)
    engine = open_engine(config)
    app = create_app(config, engine)
    listener = socket.create_server((config.host, 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    process = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    loops: list[asyncio.AbstractEventLoop] = []

    def run() -> None:
        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            await process.serve(sockets=[listener])

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            until(lambda: bool(loops) and process.started)
            if wait_ready:
                until(lambda: client.get("/ready").status_code == 200)
            yield Running(url, client, app.state.server, loops[0], process)
    finally:
        process.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
        engine.close()
    assert not thread.is_alive()
