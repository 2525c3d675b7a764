"""Helpers of all kernels. Every operation whose rounding matters is spelt out here or in a sibling module.

All vectors are 16 float32 wide; LLVM splits them on AVX2. A product that feeds a sum is either part of an fma or passes
an arithmetic fence, so the code generator never decides on fusion.
"""

from __future__ import annotations

from llmc.compiler.dtypes import HALVES
from llmc.compiler.targets.cpu.kernels.ir import bf16, exponentials, stores
from llmc.compiler.targets.cpu.kernels.ir.halves import helpers as half_helpers
from llmc.compiler.targets.cpu.kernels.ir.text import F32, FMA, I1, I16, I32, broadcast, constant, define, splat

_IOTA = constant(range(16))


def _mask() -> str:
    return broadcast("%ns", "i32", "%n") + f"  %m = icmp slt {I32} {_IOTA}, %ns\n"


def _load(name: str, kind: str) -> str:
    vector = f"<16 x {kind}>"
    align = 2 if kind == "i16" else 4
    suffix = {"float": "v16f32", "i16": "v16i16", "i32": "v16i32"}[kind]
    call = f"call {vector} @llvm.masked.load.{suffix}.p0(ptr %p, i32 {align}, {I1} %m, {vector} zeroinitializer)"
    return define(vector, name, "ptr %p, i32 %n", f"{_mask()}  %r = {call}\n  ret {vector} %r\n")


def _store(name: str, kind: str) -> str:
    vector = f"<16 x {kind}>"
    align = 2 if kind == "i16" else 4
    suffix = {"float": "v16f32", "i16": "v16i16", "i32": "v16i32"}[kind]
    call = f"call void @llvm.masked.store.{suffix}.p0({vector} %v, ptr %p, i32 {align}, {I1} %m)"
    return define("i32", name, f"{vector} %v, ptr %p, i32 %n", f"{_mask()}  {call}\n  ret i32 0\n")


_DECLARATIONS = f"""
declare {F32} @llvm.fma.v16f32({F32}, {F32}, {F32})
declare {F32} @llvm.sqrt.v16f32({F32})
declare {F32} @llvm.roundeven.v16f32({F32})
declare {F32} @llvm.maxnum.v16f32({F32}, {F32})
declare {F32} @llvm.minnum.v16f32({F32}, {F32})
declare {F32} @llvm.arithmetic.fence.v16f32({F32})
declare {F32} @llvm.masked.load.v16f32.p0(ptr, i32, {I1}, {F32})
declare {I16} @llvm.masked.load.v16i16.p0(ptr, i32, {I1}, {I16})
declare {I32} @llvm.masked.load.v16i32.p0(ptr, i32, {I1}, {I32})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.masked.store.v16f32.p0({F32}, ptr, i32, {I1})
declare void @llvm.masked.store.v16i16.p0({I16}, ptr, i32, {I1})
declare void @llvm.masked.store.v16i32.p0({I32}, ptr, i32, {I1})
declare void @llvm.masked.store.v32i16.p0(<32 x i16>, ptr, i32, <32 x i1>)
declare void @llvm.masked.store.v64i8.p0(<64 x i8>, ptr, i32, <64 x i1>)
"""


def _binary(name: str, op: str, fence: bool) -> str:
    body = f"  %r = {op} {F32} %a, %b\n"
    if fence:
        body += f"  %f = call {F32} @llvm.arithmetic.fence.v16f32({F32} %r)\n"
    return define(F32, name, f"{F32} %a, {F32} %b", body + f"  ret {F32} {'%f' if fence else '%r'}\n")


def fold(name: str, step: str) -> str:
    """Reduces 16 lanes in one fixed tree: lane i with lane i + 8, 4, 2, 1. The result is in every lane."""
    body, value = "", "%v"
    for half in (8, 4, 2, 1):
        order = constant((lane + half) % 16 for lane in range(16))
        body += f"  %s{half} = shufflevector {F32} {value}, {F32} undef, {I32} {order}\n"
        body += f"  %r{half} = {step.format(a=value, b=f'%s{half}')}\n"
        value = f"%r{half}"
    return define(F32, name, f"{F32} %v", body + f"  ret {F32} {value}\n")


