"""Generic ops: legalised to TIR by TVM, fused, and checked to be functions of single rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tvm
from tvm import relax

from llmc.compiler.config import CompileError
from llmc.compiler.graph.lowered import SITE_PREFIX
from llmc.compiler.graph.passes.rowwise import RowwiseError, is_cheap_to_join, row_program, rows_of
from llmc.graphs_format import MAX_BUFFERS

PROGRAM = "llmc.row_program"
"""Attribute of a fused PrimFunc: its row program, JSON."""
NAME = "llmc.name"
"""Attribute of a fused PrimFunc: the names of its ops, for people."""
_INJECTIVE = 2
_FUSE_DEPTHS = (256, 8, 4, 2, 1)
_MAX_NAME = 60

Describe = Callable[[str], str]
"""From the name of a variable of the imported module to words for the op that made it."""


def calls_of_tir(main: relax.Function) -> Iterator[tuple[relax.Var, relax.Call]]:
    """Bindings of `main` that call a PrimFunc."""
    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.op == tvm.ir.Op.get("relax.call_tir"):
                yield binding.var, call


def _program(module: tvm.IRModule, call: relax.Call) -> dict[str, Any]:
    """Raises RowwiseError."""
    func, arguments = module[call.args[0]], list(call.args[1].fields)
    constants = {}
    for position, argument in enumerate(arguments):
        if isinstance(argument, tvm.ir.GenericConst):
            value = argument.value.numpy()
            if value.ndim:
                raise RowwiseError(f"uses a constant tensor of shape {list(value.shape)}; register it as a buffer")
            constants[position] = float(value)
    return row_program(func, len(func.params) - len(arguments), constants)


def _check(module: tvm.IRModule, describe: Describe) -> None:
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call) or value.op == tvm.ir.Op.get("relax.call_tir"):
                continue
            site = value.op == tvm.ir.Op.get("relax.call_dps_packed") and isinstance(value.args[0], relax.ExternFunc)
            if not site or not str(value.args[0].global_symbol).startswith(SITE_PREFIX):
                raise CompileError(f"{describe(binding.var.name)} has no form that works on single token rows")
    for var, call in calls_of_tir(module["main"]):
        try:
            if rows_of(module[call.args[0]]) is not None:
                _program(module, call)
        except RowwiseError as error:
            raise CompileError(f"{describe(var.name)} {error}") from None


def _annotate(module: tvm.IRModule) -> tvm.IRModule:
    """Lets every function of rows be fused but large reductions; TVM would fuse only what suits a loop nest."""
    module = relax.transform.AnnotateTIROpPattern()(module)
    for var, func in module.functions_items():
        if var.name_hint == "main":
            continue
        outputs = 1
        for _, call in calls_of_tir(module["main"]):
            if call.args[0] == var:
                outputs = len(func.params) - len(call.args[1].fields)
        try:
            joined = rows_of(func) is None or is_cheap_to_join(row_program(func, outputs))
        except RowwiseError:
            continue
        if joined and int(func.attrs.get("op_pattern", 8)) > _INJECTIVE:
            module[var] = func.with_attr("op_pattern", _INJECTIVE)
    return module


def _fused(module: tvm.IRModule) -> tvm.IRModule:
    """Fuses as much as kernels have buffers for."""
    module = _annotate(module)
    for depth in _FUSE_DEPTHS:
        with tvm.transform.PassContext(config={"relax.FuseOps.max_depth": depth}):
            fused = relax.transform.FuseOps()(module)
        fused = relax.transform.DeadCodeElimination()(relax.transform.FuseTIR()(fused))
        if all(len(fused[call.args[0]].params) <= MAX_BUFFERS for _, call in calls_of_tir(fused["main"])):
            return fused
    raise CompileError(f"an op has more than {MAX_BUFFERS} tensors, which is what a kernel can take; split it")


def kernel_name(name: str) -> str:
    """A C identifier from the name that TVM gives a fused function: the ops in order, without counters."""
    words = [re.sub(r"\d+$", "", word.removeprefix("tir_")) for word in name.replace("tir_", "").split("_")]
    joined = "_".join(word for word in words if word and word != "fused")
    if len(joined) > _MAX_NAME:
        joined = joined[:_MAX_NAME].rsplit("_", 1)[0] + "_etc"
    return f"fused_{joined}"


def fuse_rows(module: tvm.IRModule, symbols: Mapping[str, str], describe: Describe) -> tvm.IRModule:
    """Turns every generic op into part of a PrimFunc that carries its row program.

    symbols: "tokens" or "samples" by the name of the symbolic dimension. Raises CompileError naming an op that is no
    function of single rows.
    """
    module = relax.transform.LegalizeOps()(relax.transform.DeadCodeElimination()(module))
    _check(module, describe)
    module = _fused(module)
    for var, call in list(calls_of_tir(module["main"])):
        func = module[call.args[0]]
        name = kernel_name(call.args[0].name_hint)
        try:
            program = _program(module, call)
        except RowwiseError as error:
            raise CompileError(f"{name}, which ends in {describe(var.name)}, {error}") from None
        rows = rows_of(func)
        symbol = "" if rows is None else str(rows.name)
        if symbol not in symbols:
            raise CompileError(f"{describe(var.name)} has rows that are neither tokens nor samples")
        program["rows"] = symbols[symbol]
        text = json.dumps(program, separators=(",", ":"), sort_keys=True)
        module[call.args[0]] = func.with_attrs({PROGRAM: text, NAME: name})
    return module
