"""Does adding a bucket change the speed of the others? Replays every bucket before and after, in turn.

    python -m bench.bench_add_bucket ARTIFACT decode:3x512 [--seconds 60] [--threads 1] [--json]

Three engines take turns, in changing order: the artifact, a control, and a copy with the bucket added. The control is
the same artifact opened again: its difference is noise. Engines are opened anew several times, since placement in
memory changes speed. In a turn of a bucket each engine makes some full replays within a few milliseconds, right after
the other: all meet the same state of the machine. The fastest counts. A row shows the median ratio within turns: over
the turns of an opening, then over openings. With one thread, the default, the clock is the thread's CPU time, which
excludes other programs.

Exit code 0: no bucket changed by more than 2 %; 1: one did; 2: the control did, so that the run is inconclusive.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.warm_up.measuring import full_load

LIMIT = 0.02
TURN_NS = 2_000_000
MOST_REPLAYS = 64
ENGINES = ("first", "control", "grown")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("bucket", type=Bucket.parse, nargs="+")
    parser.add_argument("--openings", type=int, default=12, help="how often the three engines are opened")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of them together")
    parser.add_argument("--threads", type=int, default=1, help="more than 1: wall time")
    parser.add_argument("--cache-dir", type=Path, help="graph cache; default: that of llmc compile")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.artifact.resolve().parent) as folder:
        report = add_buckets(given.artifact, given.bucket, Path(folder) / "grown", cache_dir=given.cache_dir)
        paths, turns = [given.artifact, given.artifact, report.artifact], []
        for opening in range(given.openings):
            turns.append(measure(paths, given.seconds / given.openings, given.threads, random.Random(opening)))
    rows = [row([one[index] for one in turns], name) for index, name in enumerate(bucket_names(given.artifact))]
    off = {which: [r["bucket"] for r in rows if abs(r[which] - 1) > LIMIT] for which in ENGINES[1:]}
    if given.json:
        print(json.dumps({"added": report.added, "buckets": rows, "changed": off}, indent=1))
    else:
        print(f"added {', '.join(report.added)}; {report.kernels_added} new kernels")
        print(f"{'bucket':<18} {'ms':>9} {'control':>8} {'grown':>8} {'turns':>7}")
        for r in rows:
            print(f"{r['bucket']:<18} {r['ms']:9.3f} {r['control']:8.4f} {r['grown']:8.4f} {r['turns']:7d}")
        for which in ENGINES[1:]:
            worst = max(rows, key=lambda r: abs(r[which] - 1))
            middle = statistics.median(r[which] for r in rows) - 1
            print(f"{which}: largest change {worst[which] - 1:+.2%} ({worst['bucket']}), median {middle:+.2%}")
    return 2 if off["control"] else 1 if off["grown"] else 0


def bucket_names(path: Path) -> list[str]:
    """Bucket names of all graphs, in order."""
    with Artifact(path) as artifact:
        return [f"{graph.phase}:{graph.batch}x{graph.seq}" for graph in artifact.graphs()]


def measure(paths: list[Path], seconds: float, threads: int, order: random.Random) -> list[list[list[int]]]:
    """Nanoseconds of the fastest replay: [graph of the first artifact][engine][turn]."""
    clock: Callable[[], int] = time.thread_time_ns if threads == 1 else time.monotonic_ns
    artifacts = [Artifact(path) for path in paths]
    engines: dict[int, Engine] = {}
    for which in order.sample(range(len(paths)), len(paths)):
        engines[which] = Engine(artifacts[which], num_threads=threads, num_blocks=0)
    info, graphs = artifacts[0].info, artifacts[0].graphs()
    times: list[list[list[int]]] = [[[] for _ in paths] for _ in graphs]
    deadline, turn = time.monotonic() + seconds, 0
    while turn < 2 or time.monotonic() < deadline:
        for index, graph in enumerate(graphs):
            load = full_load(graph, info.block_size, info.max_model_len)
            for which in order.sample(range(len(paths)), len(paths)):
                best, until, replays = sys.maxsize, clock() + TURN_NS, 0
                while replays < 2 or (replays < MOST_REPLAYS and clock() < until):
                    begin = clock()
                    engines[which].warm_load(index, load.num_seqs, load.tokens_each, load.context)
                    best, replays = min(best, clock() - begin), replays + 1
                if turn:  # the first one warms up
                    times[index][which].append(best)
        turn += 1
    for engine in engines.values():
        engine.close()
    return times


def row(openings: list[list[list[int]]], name: str) -> dict[str, Any]:
    """The row of one bucket. openings: nanoseconds [opening][engine][turn]."""
    found: dict[str, Any] = {"bucket": name, "turns": sum(len(opening[0]) for opening in openings)}
    found["ms"] = statistics.median(turn for first, _, _ in openings for turn in first) / 1e6
    turns = [list(zip(*opening, strict=True)) for opening in openings]
    found["control"] = median_ratio([[control / first for first, control, _ in opening] for opening in turns])
    # The control measures the artifact as well as the first engine does: compare with the mean of both.
    found["grown"] = median_ratio([[2 * grown / (first + control) for first, control, grown in one] for one in turns])
    return found


def median_ratio(openings: list[list[float]]) -> float:
    return statistics.median(map(statistics.median, openings))


if __name__ == "__main__":
    sys.exit(main())
