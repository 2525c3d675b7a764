"""Latency of plain requests beside guided ones: times of whole answers, not gaps of a running stream.

    python -m bench.guided_neighbours ARTIFACT [--seconds 8] [--size 8000] [--n 1 16 64] [--json]

A server process with one engine thread and `--max-num-seqs 8` answers `--connections` clients. Each asks again and
again for `--n` continuations that must be one long text: a literal of `--size` characters is the heaviest mask. Beside
them one client asks for eight plain tokens, one answer after the other. Printed for each n, and without guided clients:
median, 99th percentile and worst time of plain answers, and the number of guided tokens. The artifact needs a
tokenizer, as examples/tiny-english has. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.serve_overhead import served

_PATIENCE_S = 600.0


@dataclass
class Found:
    """Milliseconds of plain answers beside guided requests of n continuations; n 0: without guided requests."""

    n: int
    answers: int
    median_ms: float
    p99_ms: float
    worst_ms: float
    guided_tokens: int
    refused: str


def complete(url: str, **body: Any) -> dict[str, Any]:
    """The answer of a completion. Raises urllib.error.HTTPError."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        return dict(json.load(answer))


def beside(url: str, n: int, size: int, connections: int, seconds: float) -> Found:
    """Times plain answers for `seconds` beside guided requests."""
    stop = threading.Event()
    tokens: list[int] = []
    refused: list[str] = []

    def guided() -> None:
        schema = {"const": "x" * size}
        while not stop.is_set():
            try:
                answer = complete(url, prompt="She", n=n, max_tokens=16, guided_json=schema)
            except urllib.error.HTTPError as error:
                refused.append(json.load(error)["error"]["message"])
                time.sleep(0.05)
            else:
                tokens.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=guided, daemon=True) for _ in range(connections if n else 0)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not times:
        start = time.perf_counter()
        complete(url, prompt="He", max_tokens=8, ignore_eos=True)
        times.append((time.perf_counter() - start) * 1e3)
    stop.set()
    for thread in threads:
        thread.join()
    times.sort()
    return Found(
        n,
        answers=len(times),
        median_ms=statistics.median(times),
        p99_ms=times[int(len(times) * 0.99)],
        worst_ms=times[-1],
        guided_tokens=sum(tokens),
        refused=refused[0] if refused else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each n goes on")
    parser.add_argument("--size", type=int, default=8000, help="characters of the literal")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 16, 64], help="continuations of a guided request")
    parser.add_argument("--connections", type=int, default=4, help="guided clients")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    flags = ["--threads", "1", "--max-num-seqs", "8", "--stats-interval", "0"]
    with served(options.artifact, flags) as (url, _):
        found = [beside(url, n, options.size, options.connections, options.seconds) for n in (0, *options.n)]
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    print(f"{'guided n':>8} {'answers':>8} {'median':>10} {'p99':>10} {'worst':>10} {'guided tokens':>14}")
    for one in found:
        line = f"{one.median_ms:7.1f} ms {one.p99_ms:7.1f} ms {one.worst_ms:7.1f} ms {one.guided_tokens:14}"
        print(f"{one.n or 'none':>8} {one.answers:8} {line}  {one.refused}")


if __name__ == "__main__":
    main()
