"""Does adding a bucket change the speed of the others? Replays every bucket before and after, in turn.

    python bench/bench_add_bucket.py ARTIFACT decode:3x512 [--rounds 15] [--seconds 60] [--json]

Three engines are measured in turn, in changing order: the artifact, the same artifact opened again (what differs
between these two is noise), and a copy with the bucket added. A row shows the median time of a full bucket and the
medians of the paired ratios. Exit code 1 when a bucket changed by more than 2 % beyond what the control differs by.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.warmup import full_load

LIMIT = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("bucket", type=Bucket.parse, nargs="+")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each bucket in each engine")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long, with what was measured")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path, help="graph cache; default: that of llmc compile")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.artifact.resolve().parent) as folder:
        report = add_buckets(given.artifact, given.bucket, Path(folder) / "grown", cache_dir=given.cache_dir)
        rows = measure([given.artifact, given.artifact, report.artifact], given.rounds, given.seconds, given.threads)
    off = [row for row in rows if abs(row["grown"] - 1) > LIMIT + abs(row["control"] - 1)]
    if given.json:
        print(json.dumps({"added": report.added, "buckets": rows, "changed": [row["bucket"] for row in off]}, indent=1))
    else:
        print(f"added {', '.join(report.added)}; {report.kernels_added} new kernels")
        print(f"{'bucket':<18} {'ms':>9} {'again':>8} {'grown':>8} {'rounds':>7}")
        for row in rows:
            print(f"{row['bucket']:<18} {row['ms']:9.3f} {row['control']:8.4f} {row['grown']:8.4f} {row['rounds']:7d}")
        worst = max(rows, key=lambda row: abs(row["grown"] - 1))
        print(f"largest change: {worst['grown'] - 1:+.2%} ({worst['bucket']}), limit {LIMIT:.0%} beyond the control's")
    return 1 if off else 0


def measure(paths: list[Path], rounds: int, seconds: float, threads: int) -> list[dict[str, Any]]:
    """Times of all buckets of the first artifact, in each of them."""
    artifacts = [Artifact(path) for path in paths]
    engines = [Engine(artifact, num_threads=threads, num_blocks=0) for artifact in artifacts]
    info, graphs = artifacts[0].info, artifacts[0].graphs()
    times: dict[int, list[list[int]]] = {index: [] for index in range(len(graphs))}
    deadline, order = time.monotonic() + seconds, random.Random(0)
    for turn in range(rounds + 1):
        for index, graph in enumerate(graphs):
            if turn > 1 and time.monotonic() > deadline:
                break
            load, found = full_load(graph, info.block_size, info.max_model_len), [0] * len(engines)
            for which in order.sample(range(len(engines)), len(engines)):
                found[which] = engines[which].warm_load(index, load.num_seqs, load.tokens_each, load.context)
            if turn:  # the first one warms up
                times[index].append(found)
    rows: list[dict[str, Any]] = []
    for index, graph in enumerate(graphs):
        control = statistics.median(again / first for first, again, _ in times[index])
        grown = statistics.median(grown / ((first + again) / 2) for first, again, grown in times[index])
        rows.append({"bucket": f"{graph.phase}:{graph.batch}x{graph.seq}", "rounds": len(times[index]),
                     "ms": statistics.median(first for first, _, _ in times[index]) / 1e6,
                     "control": control, "grown": grown})  # fmt: skip
    for engine in engines:
        engine.close()
    return rows


if __name__ == "__main__":
    sys.exit(main())
