"""Quantized linears: sites of other kernels, and activations as they read them: int8, or in the order of a weight."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.ops.experts import EXPERTS, QUANTIZED, WEIGHTS
from llmc.compiler.ops.linear import GATED_LINEAR, QUANTIZE_ROWS
from llmc.compiler.ops.permute import PERMUTE_COLUMNS
from llmc.compiler.ops.registry import get_op
from llmc.compiler.targets.base import Target
from llmc.quantize import Recipe, Scheme
from llmc.quantize.formats.base import Sums

_BY_ROWS = ("weight", "bias")
"""Tensors of a linear that have a row for each element that it makes."""


@dataclass(frozen=True)
class _Step:
    """A binding of main. site, tensors: of the llmc op it calls, None and nothing for anything else."""

    var: relax.Var
    value: relax.Expr
    site: Site | None
    tensors: dict[str, relax.Expr]


def quantize_linears(lowered: Lowered, recipe: Recipe, target: Target) -> Lowered:
    """Gives the linears whose weights are in `recipe`, experts, and an embedding that shares such a weight, quantized
    kernels.

    An activation that only int8 linears with equal groups read is made as int8, where the op that makes it can;
    otherwise a `quantize_rows` goes between. A `permute_columns` goes before a linear whose weight is permuted. Raises
    CompileError where the input of a weight in act-order that is not permuted is not made in its order, for it alone.
    """
    main = lowered.module["main"]
    names = dict(zip(main.params, lowered.params, strict=True))
    schemes = {param: recipe.schemes[name] for param, name in names.items() if name in recipe.schemes}
    permuted = {param for param, name in names.items() if name in recipe.permuted}
    steps = [_step(binding, lowered) for block in main.body.blocks for binding in block.bindings]
    _check_makers(steps, main.body.body, names, recipe)
    _check_experts(steps, names, recipe)
    int8 = _int8_producers(steps, main.body.body, schemes, permuted)
    rewriter = _Rewriter(lowered, main, schemes, permuted, int8, target)
    module = lowered.module.clone()
    module["main"] = rewriter.run(steps)
    return replace(lowered, module=module, sites=tuple(rewriter.sites))


def _step(binding: relax.Binding, lowered: Lowered) -> _Step:
    call = binding.value
    if isinstance(call, relax.Call) and isinstance(call.args[0] if call.args else None, relax.ExternFunc):
        name = str(call.args[0].global_symbol)
        if name.startswith(SITE_PREFIX):
            site = lowered.sites[int(name.removeprefix(SITE_PREFIX))]
            return _Step(binding.var, call, site, dict(zip(site.tensors, call.args[1].fields, strict=True)))
    return _Step(binding.var, call, None, {})


def _variables(expr: relax.Expr) -> list[relax.Var]:
    """The variables that a bound expression reads."""
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Tuple):
        return [v for field in expr.fields for v in _variables(field)]
    if isinstance(expr, relax.TupleGetItem):
        return _variables(expr.tuple_value)
    return [v for argument in expr.args for v in _variables(argument)] if isinstance(expr, relax.Call) else []


def _scheme(step: _Step, schemes: dict[relax.Var, Scheme]) -> Scheme | None:
    """The scheme of the weight that an op reads, None for what is not quantized."""
    if step.site is None or get_op(step.site.op).quantized is None:
        return None
    return schemes.get(step.tensors["weight"])


def _int8_sums(scheme: Scheme) -> Sums | None:
    """How the int8 activations of a scheme that has them are summed."""
    return scheme.weight.sums if scheme.act_bits == 8 else None


def _attributes(sums: Sums) -> dict[str, int]:
    """Of the site that makes an int8 activation."""
    return {"int8_group_size": sums.group_size, "int8_sum_factor": sums.factor}


def _check_makers(steps: list[_Step], output: relax.Expr, names: dict[relax.Var, str], recipe: Recipe) -> None:
    """The rows of whatever is in `recipe.rows_of` are in the order in which one linear reads what they make."""
    makers = {step.var: step for step in steps if step.site is not None and step.site.op == GATED_LINEAR.name}
    readers = Counter(var for step in steps for var in _variables(step.value)) + Counter(_variables(output))
    left = set(recipe.rows_of)
    for step in steps:
        weight = names.get(step.tensors["weight"]) if "weight" in step.tensors else None
        if weight not in recipe.rows_of.values():
            continue
        x = step.tensors.get("x")
        made_of = (
            [] if x not in makers else [names.get(makers[x].tensors[t]) for t in _BY_ROWS if t in makers[x].tensors]
        )
        if not made_of or readers[x] > 1 or any(recipe.rows_of.get(str(name)) != weight for name in made_of):
            raise CompileError(
                f"the weight map says that rows of {', '.join(n for n, of in recipe.rows_of.items() if of == weight)} "
                f"are columns of {weight} and of nothing else, which is not so in the graph; mend `makes` of the family"
            )
        left.difference_update(map(str, made_of))
    if left:
        raise CompileError(
            f"{min(left)} makes nothing that {recipe.rows_of[min(left)]} reads; mend `makes` of the family"
        )


def _check_experts(steps: list[_Step], names: dict[relax.Var, str], recipe: Recipe) -> None:
    """Kernels of experts read their weights in the order of the model."""
    for step in steps:
        for weight in WEIGHTS if step.site is not None and step.site.op == EXPERTS.name else ():
            if (name := names.get(step.tensors[weight])) in recipe.act_order:
                raise CompileError(
                    f"{name} is in act-order, which experts are not read in; take a checkpoint that was quantized "
                    "without desc_act"
                )


def _int8_producers(
    steps: list[_Step], output: relax.Expr, schemes: dict[relax.Var, Scheme], permuted: set[relax.Var]
) -> dict[relax.Var, Sums]:
    """The activations that are made as int8, and how they are summed."""
    wanted: dict[relax.Var, set[Sums | None]] = defaultdict(set)
    wanted[output].add(None)
    for step in steps:
        scheme = _scheme(step, schemes)
        for var in _variables(step.value):
            # An embedding has no x; variables are equal, not identical, each time they are asked for.
            reads = var == step.tensors.get("x") and step.tensors.get("weight") not in permuted
            wanted[var].add(_int8_sums(scheme) if scheme is not None and reads else None)
    found = {}
    for step in steps:
        if step.site is not None and get_op(step.site.op).writes_int8 and len(wanted[step.var]) == 1:
            (sums,) = wanted[step.var]
            if sums is not None:
                found[step.var] = sums
    return found


class _Rewriter:
    def __init__(
        self,
        lowered: Lowered,
        main: relax.Function,
        schemes: dict[relax.Var, Scheme],
        permuted: set[relax.Var],
        int8: dict[relax.Var, Sums],
        target: Target,
    ) -> None:
        self._target = target
        self.sites = list(lowered.sites)
        self._main, self._schemes, self._permuted, self._int8 = main, schemes, permuted, int8
        self._new: dict[relax.Var, relax.Expr] = {}
        self._ordered: dict[tuple[relax.Var, relax.Var], relax.Var] = {}
        self._quantized: dict[tuple[relax.Var, Sums], relax.Var] = {}
        self._builder = relax.BlockBuilder()

    def run(self, steps: list[_Step]) -> relax.Function:
        with self._builder.function("main", list(self._main.params)):
            with self._builder.dataflow():
                for step in steps:
                    self._new[step.var] = self._builder.emit(self._rewrite(step))
                output = self._builder.emit_output(self._replaced(self._main.body.body))
            self._builder.emit_func_output(output)
        return self._builder.get()["main"].with_attrs(self._main.attrs or {})

    def _replaced(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self._new.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._replaced(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._replaced(expr.tuple_value), expr.index)
        if isinstance(expr, relax.Call):
            return relax.Call(expr.op, [self._replaced(a) for a in expr.args], expr.attrs, expr.ty_args)
        return expr

    def _rewrite(self, step: _Step) -> relax.Expr:
        if step.site is None:
            return self._replaced(step.value)
        scheme = _scheme(step, self._schemes)
        tensors = {name: self._replaced(tensor) for name, tensor in step.tensors.items()}
        op, kind, attributes = step.site.op, step.var.ty, dict[str, Any]()
        if scheme is not None:
            op, sums = get_op(op).quantized or op, _int8_sums(scheme)
            attributes |= {"format": scheme.weight.record(), "int8": sums is not None}
            if step.tensors["weight"] in self._permuted:
                tensors["x"] = self._in_order_of(step)
            if get_op(step.site.op).reads_int8 and sums is not None:
                tensors["x"] = self._int8_of(step, tensors["x"], sums)
        if step.site.op == EXPERTS.name:
            attributes |= self._of_experts(step)
        if step.var in self._int8:
            written = self._int8[step.var]
            attributes |= _attributes(written)
            kind = self._int8_type(step.var, _width(step), written)
        return self._call(step.site, op, attributes, tensors, kind) if attributes else self._replaced(step.value)

    def _of_experts(self, step: _Step) -> dict[str, Any]:
        """Which weights are quantized, and how."""
        found = {}
        for weight in WEIGHTS:
            scheme = self._schemes.get(step.tensors[weight])
            if scheme is None:
                continue
            found[weight] = {"format": scheme.weight.record(), "int8": _int8_sums(scheme) is not None}
        return {QUANTIZED: found} if found else {}

    def _in_order_of(self, linear: _Step) -> relax.Expr:
        """The activation that `linear` reads, in the order of the columns of its weight."""
        x, weight = linear.tensors["x"], linear.tensors["weight"]
        if (x, weight) not in self._ordered:
            site = Site(PERMUTE_COLUMNS.name, {}, ("x", "weight"))
            tensors = {"x": self._replaced(x), "weight": weight}
            call = self._call(site, site.op, _of_rows(linear), tensors, x.ty)
            self._ordered[x, weight] = self._builder.emit(call)
        return self._ordered[x, weight]

    def _int8_of(self, linear: _Step, x: relax.Expr, sums: Sums) -> relax.Expr:
        """The int8 form of `x`, which is the activation that `linear` reads."""
        if linear.tensors["x"] in self._int8:
            return x
        if (x, sums) not in self._quantized:
            attributes = {**_attributes(sums), **_of_rows(linear)}
            site = Site(QUANTIZE_ROWS.name, {}, ("x",))
            kind = self._int8_type(x, attributes["widths"]["x"], sums)
            self._quantized[x, sums] = self._builder.emit(self._call(site, site.op, attributes, {"x": x}, kind))
        return self._quantized[x, sums]

    def _int8_type(self, x: relax.Var, width: int, sums: Sums) -> relax.TensorType:
        """Words of rows of `width` numbers, with their scale and sums."""
        words = self._target.int8_row_words(width, sums.groups(width))
        return relax.TensorType((x.ty.shape[0], words), "int32")

    def _call(
        self, site: Site, op: str, attributes: dict[str, Any], tensors: dict[str, relax.Expr], kind: relax.TensorType
    ) -> relax.Call:
        self.sites.append(Site(op, {**site.attributes, **attributes}, site.tensors))
        return relax.call_dps_packed(f"{SITE_PREFIX}{len(self.sites) - 1}", list(tensors.values()), kind)


def _of_rows(linear: _Step) -> dict[str, Any]:
    """Attributes of a site that makes what a linear reads of what it read before."""
    assert linear.site is not None
    width = int(linear.site.attributes["weight_shapes"]["weight"][1])
    return {"widths": {"x": width}, "on_samples": linear.site.attributes["on_samples"]}


def _width(step: _Step) -> int:
    """Elements of a row of what an op that writes int8 makes."""
    assert step.site is not None
    if step.site.op == "rms_norm":
        return int(step.site.attributes["widths"]["x"])
    return int(step.site.attributes["weight_shapes"]["weight"][0]) // 2
