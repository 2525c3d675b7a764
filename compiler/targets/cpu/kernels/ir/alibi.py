"""Score bias by key position (ALiBi)."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, FMA, I32, block, broadcast, constant, define

_KEYS = broadcast("%bs", "i32", "%base") + block([f"%k = add {I32} %bs, {constant(range(16))}"])


def helpers() -> str:
    """biased: v + slope · (key − position), for keys base, base + 1, ….

    biased_rounded: v + gain · (slope · key), with key and product rounded to bf16; the slope is rounded beforehand.
    """
    distance = broadcast("%ps", "i32", "%position") + block(
        [
            f"%d = sub {I32} %k, %ps",
            f"%f = sitofp {I32} %d to {F32}",
            f"%r = {FMA.format('%f', '%slope', '%v')}",
            f"ret {F32} %r",
        ]
    )
    rounded = block(
        [
            f"%f = sitofp {I32} %k to {F32}",
            f"%n = call {F32} @llmc_to_bf16({F32} %f)",
            f"%p = call {F32} @llmc_mul({F32} %n, {F32} %slope)",
            f"%b = call {F32} @llmc_to_bf16({F32} %p)",
            f"%r = {FMA.format('%b', '%gain', '%v')}",
            f"ret {F32} %r",
        ]
    )
    return define(F32, "biased", f"{F32} %v, {F32} %slope, i32 %base, i32 %position", _KEYS + distance) + define(
        F32, "biased_rounded", f"{F32} %v, {F32} %slope, i32 %base, {F32} %gain", _KEYS + rounded
    )
