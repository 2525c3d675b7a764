"""Generic ops: legalised to TIR by TVM, fused, and checked to be functions of single rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tvm
from tvm import relax, tirx

from llmc.compiler.config import CompileError
from llmc.compiler.graph.lowered import SITE_PREFIX
from llmc.compiler.graph.passes.rowwise import RowwiseError, is_cheap_to_join, row_program, rows_of
from llmc.graphs_format import MAX_BUFFERS

PROGRAM = "llmc.row_program"
"""Attribute of a fused PrimFunc: its row program, as JSON."""
NAME = "llmc.name"
"""Attribute of a fused PrimFunc: the names of its ops, for display."""
_ROWS = "llmc.rows"
_INJECTIVE = 2
_FUSE_DEPTHS = (256, 8, 4, 2, 1)
_MAX_NAME = 60

Describe = Callable[[str], str]
"""Maps a variable of the imported module to a description of the op that made it."""


def calls_of_tir(main: relax.Function) -> Iterator[tuple[relax.Var, relax.Call]]:
    """Bindings of `main` that call a PrimFunc."""
    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.op == tvm.ir.Op.get("relax.call_tir"):
                yield binding.var, call


def _constants(call: relax.Call) -> dict[int, float]:
    """Scalar arguments of a call, by position. Raises RowwiseError."""
    constants = {}
    for position, argument in enumerate(call.args[1].fields):
        if isinstance(argument, tvm.ir.GenericConst):
            value = argument.value.numpy()
            if value.ndim:
                raise RowwiseError(f"uses a constant tensor of shape {list(value.shape)}; register it as a buffer")
            constants[position] = float(value)
    return constants


def _program(module: tvm.IRModule, call: relax.Call, constants: dict[int, float]) -> dict[str, Any]:
    """The row program of the called function. Raises RowwiseError."""
    func = module[call.args[0]]
    return row_program(func, len(func.params) - len(call.args[1].fields), constants)


def _check(module: tvm.IRModule, describe: Describe) -> None:
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call) or value.op == tvm.ir.Op.get("relax.call_tir"):
                continue
            site = value.op == tvm.ir.Op.get("relax.call_dps_packed") and isinstance(value.args[0], relax.ExternFunc)
            if not site or not str(value.args[0].global_symbol).startswith(SITE_PREFIX):
                raise CompileError(f"{describe(binding.var.name)} has no form that works on single token rows")
    # Layers repeat, so most calls are of a function already checked.
    have_rows: dict[str, bool] = {}
    checked = set()
    for var, call in calls_of_tir(module["main"]):
        name = call.args[0].name_hint
        try:
            if name not in have_rows:
                have_rows[name] = rows_of(module[call.args[0]]) is not None
            if not have_rows[name]:
                continue
            constants = _constants(call)
            key = (name, tuple(constants.items()))
            if key not in checked:
                _program(module, call, constants)
            checked.add(key)
        except RowwiseError as error:
            raise CompileError(f"{describe(var.name)} {error}") from None


def _annotate(module: tvm.IRModule) -> tvm.IRModule:
    """Marks every function of rows fusable except large reductions; TVM alone would fuse only for loop nests."""
    module = relax.transform.AnnotateTIROpPattern()(module)
    inputs = {call.args[0].name_hint: len(call.args[1].fields) for _, call in calls_of_tir(module["main"])}
    for var, func in module.functions_items():
        if var.name_hint == "main":
            continue
        outputs = len(func.params) - inputs.get(var.name_hint, len(func.params) - 1)
        try:
            joined = rows_of(func) is None or is_cheap_to_join(row_program(func, outputs))
        except RowwiseError:
            continue
        if joined and int(func.attrs.get("op_pattern", 8)) > _INJECTIVE:
            module[var] = func.with_attr("op_pattern", _INJECTIVE)
    return module


def _fused(module: tvm.IRModule) -> tvm.IRModule:
    """Fuses ops, up to the number of buffers that a kernel can take."""
    module = _annotate(module)
    for depth in _FUSE_DEPTHS:
        with tvm.transform.PassContext(config={"relax.FuseOps.max_depth": depth}):
            fused = relax.transform.FuseOps()(module)
        fused = relax.transform.DeadCodeElimination()(relax.transform.FuseTIR()(fused))
        if all(len(fused[call.args[0]].params) <= MAX_BUFFERS for _, call in calls_of_tir(fused["main"])):
            return fused
    raise CompileError(f"an op has more than {MAX_BUFFERS} tensors, which is what a kernel can take; split it")


def _rows_of_call(var: relax.Var) -> str:
    """The symbol that counts rows of a call's result; empty if the result has a fixed shape."""
    made = var.ty.fields[0] if isinstance(var.ty, tvm.ir.TupleType) else var.ty
    rows = made.shape[0]
    return "" if isinstance(rows, tirx.IntImm) else str(rows.name)


