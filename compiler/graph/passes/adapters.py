"""LoRA adapters: gives linears a pool of adapters. Adapters are added before an activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import relax

from llmc.compiler.adapters import AdapterLimits, AdapterLinear, pool_name
from llmc.compiler.dtypes import F32
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import Lowered
from llmc.compiler.graph.passes.rewrite import Rewriter, Step, steps_of
from llmc.compiler.ops.activate import ACTIVATE, NO_ACTIVATION
from llmc.compiler.ops.adapters import ADAPTER_X, ADAPTERS
from llmc.compiler.ops.embedding import EMBEDDING
from llmc.compiler.ops.experts import EXPERTS, WEIGHTS
from llmc.compiler.ops.latent import HEAD_LINEAR, PACKED_HEAD_LINEAR
from llmc.compiler.ops.linear import ACTIVATED_LINEAR, GATED_LINEAR, LINEAR

_LINEARS = (LINEAR.name, ACTIVATED_LINEAR.name, GATED_LINEAR.name)
_HEAD_LINEARS = (HEAD_LINEAR.name, PACKED_HEAD_LINEAR.name)


def add_adapters(lowered: Lowered, linears: Mapping[str, AdapterLinear], limits: AdapterLimits) -> Lowered:
    """Gives an adapter pool to every linear in `linears` (pool name → adapter), to experts, heads and the embedding.

    Must run before other passes: adapters read the activations that the model computes.
    """
    return _Adapter(lowered, linears, limits).run(steps_of(lowered))


class _Adapter(Rewriter):
    def __init__(self, lowered: Lowered, linears: Mapping[str, AdapterLinear], limits: AdapterLimits) -> None:
        super().__init__(lowered)
        self._names = dict(zip(lowered.module["main"].params, lowered.params, strict=True))
        self._linears, self._limits = linears, limits

    def _linear(self, weight: relax.Var, *, table: bool = False) -> AdapterLinear | None:
        return self._linears.get(pool_name(self._names.get(weight, ""), table=table))

    def rewrite(self, step: Step) -> relax.Expr:
        site = step.site
        if site is not None and site.op == EXPERTS.name:
            return self._experts(step, site)
        if site is not None and site.op == EMBEDDING.name:
            return self._embedding(step, site)
        if site is not None and site.op in _HEAD_LINEARS:
            return self._heads(step, site)
        if site is None or site.op not in _LINEARS:
            return self.replaced(step.value)
        linear = self._linear(step.tensors["weight"])
        if linear is None:
            return self.replaced(step.value)
        tensors = {name: self.replaced(tensor) for name, tensor in step.tensors.items()}
        tensors[ADAPTER_X] = tensors["x"]
        attributes = {ADAPTERS: self._pool(linear)}
        kind = relax.TensorType((step.var.ty.shape[0], sum(linear.rows)), F32.long_name)
        made = self.call(site, LINEAR.name, attributes, tensors, kind)
        if site.op == LINEAR.name:
            return made
        of_linear = {"activation": site.attributes["activation"], "gated": site.op == GATED_LINEAR.name}
        return self._activate(step, site, made, sum(linear.rows), of_linear)

    def _activate(
        self, step: Step, site: Site, made: relax.Call, width: int, of_linear: Mapping[str, Any]
    ) -> relax.Expr:
        """The packed result of a step, from the sums of `width` that `made` gives."""
        of_rows = {"widths": {"x": width}, "on_samples": site.attributes["on_samples"]}
        last = Site(ACTIVATE.name, {**of_rows, **of_linear}, ("x",))
        return self.call(last, last.op, {}, {"x": self.builder.emit(made)}, step.var.ty)

    def _heads(self, step: Step, site: Site) -> relax.Expr:
        linear = self._linear(step.tensors["weight"])
        if linear is None or linear.heads is None:
            return self.replaced(step.value)
        tensors = {name: self.replaced(tensor) for name, tensor in step.tensors.items()}
        width = linear.heads.count * sum(linear.rows)
        kind = relax.TensorType((step.var.ty.shape[0], width), F32.long_name)
        made = self.call(site, HEAD_LINEAR.name, {ADAPTERS: self._pool(linear)}, tensors, kind)
        if site.op == HEAD_LINEAR.name:
            return made
        return self._activate(step, site, made, width, {"activation": NO_ACTIVATION, "gated": False})

    def _pool(self, linear: AdapterLinear) -> dict[str, Any]:
        found: dict[str, Any] = {"experts": linear.experts} if linear.experts else {}
        found |= {"table": True} if linear.table else {}
        found |= {"heads": linear.heads.count, "own": linear.heads.own} if linear.heads else {}
        sizes = {"columns": linear.columns, "rows": list(linear.rows)}
        return {**sizes, "rank": self._limits.rank, "slots": self._limits.slots, **found}

    def _embedding(self, step: Step, site: Site) -> relax.Expr:
        linear = self._linear(step.tensors["weight"], table=True)
        if linear is None:
            return self.replaced(step.value)
        tensors = {name: self.replaced(tensor) for name, tensor in step.tensors.items()}
        return self.call(site, site.op, {ADAPTERS: self._pool(linear)}, tensors, step.var.ty)

    def _experts(self, step: Step, site: Site) -> relax.Expr:
        found = {weight: self._linear(step.tensors[weight]) for weight in WEIGHTS}
        pools = {weight: self._pool(linear) for weight, linear in found.items() if linear is not None}
        if len(pools) < len(WEIGHTS):
            return self.replaced(step.value)
        tensors = {name: self.replaced(tensor) for name, tensor in step.tensors.items()}
        return self.call(site, site.op, {ADAPTERS: pools}, tensors, step.var.ty)
