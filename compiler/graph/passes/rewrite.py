"""Shared by passes over a lowered model: lists main's bindings, and builds a new main from their replacements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tvm import relax

from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered


@dataclass(frozen=True)
class Step:
    """A binding of main. site, tensors: of the called llmc op; None and empty for anything else."""

    var: relax.Var
    value: relax.Expr
    site: Site | None
    tensors: dict[str, relax.Expr]


def steps_of(lowered: Lowered) -> list[Step]:
    """The bindings of main in order."""
    blocks = lowered.module["main"].body.blocks
    return [_step(binding, lowered) for block in blocks for binding in block.bindings]


def _step(binding: relax.Binding, lowered: Lowered) -> Step:
    call = binding.value
    if isinstance(call, relax.Call) and isinstance(call.args[0] if call.args else None, relax.ExternFunc):
        name = str(call.args[0].global_symbol)
        if name.startswith(SITE_PREFIX):
            site = lowered.sites[int(name.removeprefix(SITE_PREFIX))]
            return Step(binding.var, call, site, dict(zip(site.tensors, call.args[1].fields, strict=True)))
    return Step(binding.var, call, None, {})


def variables(expr: relax.Expr) -> list[relax.Var]:
    """The variables that a bound expression reads."""
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Tuple):
        return [v for field in expr.fields for v in variables(field)]
    if isinstance(expr, relax.TupleGetItem):
        return variables(expr.tuple_value)
    return [v for argument in expr.args for v in variables(argument)] if isinstance(expr, relax.Call) else []


class Rewriter(ABC):
    """Builds a new main. `rewrite` returns the replacement of a binding; it may emit further bindings with `builder`
    first."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered, self._main = lowered, lowered.module["main"]
        self.sites = list(lowered.sites)
        self.builder = relax.BlockBuilder()
        self._new: dict[relax.Var, relax.Expr] = {}

    @abstractmethod
    def rewrite(self, step: Step) -> relax.Expr:
        """The replacement of a binding's value."""

    def run(self, steps: list[Step], added: Mapping[str, relax.Var] = MappingProxyType({})) -> Lowered:
        """The model with its steps rewritten. added: further weights that they read, by name."""
        with self.builder.function("main", [*self._main.params, *added.values()]):
            with self.builder.dataflow():
                for step in steps:
                    self._new[step.var] = self.builder.emit(self.rewrite(step))
                output = self.builder.emit_output(self.replaced(self._main.body.body))
            self.builder.emit_func_output(output)
        module = self._lowered.module.clone()
        module["main"] = self.builder.get()["main"].with_attrs(self._main.attrs or {})
        params = (*self._lowered.params, *added)
        return replace(self._lowered, module=module, sites=tuple(self.sites), params=params)

    def replaced(self, expr: relax.Expr) -> relax.Expr:
        """An expression of the old main, rewritten in the new variables."""
        if isinstance(expr, relax.Var):
            return self._new.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.replaced(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self.replaced(expr.tuple_value), expr.index)
        if isinstance(expr, relax.Call):
            return relax.Call(expr.op, [self.replaced(a) for a in expr.args], expr.attrs, expr.ty_args)
        return expr

    def call(
        self,
        site: Site,
        op: str,
        attributes: Mapping[str, Any],
        tensors: Mapping[str, relax.Expr],
        kind: relax.TensorType,
    ) -> relax.Call:
        """A call of `op` at a new site, whose attributes are those of `site` updated with `attributes`."""
        self.sites.append(Site(op, {**site.attributes, **attributes}, tuple(tensors)))
        return relax.call_dps_packed(f"{SITE_PREFIX}{len(self.sites) - 1}", list(tensors.values()), kind)