@relax.expr_functor.mutator
class _Apart(relax.PyExprMutator):  # type: ignore[misc]
    """Gives each kind of rows its own copy of a function."""

    def __init__(self, module: tvm.IRModule, shared: frozenset[str]) -> None:
        super().__init__(module)
        self._module, self._shared = module, shared

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        call = binding.value
        if isinstance(call, relax.Call) and call.op == tvm.ir.Op.get("relax.call_tir"):
            name = call.args[0].name_hint
            if name in self._shared:
                func = self._module[call.args[0]].with_attr(_ROWS, _rows_of_call(binding.var))
                copy = self.builder_.add_func(func, name)
                call = relax.Call(call.op, [copy, *call.args[1:]], call.attrs, call.ty_args, ret_ty=call.ty)
                binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)


def _apart(module: tvm.IRModule) -> tvm.IRModule:
    """Ensures that no function is called with several kinds of rows; TVM shares functions that otherwise agree."""
    kinds: dict[str, set[str]] = {}
    for var, call in calls_of_tir(module["main"]):
        kinds.setdefault(call.args[0].name_hint, set()).add(_rows_of_call(var))
    shared = frozenset(name for name, rows in kinds.items() if len(rows) > 1)
    if not shared:
        return module
    mutator = _Apart(module, shared)
    mutator.builder_.update_func(module.get_global_var("main"), mutator.visit_expr(module["main"]))
    return relax.transform.DeadCodeElimination()(mutator.builder_.get())


def kernel_name(name: str) -> str:
    """A C identifier from TVM's name of a fused function: the ops in order, without counters."""
    words = [re.sub(r"\d+$", "", word.removeprefix("tir_")) for word in name.replace("tir_", "").split("_")]
    joined = "_".join(word for word in words if word and word != "fused")
    if len(joined) > _MAX_NAME:
        joined = joined[:_MAX_NAME].rsplit("_", 1)[0] + "_etc"
    return f"fused_{joined}"


def fuse_rows(module: tvm.IRModule, symbols: Mapping[str, str], describe: Describe) -> tvm.IRModule:
    """Fuses every generic op into PrimFuncs that carry their row programs.

    symbols: name of the symbolic dimension → "tokens" or "samples". Raises CompileError naming an op that mixes rows.
    """
    module = relax.transform.LegalizeOps()(relax.transform.DeadCodeElimination()(module))
    _check(module, describe)
    module = _apart(_fused(module))
    programs: dict[tuple[Any, ...], dict[str, str]] = {}
    found: dict[tvm.ir.GlobalVar, dict[str, str]] = {}
    for var, call in calls_of_tir(module["main"]):
        name, symbol = kernel_name(call.args[0].name_hint), _rows_of_call(var)
        try:
            constants = _constants(call)
            key = (call.args[0].name_hint, tuple(constants.items()), symbol)
            program = {} if key in programs else _program(module, call, constants)
        except RowwiseError as error:
            raise CompileError(f"{name}, which ends in {describe(var.name)}, {error}") from None
        if symbol not in symbols:
            raise CompileError(f"{describe(var.name)} has rows that are neither tokens nor samples")
        if program:
            program["rows"] = symbols[symbol]
            text = json.dumps(program, separators=(",", ":"), sort_keys=True)
            programs[key] = {PROGRAM: text, NAME: name}
        found[call.args[0]] = programs[key]
    for var, attributes in found.items():
        module[var] = module[var].with_attrs(attributes)
    return module
