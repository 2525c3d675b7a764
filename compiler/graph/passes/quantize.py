"""Quantized linears: replaces their kernels, and gives them int8 activations or inputs in a weight's column order."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import Lowered
from llmc.compiler.graph.passes.rewrite import Rewriter, Step, steps_of, variables
from llmc.compiler.ops.adapters import ADAPTER_X
from llmc.compiler.ops.experts import EXPERTS, QUANTIZED, WEIGHTS
from llmc.compiler.ops.linear import GATED_LINEAR, QUANTIZE_ROWS, activated_width
from llmc.compiler.ops.permute import PERMUTE_COLUMNS
from llmc.compiler.ops.registry import get_op
from llmc.compiler.targets.base import Target
from llmc.quantize import Recipe, Scheme
from llmc.quantize.formats.base import Sums

_BY_ROWS = ("weight", "bias")
"""Tensors of a linear with one row per output element."""


def quantize_linears(lowered: Lowered, recipe: Recipe, target: Target) -> Lowered:
    """Switches to quantized kernels: linears in `recipe`, experts, and an embedding tied to such a weight.

    An activation read only by int8 linears of equal groups is written as int8 if its op can. Otherwise a
    `quantize_rows` is inserted. A `permute_columns` is inserted before a linear with a permuted weight.

    Raises CompileError if an act-order weight is not permuted and its input is not produced in that order for it alone.
    """
    main = lowered.module["main"]
    names = dict(zip(main.params, lowered.params, strict=True))
    schemes = {param: recipe.schemes[name] for param, name in names.items() if name in recipe.schemes}
    permuted = {param for param, name in names.items() if name in recipe.permuted}
    steps = steps_of(lowered)
    _check_makers(steps, main.body.body, names, recipe)
    _check_experts(steps, names, recipe)
    int8 = _int8_producers(steps, main.body.body, schemes, permuted)
    return _Quantizer(lowered, schemes, permuted, int8, target).run(steps)


def _scheme(step: Step, schemes: dict[relax.Var, Scheme]) -> Scheme | None:
    """The scheme of the weight that an op reads; None if it is not quantized."""
    if step.site is None or get_op(step.site.op).quantized is None:
        return None
    return schemes.get(step.tensors["weight"])


def _int8_sums(scheme: Scheme) -> Sums | None:
    """The sums that int8 activations carry for this scheme; None if its activations are not int8."""
    return scheme.weight.sums if scheme.act_bits == 8 else None


def _attributes(sums: Sums) -> dict[str, int]:
    """Attributes of a site that writes an int8 activation."""
    return {"int8_group_size": sums.group_size, "int8_sum_factor": sums.factor}


def _check_makers(steps: list[Step], output: relax.Expr, names: dict[relax.Var, str], recipe: Recipe) -> None:
    """Checks `recipe.rows_of`: each weight in it must feed exactly one linear, in whose column order its rows are
    stored."""
    makers = {step.var: step for step in steps if step.site is not None and step.site.op == GATED_LINEAR.name}
    readers = Counter(var for step in steps for var in variables(step.value)) + Counter(variables(output))
    left = set(recipe.rows_of)
    for step in steps:
        if step.site is not None and step.site.op == EXPERTS.name:
            # The outputs of an expert's gate and up are read by its down alone.
            if names.get(step.tensors["down"]) in recipe.rows_of.values():
                made = (names.get(step.tensors[t]) for t in ("gate_up", "gate_up_bias") if t in step.tensors)
                left.difference_update(name for name in made if name is not None)
            continue
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


def _check_experts(steps: list[Step], names: dict[relax.Var, str], recipe: Recipe) -> None:
    """Raises CompileError if an expert's down is in act-order and nothing produces its input in that order."""
    for step in steps:
        if step.site is None or step.site.op != EXPERTS.name:
            continue
        if (name := names.get(step.tensors["down"])) in recipe.permuted:
            raise CompileError(
                f"{name} is in act-order, in which nothing makes its input; take a checkpoint that was quantized "
                "without desc_act, or compile without --lora-slots"
            )


