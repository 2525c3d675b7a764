"""What one client can do to others: the longest gap in a stream and the slowest /health, beside each attack.

    python -m bench.attack_server ARTIFACT [--seconds 4] [--attack NAME ...] [--json]

A server process with one engine thread streams to one client, while another asks for /health. An attacker sends the
same request over and over, on `--connections` connections. Figures are printed for each attack, and for none: the
stream's longest gap between tokens and its 99th percentile, the slowest /health, and the server's peak memory so far.
The attacker's answers are counted by status. The artifact needs a chat template and a context of 512 tokens or more, as
examples/tiny-chat has. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.serve_overhead import served

_MIB = 1 << 20
_BODY = 4 * _MIB - 64
_PATIENCE_S = 600.0


def _completion(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 4, **fields}).encode()


def _filled(before: str, part: str, after: str) -> bytes:
    """A body of the largest size that a server accepts: `part` repeated between `before` and `after`."""
    return (before + part * ((_BODY - len(before) - len(after)) // len(part)) + after).encode()


def _schema_of(size: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"const": "x" * size}}, "required": ["a"]}


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# name → (path, body)
ATTACKS: dict[str, tuple[str, bytes]] = {
    "messages of numbers": (CHAT, _filled('{"messages":[', "1,", "1]}")),
    "half a million numbers": (CHAT, b'{"messages":[' + b"1," * 500_000 + b"1]}"),
    "a text of one letter": (COMPLETIONS, _filled('{"prompt":"', "a", '"}')),
    "a text of words": (COMPLETIONS, _filled('{"prompt":"', "the cat sat on a mat, ", '"}')),
    "a chat of one letter": (CHAT, _filled('{"messages":[{"role":"user","content":"', "a", '"}]}')),
    "many small messages": (CHAT, _filled('{"messages":[', '{"role":"user","content":"a"},', '{"role":"user"}]}')),
    "8,000 messages": (CHAT, b'{"messages":[' + b'{"role":"user","content":"a"},' * 8000 + b"{}]}"),
    "token ids": (COMPLETIONS, b'{"prompt":[' + b"11," * 500_000 + b"1]}"),
    "wrong token ids": (COMPLETIONS, b'{"prompt":[' + b"[1]," * 30_000 + b'["a"]]}'),
    "deep": (CHAT, b'{"messages":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}"),
    "escapes": (COMPLETIONS, _filled('{"prompt":"', "\\u0061", '"}')),
    "keys": (COMPLETIONS, json.dumps({"prompt": "a", **{f"k{i}": i for i in range(200_000)}}).encode()),
    "a digit": (COMPLETIONS, _filled('{"prompt":"a","seed":', "1", "}")),
    "1,024 prompts": (COMPLETIONS, _completion(prompt=["the cat"] * 1024)),
    "1,024 prompts, n = 64": (COMPLETIONS, _completion(prompt=["the cat"] * 1024, n=64)),
    "n = 64, 20 logprobs": (COMPLETIONS, _completion(prompt="a", n=64, max_tokens=300, logprobs=20)),
    "tokenize": ("/tokenize", _filled('{"prompt":"', "the cat ", '"}')),
    "detokenize": ("/detokenize", b'{"tokens":[' + b"11," * 500_000 + b"1]}"),
    "a const of 100,000": (COMPLETIONS, _completion(prompt="a", guided_json=_schema_of(100_000), max_tokens=64)),
    "the same, n = 64": (COMPLETIONS, _completion(prompt="a", guided_json=_schema_of(100_000), max_tokens=64, n=64)),
    "a choice of 50,000": (COMPLETIONS, _completion(prompt="a", guided_choice=[f"c{i}" for i in range(50_000)])),
    "1,024 guided, n = 64": (COMPLETIONS, _completion(prompt=["a"] * 1024, guided_regex="(ab)*", n=64)),
}


@dataclass
class Found:
    """Figures of one attack: times in ms, memory in MiB, and the attacker's answers counted by status (0: none)."""

    attack: str
    worst_gap_ms: float = 0.0
    p99_gap_ms: float = 0.0
    median_gap_ms: float = 0.0
    worst_health_ms: float = 0.0
    peak_mib: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)


