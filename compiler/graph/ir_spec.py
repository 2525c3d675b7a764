"""The IR spec, checked between phases. An error names node, op and argument, and states found and expected values.

After lowering, every call is an llmc op with a kernel template or a legalised function of rows. After binding, every
tensor of an llmc op has the dtype of its graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tvm
from tvm import relax

from llmc.compiler import dtypes
from llmc.compiler.config import CompileError
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.graph.passes.fuse import PROGRAM
from llmc.compiler.ops.definition import OpDef, makes_int8
from llmc.compiler.ops.registry import get_op


def verify_site(op: str, node: str, tensors: Mapping[str, Any]) -> None:
    """Checks the tensors of an llmc op while it is lowered. tensors: Relax variables by argument name. Raises
    CompileError."""
    for name, tensor in tensors.items():
        argument = get_op(op).arguments[name]
        rank, allowed = argument.rank, argument.dtypes
        found, shape = str(tensor.ty.dtype), tensor.ty.shape
        if found not in allowed or len(shape) != rank:
            raise CompileError(
                f"node {node}: argument {name} of llmc::{op} is {found} {list(map(str, shape))}; "
                f"it must be {' or '.join(allowed)} of rank {rank}"
            )


def verify_operand(site: Site, name: str, dtype: str, act_dtype: str) -> None:
    """Raises CompileError unless a packed activation has the graph's activation dtype, or is int8 in words."""
    op = get_op(site.op)
    packed = op.packed_result if name == "out" else op.arguments[name].packed
    int8 = makes_int8(site) if name == "out" else name == "x" and site.attributes.get("int8")
    wanted = dtypes.FLOATS[act_dtype].long_name
    if packed and dtype != (dtypes.I32.long_name if int8 else wanted):
        raise CompileError(
            f"tensor {name} of llmc::{site.op} is {dtype} in a graph of {act_dtype} activations; "
            f"convert it with .to(torch.{wanted}) in the model"
        )


def verify_calls(op: OpDef, called: Collection[str]) -> None:
    """Raises CompileError unless an op calls the kernels that its definition says every call needs."""
    quantized = op.quantized_calls and {*op.quantized_calls} <= {*called}
    if not quantized and not {*op.kernel_names} <= {*called}:
        raise CompileError(
            f"op {op.name} says that it calls {', '.join(op.kernel_names)} and calls {', '.join(sorted(called))}: mend "
            "`calls` of its definition"
        )


def verify_lowered(lowered: Lowered) -> None:
    """Raises CompileError if anything remains but llmc ops at known sites and functions of rows."""
    main = lowered.module["main"]
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, (relax.Var, relax.TupleGetItem)):
                continue
            name = binding.var.name
            if not isinstance(value, relax.Call):
                raise CompileError(f"{name} is a {type(value).__name__}, which is not an op")
            callee = value.args[0]
            if value.op == tvm.ir.Op.get("relax.call_tir"):
                if PROGRAM not in (lowered.module[callee].attrs or {}):
                    raise CompileError(f"{name} calls {callee.name_hint}, which is not a function of rows")
                continue
            if value.op != tvm.ir.Op.get("relax.call_dps_packed"):
                raise CompileError(f"{name} is a call of {value.op}, which was not legalised")
            number = str(callee.global_symbol).removeprefix(SITE_PREFIX)
            if not number.isdigit() or int(number) >= len(lowered.sites):
                raise CompileError(f"{name} calls {callee.global_symbol}, which is not a site of this model")
