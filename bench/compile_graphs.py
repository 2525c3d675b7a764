"""Cost of compiling a model's graphs and kernels: CPU seconds and peak memory, from its config.json alone.

    python -m bench.compile_graphs config.json [--max-model-len 4096] [--jobs 2]

The default ladder is compiled for this machine into an empty cache, without weights to pack. CPU time of this process
and its workers is measured, which other programs hardly lengthen. The first line is imports.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmc.compiler.build import build_kernels
from llmc.compiler.config import CompileConfig
from llmc.compiler.dry_run import describable
from llmc.compiler.graph.demands import kernels_of
from llmc.compiler.graph.plan import plan_graphs
from llmc.compiler.graph.tracer import Tracer
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.resolve import resolve
from llmc.compiler.resources import PeakMemory
from llmc.compiler.store.cache import GraphCache
from llmc.tvm_import import import_tvm


def _cpu_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _phases(config: CompileConfig) -> Iterator[str]:
    """Compiles, and yields each phase's name when it is done."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import_tvm()
    yield "imports"
    resolved, cache = resolve(config, describable(config.model)), GraphCache(config.cache_dir or Path())
    tracer, buckets = Tracer(resolved, cache), tuple(resolved.ladder)
    tracer.prepare(buckets)
    yield "trace, lower, write"
    planned = plan_graphs(
        buckets, resolved.graph_params(), resolved.graph_components(), cache, tracer.bind, lambda done, count: None
    )
    lists = list({shape: commands for shape, commands in planned.values()}.values())
    yield f"{len(lists)} graphs of {len(buckets)} buckets"
    specs = sorted(kernels_of(lists), key=KernelSpec.symbol)
    build_kernels(specs, resolved.target, cache, config.num_jobs(), lambda done, count: None, {})
    yield f"{len(specs)} kernels for {resolved.target.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a config.json of any name, or a model's directory")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    print(f"{'phase':32} {'CPU s':>8} {'peak MiB':>9}")
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as memory:
        config = CompileConfig(
            model=args.config, output=args.config, cache_dir=Path(folder), max_model_len=args.max_model_len,
            jobs=args.jobs,
        )  # fmt: skip
        before = _cpu_s()
        for phase in _phases(config):
            now = _cpu_s()
            print(f"{phase:32} {now - before:8.1f} {memory.sample() >> 20:9}", flush=True)
            before = now


if __name__ == "__main__":
    main()
