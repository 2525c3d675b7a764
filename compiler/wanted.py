"""The cache entries a compilation would look for, without compiling anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from llmc.compiler.cache import GraphCache, key_of
from llmc.compiler.config import CompileConfig


@dataclass(frozen=True)
class Wanted:
    """Something a compilation needs: what people call it, and what its key is made of."""

    name: str
    components: dict[str, str]

    @property
    def key(self) -> str:
        return key_of(self.components)


def wanted_entries(config: CompileConfig, cache: GraphCache) -> list[Wanted]:
    """Graphs, then the kernels of those graphs that the cache has (the others' kernels are not known before a trace).

    Raises what `pipeline.resolve` raises for a bad model.
    """
    from llmc.compiler.build import kernel_components
    from llmc.compiler.pipeline import graph_components, resolve
    from llmc.compiler.plan import from_json, graph_shape
    from llmc.compiler.templates import GraphParams

    resolved = resolve(config)
    params = GraphParams(
        target=resolved.target,
        row_tile=0,
        sample_row_tile=0,
        act_dtype=resolved.act_dtype,
        kv_dtype=resolved.kv_dtype,
        block_size=resolved.block_size,
        packed_embedding=resolved.model.tie_word_embeddings,
    )
    common = graph_components(resolved, params)
    graphs: dict[str, Wanted] = {}
    for bucket in resolved.ladder:
        shape = asdict(graph_shape(bucket, params))
        wanted = Wanted(str(bucket), {**common, **{f"shape.{name}": str(value) for name, value in shape.items()}})
        graphs.setdefault(wanted.key, wanted)
    specs = set()
    for key in graphs:
        payload = cache.get(key)
        if payload is not None:
            specs |= {command.spec for command in from_json(payload).commands}
    kernels = [Wanted(s.symbol(), kernel_components(s, resolved.target)) for s in specs]
    return [*graphs.values(), *sorted(kernels, key=lambda w: w.name)]
