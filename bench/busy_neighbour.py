"""Cost of a busy neighbour: decode tokens/s of the engine alone and beside a process that uses a CPU.

    python -m bench.busy_neighbour ARTIFACT [--rounds 5] [--seconds 3] [--threads 1 2] [--neighbours none burn bursts]
    python -m bench.busy_neighbour ARTIFACT --library before.so after.so

A round runs every neighbour once with every number of threads and every library, each in a process of its own. `burn`
loops for ever on one CPU; `bursts` works for 1 ms and sleeps for 1 ms, as a client does. Medians and ranges over the
rounds are printed. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.runtime.binding import Artifact, Engine, SamplingParams

_SETTLE_S = 1.0
_NEIGHBOURS = {
    "burn": "while True: pass",
    "bursts": """
import time
while True:
    end = time.monotonic() + 1e-3
    while time.monotonic() < end: pass
    time.sleep(1e-3)
""",
}


@contextmanager
def neighbour(kind: str, cpu: int) -> Iterator[None]:
    """Context with a neighbour process of this kind on this CPU; "none": no process."""
    if kind == "none":
        yield
        return
    program = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\n{_NEIGHBOURS[kind]}"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def decode(artifact: Path, threads: int, streams: int, seconds: float) -> float:
    """Tokens/s of `streams` greedy requests in this process; the first second does not count."""
    with Artifact(artifact) as opened:
        longest = opened.info.max_model_len
        with Engine(opened, num_threads=threads, weight_memory="copied") as engine:
            params = SamplingParams(temperature=0.0, max_tokens=longest - 8, ignore_eos=True)
            running = tokens = 0
            start, begin = time.monotonic(), 0.0
            while True:
                while running < streams:
                    engine.submit([1 + running] * 8, params)
                    running += 1
                engine.step()
                now = time.monotonic()
                if begin == 0.0 and now - start >= _SETTLE_S:
                    begin, tokens = now, 0
                for event in engine.poll():
                    tokens += event.kind == "token"
                    running -= event.kind in ("finished", "failed")
                if begin and now - begin >= seconds:
                    return tokens / (now - begin)


def measure(arguments: argparse.Namespace) -> dict[tuple[str, int, str], list[float]]:
    found: dict[tuple[str, int, str], list[float]] = {}
    for number in range(arguments.rounds):
        cases = [(n, t, lib) for n in arguments.neighbours for t in arguments.threads for lib in arguments.library]
        for case in cases if number % 2 == 0 else reversed(cases):
            kind, threads, library = case
            command = [sys.executable, "-m", "bench.busy_neighbour", str(arguments.artifact), "--decode"]
            command += ["--threads", str(threads), "--seconds", str(arguments.seconds)]
            command += ["--streams", str(arguments.streams)]
            environment = dict(os.environ) | ({"LLMC_LIBRARY": library} if library else {})
            with neighbour(kind, arguments.cpu):
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
            found.setdefault(case, []).append(float(done.stdout))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--neighbours", nargs="+", choices=["none", *_NEIGHBOURS], default=["none", *_NEIGHBOURS])
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="of the neighbour")
    parser.add_argument("--library", nargs="+", default=[""], help="libllmc.so to compare; default: the installed one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode:
        print(decode(arguments.artifact, arguments.threads[0], arguments.streams, arguments.seconds))
        return
    found = measure(arguments)
    if arguments.json:
        rows = [{"neighbour": n, "threads": t, "library": lib, "tok_s": rates} for (n, t, lib), rates in found.items()]
        print(json.dumps(rows, indent=2))
        return
    for (kind, threads, library), rates in found.items():
        spread = f"{statistics.median(rates):9.1f} tok/s ({min(rates):.1f}–{max(rates):.1f})"
        print(f"{kind:8} {threads:3} threads {spread}  {library}")


if __name__ == "__main__":
    main()
