"""llmc, llama.cpp, OpenVINO GenAI, vLLM and transformers side by side: installed, given the same weights, measured.

    python -m bench.peers                          all of it; hours on two CPUs
    python -m bench.peers --models qwen2.5-0.5b --rounds 3 --parts speed,start,memory
    python -m bench.peers --for 150                 take measurements for 150 s; say it again to go on
    python -m bench.peers --engines llmc,openvino --variants llmc/w8a8,openvino/int8
    python -m bench.peers install                   only make the environments and convert the models
    python -m bench.peers report                    only write tables and plots from what was measured
    python -m bench.peers report --publish zen-5    and into bench/results and docs/benchmarks.md
    python -m bench.peers page                      only write the page from bench/results

All files are below --folder, which git ignores. FOLDER/results.json is written after every measurement, so a run goes
on where the last one stopped. Tables and plots are written at the end; docs/benchmarking.md explains them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers.engines import ENGINES
from bench.peers.engines.base import Engine, Variant
from bench.peers.environment import Workspace, free_bytes
from bench.peers.machine_limits import ARITHMETIC, by_threads, probe, supported, thread_counts
from bench.peers.model import read_shape
from bench.peers.page import write_page
from bench.peers.plan import PARTS, Entrant, Key, Settings, measurements
from bench.peers.publish import publish
from bench.peers.report import PRECISIONS, Report
from bench.peers.results import NAME
from bench.peers.roofline import roofline
from bench.peers.runner import Runner, enlist
from bench.peers.store import Measurement, Store, StoreError

MODELS = {"qwen2.5-0.5b": 8, "llama-3.2-1b": 19, "qwen2.5-1.5b": 23, "qwen3-moe-4b": 45}
"""GiB of disk that each model takes in all formats."""
ENVIRONMENTS_GIB = 9
MEMORY_SHARE = 0.75


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    store_path = arguments.folder / "results.json"
    try:
        if arguments.action == "page":
            write_page()
            return 0
        if arguments.action == "report":
            write_report(Store.load(store_path), arguments.folder, arguments.publish)
            return 0
        settings = Settings(
            threads=arguments.threads,
            steps=arguments.steps,
            requests=arguments.requests,
        )
        store = Store(store_path, settings, machine())
        return measure(arguments, settings, store)
    except StoreError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted: what was measured is kept; say the same again to go on")
        return 130


def measure(arguments: argparse.Namespace, settings: Settings, store: Store) -> int:
    """Installs, converts, measures, reports; the exit code."""
    begin = time.monotonic()
    # Exits as usual, so that worker processes are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("error: ended by a signal; what was measured is kept"))
    workspace = Workspace(arguments.folder.resolve(), settings.threads, say)
    free = free_bytes(workspace.root) >> 30
    needed = sum(
        size for model, size in MODELS.items() if model in arguments.models and not workspace.model(model).exists()
    )
    needed += 0 if (workspace.root / "env").exists() else ENVIRONMENTS_GIB
    if free < needed:
        say(f"error: {workspace.root} has {free} GiB of disk left, this needs {needed}: free some, or fewer --models")
        return 1
    for model in arguments.models:
        make_model(workspace, model, store)
    engines = [ENGINES[name](workspace, settings) for name in arguments.engines]

    def wanted(engine: Engine, variant: Variant) -> bool:
        return not arguments.variants or f"{engine.name}/{variant.name}" in arguments.variants

    found = enlist(engines, arguments.models, wanted, supported(settings.threads), store, say)
    if arguments.action == "install":
        return 0
    limits = probe(settings.threads)
    store.limits.append({n: v for n in ("read", *ARITHMETIC) if (v := limits.measure(n, 0.5)) is not None})
    reading = by_threads(thread_counts(settings.threads), ["read"], 0.5)
    store.reading.append({str(threads): rate for threads, _, rate in reading if rate is not None})
    entrants = {name: one.entrant() for name, one in found.items()}

    def of(model: str) -> list[Entrant]:
        own = [name for name in entrants if name[0] == model]
        return [
            entrants[name] for name in sorted(own, key=lambda name: PRECISIONS.index(found[name].variant.precision))
        ]

    memory = int(MEMORY_SHARE * available_bytes())
    plan = list(measurements(settings, arguments.models, of, arguments.parts, arguments.rounds, memory))
    runner = Runner(workspace, settings, store, limits, found)
    stop_at = None if arguments.seconds is None else begin + arguments.seconds
    try:
        complete = runner.run(plan, stop_at, Progress(len({key for _, key in plan} - store.done())))
    finally:
        runner.close()
    write_report(store, arguments.folder, arguments.publish if complete else None)
    if not complete:
        left = len({key for _, key in plan} - store.done())
        say(f"{left} of {len(plan)} measurements are left: say the same again to go on")
    return 0


class Progress:
    """Prints a line on stderr for every measurement."""

    def __init__(self, total: int) -> None:
        self.total, self.count, self.began = total, 0, time.monotonic()

    def __call__(self, key: Key, found: Measurement | None) -> None:
        if found is None:
            self.count += 1
            return
        name = f"{key.model} {key.engine} {key.variant} {key.figure} round {key.round + 1}"
        if found.value is None:
            value = found.error
        elif key.kind == "memory":
            value = f"{found.value / (1 << 30):.3g} GiB"
        else:
            value = f"{found.value:.4g} {'s' if key.kind.startswith('start') else 'tok/s'}"
        say(f"[{self.count}/{self.total}, {time.monotonic() - self.began:.0f} s] {name}: {value}")


def make_model(workspace: Workspace, name: str, store: Store) -> None:
    """Writes the checkpoint with random weights, unless it exists."""
    path = workspace.model(name)
    if not (path / "config.json").exists():
        from bench.make_model import write

        say(f"write {name} with random weights")
        write(name, path)
    store.models[name] = asdict(read_shape(path))


def write_report(store: Store, folder: Path, name: str | None = None) -> None:
    """Writes report.json, report.md and a plot per model, and prints the tables. name: also publishes the figures as
    that."""
    report = Report(store)
    (folder / "report.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    text = report.markdown()
    (folder / "report.md").write_text(text)
    for model in report.models():
        roofline(report, model, folder / f"roofline-{model}.svg")
    print(text)
    if name is not None:
        names = publish(report, name)
        write_page(names)
        say(
            f"bench/results and docs/benchmarks.md have {', '.join(names)}: read the page, and write what it leaves out"
        )


def machine() -> dict[str, Any]:
    """Properties of the machine on which the figures depend."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in described if line.startswith("model name"))
    cpu = next(names, os.uname().machine)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cpus": len(os.sched_getaffinity(0)), "memory_gib": round(memory / (1 << 30))}


