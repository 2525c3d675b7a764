"""Cost of `llmc route`: latency added to a request, and throughput relative to asking the replica directly.

    python -m bench.route_overhead ARTIFACT [--requests 300] [--streams 16] [--rounds 5] [--json]

One replica is asked through a router and directly, in turn. Latency: requests of one token, one at a time; the
difference of a round's medians. Throughput: concurrent streams with equal numbers of tokens; routed over direct.
Medians and ranges over the rounds are printed, and the router's CPU time per request and per token. Client, router and
replica share the machine: with fewer than three free CPUs they take throughput from one another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from bench.route_chaos import replicas_of, routed
from llmc.runtime.address import Address
from llmc.runtime.loadgen.http import HttpClient

_PATH = "/v1/completions"
_TICK = os.sysconf("SC_CLK_TCK")


def body_of(number: int, num_tokens: int, *, stream: bool) -> bytes:
    """A request with a prompt that was not sent before."""
    body = {"prompt": f"{number} It is a truth universally acknowledged, that", "max_tokens": num_tokens}
    return json.dumps({**body, "ignore_eos": True, "seed": number, "stream": stream}).encode()


async def latency_us(client: HttpClient, count: int, first: int) -> float:
    """Median latency of requests of one token, one at a time, in microseconds."""
    times = []
    for number in range(first, first + count):
        reply = await client.request("POST", _PATH, body_of(number, 1, stream=False))
        assert reply.status == 200, reply.body
        times.append((reply.end_ns - reply.start_ns) / 1000)
    return statistics.median(times)


async def tokens_per_s(client: HttpClient, streams: int, num_tokens: int, first: int) -> float:
    """Tokens per second of concurrent streams."""
    began = time.monotonic()
    bodies = [body_of(first + number, num_tokens, stream=True) for number in range(streams)]
    replies = await asyncio.gather(*(client.request("POST", _PATH, body) for body in bodies))
    assert all(reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)
    return streams * num_tokens / (time.monotonic() - began)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


async def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Values of each figure, one per round."""
    direct = HttpClient(Address.parse(replicas_of(url)[0]["url"]))
    through = HttpClient(Address.parse(url))
    found: dict[str, list[float]] = {
        name: []
        for name in (
            *("direct_us", "routed_us", "added_us", "router_cpu_us_a_request"),
            *("direct_tokens_per_s", "routed_tokens_per_s", "throughput_ratio", "router_cpu_us_a_token"),
        )
    }
    for number in range(args.rounds + 1):
        first = number * 100_000
        plain = await latency_us(direct, args.requests, first)
        before = cpu_seconds(pid)
        routed_us = await latency_us(through, args.requests, first + 50_000)
        cpu = cpu_seconds(pid) - before
        rate = await tokens_per_s(direct, args.streams, args.tokens, first + 80_000)
        before = cpu_seconds(pid)
        routed_rate = await tokens_per_s(through, args.streams, args.tokens, first + 90_000)
        cpu_streams = cpu_seconds(pid) - before
        if number == 0:  # connections are opened, caches filled
            continue
        found["direct_us"].append(plain)
        found["routed_us"].append(routed_us)
        found["added_us"].append(routed_us - plain)
        found["router_cpu_us_a_request"].append(cpu / args.requests * 1e6)
        found["direct_tokens_per_s"].append(rate)
        found["routed_tokens_per_s"].append(routed_rate)
        found["throughput_ratio"].append(routed_rate / rate)
        found["router_cpu_us_a_token"].append(cpu_streams / (args.streams * args.tokens) * 1e6)
    await direct.close()
    await through.close()
    return found


def router_pid(url: str) -> int:
    """Process id of the router, which is the parent of its replicas."""
    pid: int = replicas_of(url)[0]["pid"]
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main(argv: list[str] | None = None) -> int:
    """Measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with routed(args.artifact, 1, ["--serve-flags", "--threads 1"]) as url:
        httpx.get(f"{url}/health")
        found = asyncio.run(measure(url, router_pid(url), args))
    table: dict[str, dict[str, Any]] = {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in found.items()
    }
    if args.json:
        print(json.dumps({"load_average": os.getloadavg(), **table}))
        return 0
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    for name, row in table.items():
        print(f"{name:>24}  {row['median']:10.2f}  ({row['least']:.2f} to {row['most']:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
