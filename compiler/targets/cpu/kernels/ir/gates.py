"""The gate of experts that has a limit."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I1, block, define, number, splat


def limited(limit: float, gain: float) -> str:
    """limited_gate: g · sigmoid(gain · g) · (u + 1), with g clamped above by the limit and u to ±limit; NaN stays
    NaN."""
    above, below, one = number(limit), number(-limit), splat("1.0", "float")
    body = block(
        [
            f"%ga = fcmp ogt {F32} %g, {above}",
            f"%gl = select {I1} %ga, {F32} {above}, {F32} %g",
            f"%ua = fcmp ogt {F32} %u, {above}",
            f"%um = select {I1} %ua, {F32} {above}, {F32} %u",
            f"%ub = fcmp olt {F32} %um, {below}",
            f"%ul = select {I1} %ub, {F32} {below}, {F32} %um",
            f"%n = call {F32} @llmc_mul({F32} %gl, {F32} {number(-gain)})",
            f"%e = call {F32} @llmc_exp({F32} %n)",
            f"%d = fadd {F32} %e, {one}",
            f"%s = fdiv {F32} %gl, %d",
            f"%w = fadd {F32} %ul, {one}",
            f"%r = call {F32} @llmc_mul({F32} %s, {F32} %w)",
            f"ret {F32} %r",
        ]
    )
    return define(F32, "limited_gate", f"{F32} %g, {F32} %u", body)
