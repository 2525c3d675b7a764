"""Kernel specs → machine code: from the cache, or compiled in parallel processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from llmc.compiler import keys
from llmc.compiler.cache import GraphCache, key_of
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.targets.cpu import Target
from llmc.compiler.tvm_import import import_tvm

_MIN_KERNELS_A_PROCESS = 8


@dataclass(frozen=True)
class BuiltKernel:
    """One kernel's object file, and what its cache key was made of."""

    spec: KernelSpec
    code: bytes
    key: str
    components: dict[str, str]
    cached: bool


def _compile(job: tuple[KernelSpec, Target]) -> bytes:
    import_tvm()
    from llmc.compiler.kernels.pipeline import compile_object
    from llmc.compiler.kernels.registry import build_kernel

    spec, target = job
    return compile_object(build_kernel(spec, target), target)


def build_kernels(
    specs: Sequence[KernelSpec],
    target: Target,
    cache: GraphCache,
    num_jobs: int,
    on_kernel: Callable[[int, int], None],
) -> list[BuiltKernel]:
    """Builds each spec once, in the given order. Compilation is deterministic: a cached kernel has the same bytes."""
    built: dict[KernelSpec, BuiltKernel] = {}
    missing: list[tuple[KernelSpec, str, dict[str, str]]] = []
    for spec in specs:
        components = keys.kernel_components(spec, target)
        key = key_of(components)
        code = cache.get(key)
        if code is None:
            missing.append((spec, key, components))
        else:
            built[spec] = BuiltKernel(spec, code, key, components, cached=True)
    on_kernel(len(built), len(specs))

    def keep(spec: KernelSpec, key: str, components: dict[str, str], code: bytes) -> None:
        cache.put(key, code, components, {"symbol": spec.symbol()})
        built[spec] = BuiltKernel(spec, code, key, components, cached=False)
        on_kernel(len(built), len(specs))

    jobs = [(spec, target) for spec, _, _ in missing]
    workers = min(num_jobs, len(missing) // _MIN_KERNELS_A_PROCESS)
    if workers > 1:
        # spawn: torch and TVM have threads, which a forked child would inherit locked.
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for job, code in zip(missing, pool.map(_compile, jobs), strict=True):
                keep(*job, code)
    else:
        for job, arguments in zip(missing, jobs, strict=True):
            keep(*job, _compile(arguments))
    return [built[spec] for spec in specs]