def _simple() -> str:
    fma = f"  %r = {FMA.format('%a', '%b', '%c')}\n  ret {F32} %r\n"
    neg = f"  %n = fneg {F32} %a\n  %r = {FMA.format('%n', '%b', '%c')}\n  ret {F32} %r\n"
    root = f"  %r = call {F32} @llvm.sqrt.v16f32({F32} %a)\n  ret {F32} %r\n"
    larger = f"  %r = call {F32} @llvm.maxnum.v16f32({F32} %a, {F32} %b)\n  ret {F32} %r\n"
    # b if either is NaN
    wins = f"  %c = fcmp ogt {F32} %a, %b\n  %r = select {I1} %c, {F32} %a, {F32} %b\n  ret {F32} %r\n"
    select = (
        broadcast("%bs", "i32", "%base")
        + broadcast("%los", "i32", "%lo")
        + broadcast("%his", "i32", "%hi")
        + f"  %k = add {I32} %bs, {_IOTA}\n  %above = icmp sge {I32} %k, %los\n  %below = icmp sle {I32} %k, %his\n"
        f"  %in = and {I1} %above, %below\n  %r = select {I1} %in, {F32} %v, {F32} %other\n  ret {F32} %r\n"
    )
    sigmoid = (
        f"  %n = fneg {F32} %v\n  %e = call {F32} @llmc_exp({F32} %n)\n"
        f"  %d = fadd {F32} %e, {splat('1.0', 'float')}\n  %r = fdiv {F32} %v, %d\n  ret {F32} %r\n"
    )
    clobbers = ",".join(f"~{{xmm{i}}}" for i in range(32))
    forget = f'  call void asm sideeffect "", "{clobbers}"()\n  ret i32 0\n'
    reread = '  call void asm sideeffect "", "r,~{memory}"(ptr %p)\n  ret i32 0\n'
    share = (
        "  %t = sext i32 %task to i64\n  %u = sext i32 %total to i64\n  %n = sext i32 %num to i64\n"
        "  %p = mul i64 %t, %u\n  %q = sdiv i64 %p, %n\n  %r = trunc i64 %q to i32\n  ret i32 %r\n"
    )
    return "".join(
        (
            define("i32", "share", "i32 %task, i32 %total, i32 %num", share),
            define(F32, "fma", f"{F32} %a, {F32} %b, {F32} %c", fma),
            define(F32, "fnma", f"{F32} %a, {F32} %b, {F32} %c", neg),
            define(F32, "sqrt", f"{F32} %a", root),
            define(F32, "max", f"{F32} %a, {F32} %b", larger),
            define(F32, "larger", f"{F32} %a, {F32} %b", wins),
            define(F32, "in_range", f"{F32} %v, {F32} %other, i32 %base, i32 %lo, i32 %hi", select),
            define(F32, "silu", f"{F32} %v", sigmoid),
            define("i32", "forget_registers", "", forget),
            define("i32", "forget_memory", "ptr %p", reread),
            *(
                define(
                    "i32",
                    name,
                    "ptr %p",
                    f"  call void @llvm.prefetch.p0(ptr %p, i32 {write}, i32 {level}, i32 1)\n  ret i32 0\n",
                )
                for name, write, level in (("prefetch", 0, 3), ("prefetch_l2", 0, 2), ("prefetch_write", 1, 3))
            ),
        )
    )


def helpers(
    mcpu: str,
    bf16_dot: bool = False,
    puts: tuple[tuple[str, int, int], ...] = (),
) -> str:
    """The IR text of all helpers, plus those named by `stores.put_name` for each of `puts`."""
    parts = [
        _DECLARATIONS,
        _load("load_f32", "float"),
        _load("load_i16", "i16"),
        _store("store_f32", "float"),
        _store("store_i16", "i16"),
        _binary("mul", "fmul", True),
        _binary("add", "fadd", False),
        _binary("sub", "fsub", False),
        _binary("div", "fdiv", False),
        fold("sum_lanes", f"fadd {F32} {{a}}, {{b}}"),
        fold("max_lanes", f"call {F32} @llvm.maxnum.v16f32({F32} {{a}}, {F32} {{b}})"),
        exponentials.exp(),
        exponentials.exp2(),
        half_helpers(),
        _simple(),
        bf16.dot() if bf16_dot else "",
        *(stores.put(*p) for p in sorted(set(puts))),
        *(stores.put_tile(dtype) for dtype in HALVES if (dtype, *stores.TILE) in puts),
        f'attributes #0 = {{ alwaysinline nounwind "target-cpu"="{mcpu}" }}\n',
    ]
    return "".join(parts)
