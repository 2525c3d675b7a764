"""Stalls of steps while graphs are added, enabled and disabled, as `llmc serve --replan auto` does.

    python -m bench.replan_stall ARTIFACT decode:3x512 [--rounds 20] [--threads 1] [--json]

An engine steps without a pause on one thread. Another adds graphs, walks through them and turns them on and off, as a
server that re-plans does. A step's wait is the time of its call minus the engine's own time for the step. It consists
of waiting for the engine's lock, and of the cost of the call. Waits of an undisturbed engine are measured in turn; on a
machine with other work, compare both. The CPU time of a walk is also printed. Threads switch the interpreter at the
server's interval: with Python's default a step may wait 5 ms for it.

Exit code 0: no step waited over --limit-ms (5) longer than the longest wait of a quiet engine; 1: one did.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmc.buckets import Bucket
from llmc.compiler.extend import add_buckets
from llmc.runtime.binding import Artifact, Engine
from llmc.runtime.joining import take_graphs
from llmc.runtime.server.run import SWITCH_INTERVAL_S
from llmc.runtime.warm_up.measuring import light_load

SETTLE_S, QUIET_S, SWITCHES = 0.2, 2.0, 20


@dataclass
class Waits:
    """Seconds that steps waited, in a quiet engine and in a disturbed one, and durations of the disturbances."""

    quiet: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    add_s: list[float] = field(default_factory=list)
    add_cpu_s: list[float] = field(default_factory=list)
    walk_s: list[float] = field(default_factory=list)
    walk_cpu_s: list[float] = field(default_factory=list)
    replay_s: list[float] = field(default_factory=list)


class Stepper:
    """Steps an engine that always has requests, and appends each step's wait to `sink`."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self._engine, self._prompts = engine, prompts
        self.sink: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        running, counted_ns = 0, 0
        while not self._stop.is_set():
            while running < len(self._prompts):
                self._engine.submit(self._prompts[running], max_tokens=64, temperature=0.0, ignore_eos=True)
                running += 1
            sink, began = self.sink, time.perf_counter()
            self._engine.step()
            took = time.perf_counter() - began
            total_ns = self._engine.stats.step_ns
            if counted_ns:
                sink.append(max(0.0, took - (total_ns - counted_ns) / 1e9))
            counted_ns = total_ns
            running -= sum(event.kind == "finished" for event in self._engine.poll())


def measure(base: Path, grown: Path, rounds: int, threads: int) -> Waits:
    """Measures waits; opens an engine for each round."""
    waits = Waits()
    for _ in range(rounds):
        with Artifact(base) as artifact:
            vocab, graphs = artifact.info.vocab_size, artifact.graphs()
            many = artifact.info.max_num_seqs
            engine = Engine(artifact, num_threads=threads)
        prompts = [[(7 * n + 3 * i) % vocab for i in range(8)] for n in range(min(many, 4))]
        stepper = Stepper(engine, prompts)
        time.sleep(SETTLE_S)
        stepper.sink = waits.quiet
        time.sleep(QUIET_S)
        stepper.sink = waits.disturbed
        began, cpu = time.perf_counter(), time.thread_time()
        new = take_graphs(engine, graphs, grown)
        waits.add_s.append(time.perf_counter() - began)
        waits.add_cpu_s.append(time.thread_time() - cpu)
        for index in new:
            cpu = time.thread_time()
            waits.walk_s.append(engine.walk_graph(index) / 1e9)
            waits.walk_cpu_s.append(time.thread_time() - cpu)
        for turn in range(SWITCHES):
            for index in new:
                engine.enable_graph(index, turn % 2 == 0)
            time.sleep(SETTLE_S / SWITCHES)
        stepper.sink = []
        for index in new:
            load = light_load(graphs[index])
            waits.replay_s.append(engine.warm_load(index, load.num_seqs, load.tokens_each, load.context) / 1e9)
        stepper.close()
        engine.close()
    return waits


def report(waits: Waits) -> dict[str, Any]:
    """The result; times in milliseconds."""

    def spread(values: list[float]) -> dict[str, float]:
        array = 1e3 * np.array(values)
        return {
            "median": float(np.median(array)),
            "p99.9": float(np.quantile(array, 0.999)),
            "most": float(array.max()),
        }

    return {
        "steps": {"quiet": len(waits.quiet), "disturbed": len(waits.disturbed)},
        "waited_quiet": spread(waits.quiet),
        "waited_disturbed": spread(waits.disturbed),
        "take_over_beside_steps": spread(waits.add_s),
        "take_over_cpu": spread(waits.add_cpu_s),
        "walk": spread(waits.walk_s),
        "walk_cpu": spread(waits.walk_cpu_s),
        "replay_instead_of_walk": spread(waits.replay_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("bucket", type=Bucket.parse, nargs="+")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit-ms", type=float, default=5.0)
    parser.add_argument("--cache-dir", type=Path, help="graph cache; default: that of llmc compile")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory(dir=given.artifact.resolve().parent) as folder:
        grown = add_buckets(given.artifact, given.bucket, Path(folder) / "grown", cache_dir=given.cache_dir)
        found = report(measure(given.artifact, grown.artifact, given.rounds, given.threads))
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        steps = found.pop("steps")
        print(f"{steps['quiet']} quiet and {steps['disturbed']} disturbed steps; milliseconds")
        print(f"{'':<26} {'median':>9} {'p99.9':>9} {'most':>9}")
        for name, row in found.items():
            print(f"{name.replace('_', ' '):<26} {row['median']:9.3f} {row['p99.9']:9.3f} {row['most']:9.3f}")
    return int(found["waited_disturbed"]["most"] > found["waited_quiet"]["most"] + given.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
