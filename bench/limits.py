"""Limits of this machine: bytes read and operations per second, by 1 to N threads.

    python -m bench.limits
    python -m bench.limits --threads 2 --rounds 9 --seconds 1
    python -m bench.limits --json

Every round measures each limit once with each number of threads; medians and ranges over the rounds are printed.
docs/performance.md explains the probe.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import track

from bench.peers.machine_limits import UNITS, by_threads, thread_counts
from bench.peers.report import Spread
from llmc.runtime.binding.machine_limits import LIMITS


def spreads(found: Sequence[tuple[int, str, float | None]]) -> dict[int, dict[str, Spread]]:
    """Spreads over the rounds, by threads and limit."""
    rates: dict[int, dict[str, list[float]]] = {}
    for threads, limit, rate in found:
        if rate is not None:
            rates.setdefault(threads, {}).setdefault(limit, []).append(rate)
    return {threads: {limit: Spread.of(row[limit]) for limit in row} for threads, row in rates.items()}


def as_lines(rows: dict[int, dict[str, Spread]]) -> list[str]:
    """A table with a line for each number of threads; columns are as wide as their widest cell."""
    lines = [["threads", *(f"{limit}, {UNITS[limit]}" for limit in LIMITS)]]
    for threads, row in rows.items():
        lines.append([str(threads), *(row[limit].text(1e9) if limit in row else "–" for limit in LIMITS)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.limits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="at most (every CPU)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each is measured (5)")
    parser.add_argument("--seconds", type=float, default=0.3, metavar="S", help="of each measurement (0.3)")
    parser.add_argument("--json", action="store_true", help="bytes and operations a second")
    options = parser.parse_args(argv)
    for name in ("threads", "rounds", "seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}; it must be more than 0")
    counts = thread_counts(options.threads)
    total = len(counts) * len(LIMITS) * options.rounds
    steps = (one for _ in range(options.rounds) for one in by_threads(counts, LIMITS, options.seconds))
    quiet = not sys.stderr.isatty()
    rows = spreads(list(track(steps, "measuring", total=total, console=Console(stderr=True), disable=quiet)))
    if options.json:
        print(json.dumps({t: {limit: asdict(spread) for limit, spread in row.items()} for t, row in rows.items()}))
    else:
        print(*as_lines(rows), sep="\n")


if __name__ == "__main__":
    main()
