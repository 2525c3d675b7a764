"""The exponential of weights, in float32 alone: many GPUs compute double precision slowly."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.coefficients import EXP
from llmc.compiler.targets.reference.kernels.frame import Expr, let


def exp_negative(x: Expr) -> Expr:
    """ExpNegative of sampling/logit_rows.h, operation by operation."""
    t = let(T.Select(x < T.float32(-87.0), T.float32(-87.0), x), "float32")
    shifted = let(t * T.float32(1.44269504) + T.float32(12582912.0), "float32")
    n = let(shifted - T.float32(12582912.0), "float32")
    r = let(t - n * T.float32(0.693359375), "float32")
    r = let(r - n * T.float32(-2.12194440e-4), "float32")
    p = T.float32(EXP[0])
    for term in EXP[1:]:
        p = let(p * r + T.float32(term), "float32")
    p = let(p * r * r + r + T.float32(1.0), "float32")
    scale = T.reinterpret("float32", (T.Cast("int32", n) + 127) * T.int32(1 << 23))
    return let(T.Select(x < T.float32(-87.0), T.float32(0.0), p * scale), "float32")
