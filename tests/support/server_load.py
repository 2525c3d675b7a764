"""A storm against a real server: good, cut-off and malformed requests at once, and what the server held meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.runtime.address import Address
from llmc.runtime.loadgen.answer import read_answer
from llmc.runtime.loadgen.http import HttpClient, HttpError

PATIENCE_S = 300.0
NUM_SPECS = 60
MODEL_LEN = 512
VOCAB = 2048
_SAMPLE_S = 0.1

BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b'{"prompt": "x", '),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b'{"prompt": {"a": 1}}'),
    ("/v1/completions", b'{"prompt": [1, 999999]}'),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": -1}'),
    ("/v1/completions", b'{"prompt": "x", "temperature": "hot"}'),
    ("/v1/completions", b'{"prompt": "x", "model": "another"}'),
    ("/v1/completions", json.dumps({"prompt": [9] * (MODEL_LEN + 1)}).encode()),
    ("/v1/completions", b'{"prompt": "x", "n": 1000, "stream": true}'),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "stream": true}'),
    ("/v1/chat/completions", b"\xff\xfe"),
)


@dataclass
class Storm:
    """What happened. kinds: requests by kind; wrong: one sentence for each broken promise; texts: every text that a
    spec gave; rss: (seconds, bytes) of the server's resident memory."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    texts: dict[int, set[str]] = field(default_factory=dict)
    rss: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    def rss_growth(self, first: float) -> float:
        """Growth behind the first share of the storm, as a share: medians of the rest's first and its last fifth."""
        rest = [size for _, size in self.rss[int(first * len(self.rss)) :]]
        fifth = max(1, len(rest) // 5)
        return statistics.median(rest[-fifth:]) / statistics.median(rest[:fifth]) - 1


@dataclass(frozen=True)
class Server:
    """A server process; `output` is where its log goes."""

    process: subprocess.Popen[bytes]
    url: str
    output: Path

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the server is gone")


@contextmanager
def server_process(artifact: Path, output: Path, *flags: str) -> Iterator[Server]:
    """`llmc serve` on a free port, ready; ended by SIGTERM, which must give exit code 0."""
    code = "import sys; from llmc.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "serve", str(artifact), "--port", "0", "--no-access-log", *flags]
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + PATIENCE_S
        while "llmc: ready: " not in output.read_text(errors="replace"):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < end, "the server does not get ready"
            time.sleep(0.05)
        ready = next(line for line in output.read_text().splitlines() if line.startswith("llmc: ready: "))
        yield Server(process, ready.split(" at ")[1].removesuffix("/v1"), output)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()


def spec(number: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of one of the good requests; what it answers depends on its number only."""
    draw = random.Random(number)
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 100)}
    length = draw.choice((3, 20, 90, 200, 300))
    if number % 3 == 0:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "the day was long and " * (length // 8 + 1)}]
    else:
        path = "/v1/completions"
        body["prompt"] = [draw.randrange(8, VOCAB) for _ in range(length)]
    if number % 2:
        body |= {"temperature": 0.9, "seed": number, "ignore_eos": True}
    else:
        body["temperature"] = 0.0
    if number % 7 == 0:
        body["stop"] = ["the ", "\n"]
    return path, body


async def run_storm(server: Server, num_requests: int, concurrency: int, seed: int = 0) -> Storm:
    """Sends the requests, `concurrency` at once."""
    storm, client = Storm(), HttpClient(Address.parse(server.url), timeout_s=PATIENCE_S)
    draw = random.Random(seed)
    plan = iter([(draw.choices(_KINDS, _WEIGHTS)[0], draw.randrange(NUM_SPECS)) for _ in range(num_requests)])
    start = time.monotonic()

    async def sample() -> None:
        while True:
            storm.rss.append((time.monotonic() - start, server.rss_bytes()))
            await asyncio.sleep(_SAMPLE_S)

    async def worker(number: int) -> None:
        own = random.Random(seed * 1000 + number)
        for kind, index in plan:
            storm.kinds[kind] += 1
            try:
                await _ONE[kind](storm, client, index, own)
            except HttpError as error:
                storm.wrong.append(f"{kind} {index}: {error.cause}: {error}")

    sampler = asyncio.create_task(sample())
    try:
        async with asyncio.TaskGroup() as workers:
            for number in range(concurrency):
                workers.create_task(worker(number))
    finally:
        sampler.cancel()
        await client.close()
    storm.seconds = time.monotonic() - start
    return storm


async def idle_state(server: Server) -> dict[str, Any]:
    """/debug/engine once the engine runs nothing."""
    client, end = HttpClient(Address.parse(server.url), timeout_s=PATIENCE_S), time.monotonic() + PATIENCE_S
    try:
        while True:
            state: dict[str, Any] = json.loads((await client.request("GET", "/debug/engine")).body)
            stats = state["stats"]
            busy = state["streams"] or stats["num_running"] or stats["num_waiting"]
            if not busy or time.monotonic() > end:
                return state
            await asyncio.sleep(0.05)
    finally:
        await client.close()


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


async def _stream(storm: Storm, client: HttpClient, index: int, draw: random.Random) -> None:
    path, body = spec(index)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    outcome = read_answer(index, 0, await client.request("POST", path, _encode(body)))
    # A continuation whose first token ends it has no text to carry.
    if outcome.failure not in (None, "no tokens"):
        storm.wrong.append(f"stream {index}: {outcome.failure}: {outcome.detail}")
    elif outcome.finish_reason not in ("stop", "length") or not outcome.has_usage:
        storm.wrong.append(f"stream {index} ends with {outcome.finish_reason}, usage: {outcome.has_usage}")
    elif outcome.finish_reason == "length" and outcome.output_tokens != body["max_tokens"]:
        storm.wrong.append(f"stream {index}: {outcome.output_tokens} tokens of {body['max_tokens']}")
    else:
        storm.texts.setdefault(index, set()).add(outcome.text)


async def _whole(storm: Storm, client: HttpClient, index: int, draw: random.Random) -> None:
    path, body = spec(index)
    reply = await client.request("POST", path, _encode(body))
    if reply.status != 200:
        storm.wrong.append(f"whole {index}: HTTP {reply.status}: {reply.body[:200]!r}")
        return
    choice = json.loads(reply.body)["choices"][0]
    storm.texts.setdefault(index, set()).add(choice["text"] if "text" in choice else choice["message"]["content"])


async def _leave(storm: Storm, client: HttpClient, index: int, draw: random.Random) -> None:
    """Reads some events and goes away; what came until then must be whole events."""
    path, body = spec(index)
    reply = await client.request("POST", path, _encode(body | {"stream": True}), leave_after=draw.randint(1, 12))
    outcome = read_answer(index, 0, reply)
    if outcome.failure not in (None, "no tokens"):
        storm.wrong.append(f"leave {index}: {outcome.failure}: {outcome.detail}")


async def _cancel(storm: Storm, client: HttpClient, index: int, draw: random.Random) -> None:
    """Goes away without having seen anything, perhaps before the request was read."""
    path, body = spec(index)
    body["stream"] = draw.random() < 0.5
    try:
        async with asyncio.timeout(draw.choice((0.0, 0.002, 0.02, 0.1))):
            await client.request("POST", path, _encode(body))
    except TimeoutError:
        pass


async def _bad(storm: Storm, client: HttpClient, index: int, draw: random.Random) -> None:
    path, body = draw.choice(BAD_BODIES)
    reply = await client.request("POST", path, body)
    try:
        message = json.loads(reply.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    if not 400 <= reply.status < 500 or not message:
        storm.wrong.append(f"bad {body[:60]!r}: HTTP {reply.status}: {reply.body[:200]!r}")


_ONE = {"stream": _stream, "whole": _whole, "leave": _leave, "cancel": _cancel, "bad": _bad}
_KINDS = tuple(_ONE)
_WEIGHTS = (50, 15, 15, 10, 10)


def describe(storm: Storm, state: dict[str, Any], first: float) -> str:
    """One paragraph for people. first: the share behind which growth is told."""
    stats = state["stats"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(storm.kinds.items()))
    peak = max(size for _, size in storm.rss)
    return (
        f"{sum(storm.kinds.values())} requests ({kinds}) in {storm.seconds:.1f} s, {stats['output_tokens']} tokens, "
        f"{stats['num_preemptions']} preemptions; resident memory up to {peak / 2**20:.1f} MiB, "
        f"{storm.rss_growth(first):+.2%} behind the first {first:.0%}; {len(storm.wrong)} broken promises; "
        f"{os.cpu_count()} CPUs"
    )
