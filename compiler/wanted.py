"""The cache entries that a compilation would look up, found without compiling."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.config import CompileConfig
from llmc.compiler.graph.demands import kernels_of
from llmc.compiler.graph.plan import from_json, needed_graphs
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.resolve import resolve
from llmc.compiler.store import keys
from llmc.compiler.store.cache import GraphCache, key_of


@dataclass(frozen=True)
class Wanted:
    """A result that a compilation needs: its display name, and its key's components."""

    name: str
    components: dict[str, str]

    @property
    def key(self) -> str:
        return key_of(self.components)


def wanted_entries(config: CompileConfig, cache: GraphCache) -> list[Wanted]:
    """Graphs, the trace, then the kernels of cached graphs; those of other graphs are not known yet.

    The trace is included only if a graph is missing. Raises what `resolve` raises for a bad model.
    """
    resolved = resolve(config)
    needed = needed_graphs(list(resolved.ladder), resolved.graph_params(), resolved.graph_components())
    graphs = [Wanted(str(bucket), components) for bucket, components in needed.values()]
    specs: set[KernelSpec] = set()
    for graph in graphs:
        payload = cache.get(graph.key)
        if payload is not None:
            specs |= kernels_of([from_json(payload)])
    kernels = [Wanted(s.symbol(), keys.kernel_components(s, resolved.target)) for s in specs]
    return [*graphs, Wanted("trace", resolved.trace_components()), *sorted(kernels, key=lambda w: w.name)]
