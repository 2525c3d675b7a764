"""Kernel specs → machine code: from the cache, or compiled, by several processes when there are many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from llmc.compiler import keys
from llmc.compiler.cache import GraphCache, key_of
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.targets.cpu import Target
from llmc.compiler.workers import compile_kernel, compile_kernels

_MIN_KERNELS_A_PROCESS = 8


@dataclass(frozen=True)
class BuiltKernel:
    """One kernel's object file, and what its cache key was made of."""

    spec: KernelSpec
    code: bytes
    key: str
    components: dict[str, str]
    cached: bool


def build_kernels(
    specs: Sequence[KernelSpec],
    target: Target,
    cache: GraphCache,
    num_jobs: int,
    on_kernel: Callable[[int, int], None],
) -> list[BuiltKernel]:
    """Builds each spec once, in the given order. Compilation is deterministic: a cached kernel has the same bytes."""
    built: dict[KernelSpec, BuiltKernel] = {}
    missing: dict[KernelSpec, tuple[str, dict[str, str]]] = {}
    for spec in specs:
        components = keys.kernel_components(spec, target)
        key = key_of(components)
        code = cache.get(key)
        if code is None:
            missing[spec] = (key, components)
        else:
            built[spec] = BuiltKernel(spec, code, key, components, cached=True)
    on_kernel(len(built), len(specs))
    # Without a name of the interpreter (inside another program) none can be started.
    workers = min(num_jobs, len(missing) // _MIN_KERNELS_A_PROCESS) if sys.executable else 1
    compiled: Generator[tuple[KernelSpec, bytes], None, None]
    if workers > 1:
        compiled = compile_kernels(list(missing), target, workers)
    else:
        compiled = ((spec, compile_kernel(spec, target)) for spec in missing)
    with closing(compiled):
        for spec, code in compiled:
            key, components = missing[spec]
            cache.put(key, code, components, {"symbol": spec.symbol()})
            built[spec] = BuiltKernel(spec, code, key, components, cached=False)
            on_kernel(len(built), len(specs))
    return [built[spec] for spec in specs]