def available_bytes() -> int:
    """Bytes of memory that are available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def names(known: Sequence[str]) -> Any:
    """Parses a comma-separated list of known names."""

    def parsed(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose among {', '.join(known)}")
        return found

    return parsed


def results_name(text: str) -> str:
    """Parses the name of published figures; refused here, before hours of measuring."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give small letters, digits, dots and dashes, as in zen-5")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    variants = [f"{name}/{variant.name}" for name, engine in ENGINES.items() for variant in engine.variants]
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=("run", "install", "report", "page"), default="run")
    parser.add_argument(
        "--models", type=names(list(MODELS)), default=list(MODELS), metavar="A,B", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--engines", type=names(list(ENGINES)), default=list(ENGINES), metavar="A,B", help=", ".join(ENGINES)
    )
    parser.add_argument(
        "--variants", type=names(variants), metavar="ENGINE/NAME,…", help="only these: " + ", ".join(variants)
    )
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS), metavar="A,B", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each is measured (5)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="of every engine"
    )
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="decode steps timed (32)")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="of the serving load (48)")
    parser.add_argument("--for", type=float, dest="seconds", metavar="S", help="start no measurement after S seconds")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/peers"), metavar="DIR", help="where all lies (out/peers)"
    )
    parser.add_argument(
        "--publish", type=results_name, metavar="NAME", help="put the tables into bench/results and docs/benchmarks.md"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
