"""Kernel specs → machine code: from the cache, or compiled, in several processes if there are many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.store import keys
from llmc.compiler.store.cache import GraphCache, key_of
from llmc.compiler.targets.base import Target
from llmc.compiler.workers import Variant, compile_kernels

__all__ = ["BuiltKernel", "Variant", "build_kernels", "build_variants"]

_MIN_KERNELS_A_PROCESS = 8


@dataclass(frozen=True)
class BuiltKernel:
    """One kernel's object file, and the components of its cache key."""

    spec: KernelSpec
    code: bytes
    key: str
    components: dict[str, str]
    cached: bool

    def described(self) -> dict[str, object]:
        """The kernel's entry in the manifest."""
        return {"symbol": self.spec.symbol(), "op": self.spec.op, "key": self.key, "components": self.components}


def build_kernels(
    specs: Sequence[KernelSpec],
    target: Target,
    cache: GraphCache,
    num_jobs: int,
    on_kernel: Callable[[int, int], None],
    variants: Mapping[KernelSpec, str] | None = None,
) -> list[BuiltKernel]:
    """Builds each spec once, in the given order. variants: of kernels with a non-default schedule."""
    of = variants or {}
    return build_variants([(spec, of.get(spec)) for spec in specs], target, cache, num_jobs, on_kernel)


def build_variants(
    variants: Sequence[Variant],
    target: Target,
    cache: GraphCache,
    num_jobs: int,
    on_kernel: Callable[[int, int], None],
) -> list[BuiltKernel]:
    """Builds distinct variants, in the given order. Compilation is deterministic: cached code has the same bytes."""
    built: dict[Variant, BuiltKernel] = {}
    missing: dict[Variant, tuple[str, dict[str, str]]] = {}
    for variant in variants:
        components = keys.kernel_components(variant[0], target, variant[1])
        key = key_of(components)
        code = cache.get(key)
        if code is None:
            missing[variant] = (key, components)
        else:
            built[variant] = BuiltKernel(variant[0], code, key, components, cached=True)
    on_kernel(len(built), len(variants))
    # Inside another program, without an interpreter's path, no worker can be started.
    workers = min(num_jobs, len(missing) // _MIN_KERNELS_A_PROCESS) if sys.executable else 1
    compiled: Generator[tuple[Variant, bytes], None, None]
    if workers > 1:
        compiled = compile_kernels(list(missing), target, workers)
    else:
        compiled = ((variant, target.compile(*variant)) for variant in missing)
    with closing(compiled):
        for variant, code in compiled:
            key, components = missing[variant]
            cache.put(key, code, components, {"symbol": variant[0].symbol()})
            built[variant] = BuiltKernel(variant[0], code, key, components, cached=False)
            on_kernel(len(built), len(variants))
    return [built[variant] for variant in variants]