def _int8_producers(
    steps: list[Step], output: relax.Expr, schemes: dict[relax.Var, Scheme], permuted: set[relax.Var]
) -> dict[relax.Var, Sums]:
    """Activations that their ops can write as int8, with the sums each carries."""
    wanted: dict[relax.Var, set[Sums | None]] = defaultdict(set)
    wanted[output].add(None)
    for step in steps:
        scheme = _scheme(step, schemes)
        for var in variables(step.value):
            # An embedding has no x. Relax returns equal but not identical variables on each access.
            reads = var == step.tensors.get("x") and step.tensors.get("weight") not in permuted
            wanted[var].add(_int8_sums(scheme) if scheme is not None and reads else None)
            # Adapters read a layer's input as floats.
            if var == step.tensors.get(ADAPTER_X):
                wanted[var].add(None)
    found = {}
    for step in steps:
        if step.site is not None and get_op(step.site.op).writes_int8 and len(wanted[step.var]) == 1:
            (sums,) = wanted[step.var]
            if sums is not None:
                found[step.var] = sums
    return found


class _Quantizer(Rewriter):
    def __init__(
        self,
        lowered: Lowered,
        schemes: dict[relax.Var, Scheme],
        permuted: set[relax.Var],
        int8: dict[relax.Var, Sums],
        target: Target,
    ) -> None:
        super().__init__(lowered)
        self._target = target
        self._schemes, self._permuted, self._int8 = schemes, permuted, int8
        self._ordered: dict[tuple[relax.Var, relax.Var], relax.Var] = {}
        self._quantized: dict[tuple[relax.Var, Sums], relax.Var] = {}

    def rewrite(self, step: Step) -> relax.Expr:
        if step.site is None:
            return self.replaced(step.value)
        scheme = _scheme(step, self._schemes)
        tensors = {name: self.replaced(tensor) for name, tensor in step.tensors.items()}
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
        return self.call(step.site, op, attributes, tensors, kind) if attributes else self.replaced(step.value)

    def _of_experts(self, step: Step) -> dict[str, Any]:
        """Attributes of an experts op: which of its weights are quantized, and how."""
        found = {}
        for weight in WEIGHTS:
            scheme = self._schemes.get(step.tensors[weight])
            if scheme is None:
                continue
            ordered = step.tensors[weight] in self._permuted
            found[weight] = {"format": scheme.weight.record(), "int8": _int8_sums(scheme) is not None}
            found[weight] |= {"ordered": True} if ordered else {}
        return {QUANTIZED: found} if found else {}

    def _in_order_of(self, linear: Step) -> relax.Expr:
        """The activation that `linear` reads, in the column order of its weight."""
        x, weight = linear.tensors["x"], linear.tensors["weight"]
        if (x, weight) not in self._ordered:
            site = Site(PERMUTE_COLUMNS.name, {}, ("x", "weight"))
            tensors = {"x": self.replaced(x), "weight": weight}
            call = self.call(site, site.op, _of_rows(linear), tensors, x.ty)
            self._ordered[x, weight] = self.builder.emit(call)
        return self._ordered[x, weight]

    def _int8_of(self, linear: Step, x: relax.Expr, sums: Sums) -> relax.Expr:
        """The int8 form of `x`, the input of `linear`."""
        if linear.tensors["x"] in self._int8:
            return x
        if (x, sums) not in self._quantized:
            attributes = {**_attributes(sums), **_of_rows(linear)}
            site = Site(QUANTIZE_ROWS.name, {}, ("x",))
            kind = self._int8_type(x, attributes["widths"]["x"], sums)
            self._quantized[x, sums] = self.builder.emit(self.call(site, site.op, attributes, {"x": x}, kind))
        return self._quantized[x, sums]

    def _int8_type(self, x: relax.Var, width: int, sums: Sums) -> relax.TensorType:
        """Type of int8 rows: words that hold `width` numbers, their scale and sums."""
        words = self._target.int8_row_words(width, sums.groups(width))
        return relax.TensorType((x.ty.shape[0], words), "int32")


def _of_rows(linear: Step) -> dict[str, Any]:
    """Attributes of an op inserted before a linear, between it and its former input."""
    assert linear.site is not None
    width = int(linear.site.attributes["weight_shapes"]["weight"][1])
    return {"widths": {"x": width}, "on_samples": linear.site.attributes["on_samples"]}


def _width(step: Step) -> int:
    """Elements in a row that an int8-writing op makes."""
    assert step.site is not None
    if step.site.op == "rms_norm":
        return int(step.site.attributes["widths"]["x"])
    return activated_width(step.site)
