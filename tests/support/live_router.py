"""`llmc route` as a process, and many requests to it at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.failover import answer_of, folded

PATIENCE_S = 300.0  # only a hang takes that long
SERVE_FLAGS = "--served-model-name tiny --threads 1 --tool-call-parser hermes --reasoning-parser qwen3"
ADMIN_KEY = "key of an admin"
Asked = tuple[str, dict[str, Any]]
"""A path and a body."""


@dataclass
class LiveRouter:
    """A router that answers; `log` is what it and its replicas wrote so far."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""

    def get(self, path: str) -> Any:
        """The JSON of an answer."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return json.load(response)

    def admin(self, path: str, **body: Any) -> httpx.Response:
        """What an admin asks for."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=PATIENCE_S)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What is said of each, by name."""
        return {one["name"]: one for one in self.get("/v1/llmc/replicas")["data"]}

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what must come to pass."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < end, "".join(self.log)
            time.sleep(0.02)

    def until_all_ready(self, count: int) -> None:
        """All replicas take requests."""
        self.until(lambda: [one["state"] for one in self.replicas().values()] == ["ready"] * count)

    def kill_busiest(self) -> str | None:
        """kill -9 for the replica that has the most requests; its name, None where none has any."""
        name, one = max(self.replicas().items(), key=lambda item: int(item[1]["active_requests"]))
        if one["state"] != "ready" or not one["active_requests"]:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(one["pid"], signal.SIGKILL)
        return name

    def metric(self, name: str) -> float:
        """The value of a metric of the router itself."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as response:
            found = re.search(rf"^{name} (\S+)$", response.read().decode(), re.M)
        assert found is not None
        return float(found[1])


@contextlib.contextmanager
def routing(*arguments: str | Path, serve_flags: str = SERVE_FLAGS) -> Iterator[LiveRouter]:
    """A router with a replica that is ready; SIGTERM must end it, and all replicas, with exit code 0."""
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "route", "--port", "0", "--admin-key", ADMIN_KEY]
    if serve_flags and "--spawn" in arguments:
        command += ["--serve-flags", serve_flags]
    command += ["--health-interval", "0.2", "--health-timeout", "30", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "LLMC_API_KEY"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    router = LiveRouter(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]

    def read() -> None:
        assert router.process.stderr is not None
        router.log.extend(router.process.stderr)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def is_ready() -> bool:
        found = re.search(r"^llmc: ready: (\S+)/v1$", "".join(router.log), re.M)
        router.url = found[1] if found else ""
        return found is not None

    try:
        router.until(is_ready)
        yield router
        router.process.terminate()
        assert router.process.wait(PATIENCE_S) == 0, "".join(router.log)
    finally:
        router.process.kill()
        router.process.wait()
        reader.join(PATIENCE_S)


def ask_all(url: str, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """What the answers to requests that are sent together add up to, without what names them; each must be whole."""
    return asyncio.run(_ask_all(url, asked))


async def _ask_all(url: str, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:

        async def ask(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = unnamed(folded(response.text) if body.get("stream") else answer_of(response.text))
            return answer

        return await asyncio.gather(*(ask(path, body) for path, body in asked))


_NAMING = ("id", "item_id", "call_id", "created", "created_at")


def unnamed(value: Any) -> Any:
    """Without ids and times, at any depth."""
    if isinstance(value, dict):
        return {name: unnamed(one) for name, one in value.items() if name not in _NAMING}
    return [unnamed(one) for one in value] if isinstance(value, list) else value