def _request(port: int, path: str, body: bytes | None) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


def _status(port: int, request: bytes) -> int:
    """Status of the answer to a request, after reading all of it; 0: no answer."""
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as connection:
        try:
            connection.sendall(request)
            first = connection.recv(1 << 16)
            while connection.recv(1 << 16):
                pass
        except OSError:
            return 0
    return int(first.split(b" ", 2)[1]) if first else 0


def _stream_gaps(port: int, request: bytes, stop: threading.Event, gaps: list[float]) -> None:
    """Appends to `gaps` the seconds between tokens of a streamed answer; asks again when it ends, until `stop`."""
    while not stop.is_set():
        with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as connection:
            connection.sendall(request)
            last = None
            while part := connection.recv(1 << 16):
                # Headers come when the request is accepted, which is before its turn.
                if b"data:" in part:
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                if stop.is_set():
                    return


def _ask_health(port: int, stop: threading.Event, times: list[float]) -> None:
    request = _request(port, "/health", None)
    while not stop.is_set():
        start = time.perf_counter()
        _status(port, request)
        times.append(time.perf_counter() - start)
        time.sleep(0.005)


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _attack(port: int, pid: int, name: str, request: bytes | None, seconds: float, connections: int) -> Found:
    stop = threading.Event()
    gaps: list[float] = []
    times: list[float] = []
    statuses: Counter[str] = Counter()
    stream = _request(
        port, COMPLETIONS, json.dumps({"prompt": "She", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    )

    def attacker() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and request is not None:
            statuses[str(_status(port, request))] += 1

    def run(*work: Callable[[], None]) -> list[threading.Thread]:
        threads = [threading.Thread(target=one) for one in work]
        for thread in threads:
            thread.start()
        return threads

    watching = run(lambda: _stream_gaps(port, stream, stop, gaps), lambda: _ask_health(port, stop, times))
    time.sleep(0.3)
    gaps.clear()
    times.clear()
    attackers = run(*[attacker] * connections)
    if request is None:
        time.sleep(seconds)
    for thread in attackers:
        thread.join()
    stop.set()
    for thread in watching:
        thread.join()
    ordered = sorted(gaps)
    return Found(
        name,
        worst_gap_ms=ordered[-1] * 1e3,
        p99_gap_ms=ordered[int(len(ordered) * 0.99)] * 1e3,
        median_gap_ms=statistics.median(ordered) * 1e3,
        worst_health_ms=max(times) * 1e3,
        peak_mib=_peak_mib(pid),
        statuses=dict(statuses),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each attack goes on")
    parser.add_argument("--connections", type=int, default=2, help="of the attacker")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    with served(options.artifact, ["--threads", "1", "--stats-interval", "0"]) as (url, pid):
        port = int(url.rpartition(":")[2])
        sys.setswitchinterval(0.0005)
        os.nice(-5) if os.geteuid() == 0 else None
        for name in (None, *(options.attack or ATTACKS)):
            request = None if name is None else _request(port, *ATTACKS[name])
            one = _attack(port, pid, name or "none", request, options.seconds, options.connections)
            found.append(one)
            if not options.json:
                if name is None:
                    print(f"{'attack':24} {'worst gap':>10} {'p99':>8} {'median':>8} {'/health':>9} {'peak MiB':>9}")
                print(
                    f"{one.attack:24} {one.worst_gap_ms:7.1f} ms {one.p99_gap_ms:5.1f} ms {one.median_gap_ms:5.1f} ms "
                    f"{one.worst_health_ms:6.1f} ms {one.peak_mib:9.0f}  {one.statuses}",
                    flush=True,
                )
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
