"""Chaos test: many requests to `llmc route` while its replicas are killed. None may be lost or doubled.

    python -m bench.route_chaos ARTIFACT [--requests 2000] [--replicas 3] [--every 5] [--spare 0] [--json]

Each request is sent twice: to undisturbed replicas, and while SIGKILL ends one of them every few seconds, if more than
--spare are ready. Half of the requests stream. Texts must be equal, and each stream must end once. Exit code 1: a
request failed this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import httpx

_LLMC = [sys.executable, "-P", "-c", "import sys; from llmc.cli.main import main; sys.exit(main())"]
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass
class Outcome:
    """Outcomes of a run's requests, counted. wrong: texts that differ from the undisturbed run's."""

    requests: int = 0
    errors: int = 0
    wrong: int = 0
    tokens: int = 0
    kills: int = 0
    failovers: int = 0
    retries: int = 0
    seconds: float = 0.0
    undisturbed_seconds: float = 0.0


@contextlib.contextmanager
def routed(artifact: str, replicas: int, flags: list[str]) -> Iterator[str]:
    """The URL of a router whose replicas are ready."""
    command = [*_LLMC, "route", "--port", "0", "--spawn", str(replicas), artifact, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("llmc: ready: "):
                url = line.split()[2].removesuffix("/v1")
                break
        else:
            raise RuntimeError("the router did not get ready: run llmc route by hand to see why")
        # Keep reading stderr, or the router blocks on a full pipe.
        with subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL):
            while any(one["state"] != "ready" for one in replicas_of(url)):
                time.sleep(0.1)
            yield url
            process.terminate()
            process.wait()
    finally:
        process.kill()
        process.wait()


def replicas_of(url: str) -> list[dict[str, Any]]:
    """States of replicas, as the router reports them."""
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/llmc/replicas", timeout=60).json()["data"]
    return found


def request_of(number: int, max_tokens: int) -> dict[str, Any]:
    """The body of a request, a function of its number and max_tokens."""
    rng = random.Random(number)
    prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(3, 40)))
    body = {"prompt": prompt, "max_tokens": rng.randint(1, max_tokens), "ignore_eos": True, "seed": number}
    return {**body, "temperature": 0.0 if number % 3 == 0 else 1.0, "stream": number % 2 == 1}


async def run(url: str, count: int, concurrency: int, max_tokens: int) -> dict[int, str]:
    """A digest or an error of each answer, by the number of the request."""
    room = asyncio.Semaphore(concurrency)
    found: dict[int, str] = {}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def ask(number: int) -> None:
            body = request_of(number, max_tokens)
            async with room:
                try:
                    response = await client.post("/v1/completions", json=body)
                    assert number not in found
                    found[number] = digest(response, streams=body["stream"], num_tokens=body["max_tokens"])
                except httpx.HTTPError as error:
                    found[number] = f"error: {type(error).__name__}"

        await asyncio.gather(*(ask(number) for number in range(count)))
    return found


def digest(response: httpx.Response, *, streams: bool, num_tokens: int) -> str:
    """Digest of an answer's text and end; "error: …" if the answer is incomplete."""
    if response.status_code != 200:
        return f"error: {response.status_code} {response.text[:200]}"
    if streams:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        if events.count("[DONE]") != 1 or events[-1] != "[DONE]":
            return "error: the stream has no end, or several"
        parts = [json.loads(event) for event in events[:-1]]
        if any("error" in part for part in parts):
            return f"error: {events[-2][:200]}"
        choices = [choice for part in parts for choice in part["choices"]]
    else:
        answer = response.json()
        choices = answer["choices"]
        if answer["usage"]["completion_tokens"] != num_tokens:
            return "error: tokens are missing or too many"
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if ends != ["length"]:
        return f"error: ends are {ends}"
    return hashlib.sha256("".join(choice["text"] for choice in choices).encode()).hexdigest()


async def kill_now_and_then(url: str, every_s: float, spare: int, rng: random.Random) -> int:
    """Kills a ready replica every few seconds until it is cancelled; returns how many."""
    kills = 0
    try:
        while True:
            await asyncio.sleep(every_s)
            ready = [one for one in await asyncio.to_thread(replicas_of, url) if one["state"] == "ready"]
            if len(ready) > spare:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(ready)["pid"], signal.SIGKILL)
                    kills += 1
    except asyncio.CancelledError:
        return kills


def metric(url: str, name: str) -> int:
    """A counter of the router."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith(f"{name} "))))


async def chaos(url: str, count: int, concurrency: int, max_tokens: int, every_s: float, spare: int) -> Outcome:
    """Makes both runs and compares them."""
    began = time.monotonic()
    wanted = await run(url, count, concurrency, max_tokens)
    between = time.monotonic()
    killer = asyncio.create_task(kill_now_and_then(url, every_s, spare, random.Random(0)))
    found = await run(url, count, concurrency, max_tokens)
    ended = time.monotonic()
    killer.cancel()
    errors = [text for text in (*wanted.values(), *found.values()) if text.startswith("error")]
    for text in errors[:5]:
        print(text, file=sys.stderr)
    return Outcome(
        requests=len(found),
        errors=len(errors),
        wrong=sum(found[number] != wanted[number] for number in wanted),
        tokens=sum(int(request_of(number, max_tokens)["max_tokens"]) for number in found),
        kills=await killer,
        failovers=metric(url, "llmc_router_failovers_total"),
        retries=metric(url, "llmc_router_retries_total"),
        seconds=ended - between,
        undisturbed_seconds=between - began,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the test; returns 1 if a request was lost, doubled or answered differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--every", type=float, default=5.0, metavar="S")
    parser.add_argument("--spare", type=int, default=0, metavar="N")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with routed(args.artifact, args.replicas, []) as url:
        print(f"llmc: {args.requests} requests, twice, at {url}", file=sys.stderr)
        outcome = asyncio.run(chaos(url, args.requests, args.concurrency, args.max_tokens, args.every, args.spare))
    if args.json:
        print(json.dumps(asdict(outcome)))
    else:
        for name, value in asdict(outcome).items():
            print(f"{name:>20}  {value:g}")
    return 1 if outcome.errors or outcome.wrong or outcome.requests != args.requests else 0


if __name__ == "__main__":
    sys.exit(main())
