"""The model, traced once and lowered, for graphs that the cache lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmc.buckets import Bucket
from llmc.compiler.graph.commands import CommandList, GraphShape, Site
from llmc.compiler.graph.plan import needed_graphs
from llmc.compiler.ops.abilities import check_ops, check_schemes
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.resolved import Resolved
from llmc.compiler.store.cache import GraphCache, key_of
from llmc.tvm_import import import_tvm

if TYPE_CHECKING:
    from llmc.compiler.graph.export import Exported
    from llmc.compiler.graph.line import Line
    from llmc.compiler.graph.lowered import Lowered


class Tracer:
    """Binds graphs that the cache lacks. Traces and lowers the model once, and caches the lowered model."""

    def __init__(self, resolved: Resolved, cache: GraphCache, *, fresh: bool = False) -> None:
        """fresh: trace even if the lowered model is cached, so that every phase can be shown."""
        self._resolved = resolved
        self._cache = cache
        self._fresh = fresh
        self._lowered: Lowered | None = None
        self._line: Line | None = None
        self.exported: Exported | None = None
        """What was traced by this object."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Traces the model, or reads it from the cache, if the cache lacks a graph of `buckets`.

        Raises CompileError before a trace for a scheme that the target lacks, and behind it for an op.
        """
        resolved = self._resolved
        needed = needed_graphs(buckets, resolved.graph_params(), resolved.graph_components())
        if self._fresh or not all(self._cache.has(key_of(components)) for _, components in needed.values()):
            check_schemes(resolved.target, resolved.act_dtype, {*resolved.recipe.schemes.values()})
            self._lowered = self._adapted(self._lower())
            check_ops(resolved.target, resolved.act_dtype, (site.op for site in self._lowered.sites))

    def bind(self, shape: GraphShape, params: GraphParams) -> CommandList:
        from llmc.compiler.graph.emit import emit
        from llmc.compiler.graph.line import read_line
        from llmc.compiler.graph.norms import join_norms
        from llmc.compiler.graph.rotations import join_rotations

        if self._line is None:
            self._line = read_line(self.lowered)
        line, sites = join_norms(self._line, self.lowered.sites, params)
        line, sites = join_rotations(line, sites, params)
        return emit(line, replace(self.lowered, sites=sites), params, self._resolved.first_layers)

    def sites(self) -> list[Site]:
        """The ops of the graphs, one site per call."""
        from llmc.compiler.graph.line import read_line

        if self._line is None:
            self._line = read_line(self.lowered)
        return [self.lowered.sites[step.site] for step in self._line.steps if step.site is not None]

    @property
    def lowered(self) -> Lowered:
        """The lowered model, after the passes that the configuration asks for."""
        if self._lowered is None:
            # A cache entry was damaged.
            self._lowered = self._adapted(self._lower())
        return self._lowered

    def _adapted(self, lowered: Lowered) -> Lowered:
        """Applies tensor parallelism, adapter pools and quantization, as configured."""
        limits, partition = self._resolved.adapters, self._resolved.partition
        if partition is not None:
            from llmc.compiler.graph.passes.parallel import join_ranks

            lowered = join_ranks(lowered, partition)
        if limits is not None:
            from llmc.compiler.graph.passes.adapters import add_adapters

            lowered = add_adapters(lowered, self._resolved.adapter_linears(), limits)
        return self._quantized(lowered)

    def _quantized(self, lowered: Lowered) -> Lowered:
        if not self._resolved.recipe.schemes:
            return lowered
        from llmc.compiler.graph.passes.quantize import quantize_linears

        return quantize_linears(lowered, self._resolved.recipe, self._resolved.target)

    def _lower(self) -> Lowered:
        components = self._resolved.trace_components()
        key = key_of(components)
        payload = None if self._fresh else self._cache.get(key)
        if payload is not None:
            import_tvm()
            from llmc.compiler.graph.lowered import from_bytes

            return from_bytes(payload)
        lowered = self._trace()
        from llmc.compiler.graph.lowered import to_bytes

        payload = to_bytes(lowered)
        if payload is not None:
            self._cache.put(key, payload, components, {"model_type": self._resolved.model.model_type})
        return lowered

    def _trace(self) -> Lowered:
        # Import torch first: TVM binds to it when both are present.
        import torch

        from llmc.compiler.graph.export import export_model
        from llmc.compiler.graph.lower import lower
        from llmc.models.registry import build_model

        with torch.device("meta"):
            model = build_model(self._resolved.rank_model, self._resolved.act_dtype, self._resolved.max_model_len)
        self.exported = export_model(model)
        return lower(self.exported)
