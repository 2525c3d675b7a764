"""Multiplication and addition with one rounding, which all devices have."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.reference.kernels.frame import Expr


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return T.call_pure_extern("float32", "fma", a, b, c)
