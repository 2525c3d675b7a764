"""What a target has, as `Target.has` answers it: for people, and for refusals."""

from __future__ import annotations

from collections.abc import Iterable

from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import FLOATS
from llmc.compiler.ops.linear import LINEAR
from llmc.compiler.ops.registry import OPS, get_op
from llmc.compiler.targets.base import Target
from llmc.quantize import SCHEMES, Scheme

UNQUANTIZED = "none"
"""Stands for no scheme: weights are floats of the activations' dtype."""


def abilities(target: Target) -> dict[str, dict[str, list[str]]]:
    """{op: {dtype of activations: names of schemes, UNQUANTIZED first}}. What the target lacks is missing.

    Without the ops that stand for another one with a quantized weight. Imports tvm.
    """
    stand_ins = {op.quantized for op in OPS.values()}
    found: dict[str, dict[str, list[str]]] = {}
    for name, op in OPS.items():
        of_dtypes = {
            dtype: [UNQUANTIZED, *(scheme.name for scheme in SCHEMES.values() if target.has(op, dtype, scheme))]
            for dtype in FLOATS
            if name not in stand_ins and target.has(op, dtype)
        }
        if of_dtypes:
            found[name] = of_dtypes
    return found


def check_schemes(target: Target, dtype: str, schemes: Iterable[Scheme]) -> None:
    """Raises CompileError for a scheme in which the target has no linear layers with activations of `dtype`."""
    for scheme in schemes:
        if not target.has(LINEAR, dtype, scheme):
            weights = f"{dtype} activations by weights in {scheme.name} ({scheme.weight.kind})"
            raise _lacking(target, LINEAR.name, weights, "another --quant, --dtype or --target")


def check_ops(target: Target, dtype: str, names: Iterable[str]) -> None:
    """Raises CompileError for an op that the target lacks for activations of `dtype`."""
    for name in sorted({*names}):
        if not target.has(get_op(name), dtype):
            raise _lacking(target, name, f"{dtype} activations", "another --target")


def _lacking(target: Target, op: str, what: str, choice: str) -> CompileError:
    return CompileError(
        f"target {target.name} has no kernel of op {op} for {what}: choose {choice}; "
        "llmc targets NAME lists what a target has"
    )
