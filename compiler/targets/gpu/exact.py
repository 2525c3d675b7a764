"""Makes kernels exact: fixes what GPU languages leave open, before TVM writes the text.

TVM writes constants with seven digits, and float `max` as the device's own. Here constants become bit patterns, and
both become calls of functions that every language's prelude defines equally.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import prim

_BINARY = (
    prim.Add, prim.Sub, prim.Mul, prim.Div, prim.Mod, prim.FloorDiv, prim.FloorMod, prim.EQ, prim.NE, prim.LT, prim.LE,
    prim.GT, prim.GE, prim.And, prim.Or, prim.BitwiseAnd, prim.BitwiseOr, prim.BitwiseXor, prim.LShift, prim.RShift,
)  # fmt: skip
_EXTREMES = {prim.Max: "max", prim.Min: "min"}
_LEAVES = (ir.Var, prim.IntImm, ir.StringImm)
_BITS = {"float32": ("<f", "<I", "uint32"), "float64": ("<d", "<q", "int64")}
_CASTS = {
    ("float32", "int32"): "as_int",
    ("float32", "uint32"): "as_uint",
    ("int32", "float32"): "as_float",
    ("uint32", "float32"): "as_float",
    ("float64", "int64"): "as_long",
    ("int64", "float64"): "as_double",
}
"""Reinterpreting functions, by (argument dtype, result dtype)."""
_LEAST_INT = -(1 << 31)
"""Has no literal in C: the sign is an operator, and what is behind it a long."""


class UnknownNodeError(RuntimeError):
    """A TIR node that kernels must not contain."""


def exact(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with every such choice made explicit. Raises UnknownNodeError."""
    return function.with_body(_stmt(function.body))


def _dtype(e: Any) -> str:
    return str(e.ty.dtype)


def _call(dtype: str, name: str, *arguments: Any) -> Any:
    return tirx.call_pure_extern(dtype, name, *arguments)


def constant(value: float, dtype: str) -> Any:
    """A float constant given by its bits."""
    of_float, of_int, integer = _BITS[dtype]
    bits = struct.unpack(of_int, struct.pack(of_float, value))[0]
    return _call(dtype, _CASTS[integer, dtype], prim.IntImm(integer, bits))


def _expr(e: Any) -> Any:
    if isinstance(e, prim.FloatImm):
        return constant(e.value, _dtype(e))
    if isinstance(e, prim.IntImm) and _dtype(e) == "int32" and e.value == _LEAST_INT:
        return prim.Sub(prim.IntImm("int32", _LEAST_INT + 1), prim.IntImm("int32", 1))
    if isinstance(e, _LEAVES):
        return e
    if isinstance(e, _BINARY):
        return type(e)(_expr(e.a), _expr(e.b))
    if type(e) in _EXTREMES:
        a, b = _expr(e.a), _expr(e.b)
        return _call(_dtype(e), f"llmc_{_EXTREMES[type(e)]}", a, b) if _dtype(e) == "float32" else type(e)(a, b)
    match e:
        case prim.Cast():
            return prim.Cast(_dtype(e), _expr(e.value))
        case prim.Not() | prim.BitwiseNot():
            return type(e)(_expr(e.a))
        case prim.Select():
            return prim.Select(_expr(e.condition), _expr(e.true_value), _expr(e.false_value))
        case ir.TensorLoad():
            return tirx.BufferLoad(e.source, [_expr(index) for index in e.indices])
        case ir.Call():
            return _rewritten_call(e)
    raise UnknownNodeError(f"a kernel has an expression of {type(e).__name__}")


def _rewritten_call(e: Any) -> Any:
    arguments = [_expr(argument) for argument in e.args]
    if e.op.same_as(tvm.ir.Op.get("tirx.reinterpret")):
        return _call(_dtype(e), _CASTS[_dtype(e.args[0]), _dtype(e)], arguments[0])
    return ir.Call(e.op, arguments, e.attrs, list(e.ty_args), ret_ty=e.ty)


def _stmt(s: Any) -> Any:
    rewrite: Callable[[Any], Any] | None = _STMTS.get(type(s))
    if rewrite is None:
        raise UnknownNodeError(f"a kernel has a statement of {type(s).__name__}")
    return rewrite(s)


def _for(s: Any) -> Any:
    return tirx.For(
        s.loop_var, _expr(s.min), _expr(s.extent), s.kind, _stmt(s.body), s.thread_binding, s.annotations, s.step
    )


def _if(s: Any) -> Any:
    other = None if s.else_case is None else _stmt(s.else_case)
    return tirx.IfThenElse(_expr(s.condition), _stmt(s.then_case), other)


_STMTS: dict[type, Callable[[Any], Any]] = {
    tirx.SeqStmt: lambda s: tirx.SeqStmt([_stmt(one) for one in s.seq]),
    tirx.Bind: lambda s: tirx.Bind(s.var, _expr(s.value)),
    tirx.AllocBuffer: lambda s: s,
    tirx.DeclBuffer: lambda s: s,
    tirx.BufferStore: lambda s: tirx.BufferStore(s.buffer, _expr(s.value), [_expr(i) for i in s.indices]),
    tirx.Evaluate: lambda s: tirx.Evaluate(_expr(s.value)),
    tirx.AttrStmt: lambda s: tirx.AttrStmt(s.node, s.attr_key, s.value, _stmt(s.body)),
    tirx.For: _for,
    tirx.While: lambda s: tirx.While(_expr(s.condition), _stmt(s.body)),
    tirx.IfThenElse: _if,
}
