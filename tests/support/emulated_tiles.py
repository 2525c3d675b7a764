"""AMX's tile registers in terms of ordinary instructions, for machines without: registers are arrays in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

# A tile that is used before the registers are configured, or with another shape than 16 × 64 bytes, traps.
# TDPBSUD and TDPBF16PS follow the operation sections of Intel's manual, in its order of rows, words and columns.
_STATE = """
@llmc_tile_ready = weak global i32 0, align 4
@llmc_tiles = weak hidden global [8 x [16 x <16 x i32>]] zeroinitializer, align 64
declare void @llvm.trap()

define linkonce_odr hidden void @llmc_emulated_configure(ptr %c) #1 {
  %palette = load i8, ptr %c
  %good = icmp eq i8 %palette, 1
  br i1 %good, label %each, label %bad
each:
  %n = phi i64 [ 0, %0 ], [ %next, %more ]
  %bytes.at = mul i64 %n, 2
  %bytes.off = add i64 %bytes.at, 16
  %bytes.p = getelementptr i8, ptr %c, i64 %bytes.off
  %bytes = load i16, ptr %bytes.p, align 2
  %rows.off = add i64 %n, 48
  %rows.p = getelementptr i8, ptr %c, i64 %rows.off
  %rows = load i8, ptr %rows.p
  %wide = icmp eq i16 %bytes, 64
  %tall = icmp eq i8 %rows, 16
  %both = and i1 %wide, %tall
  br i1 %both, label %more, label %bad
more:
  %next = add i64 %n, 1
  %done = icmp eq i64 %next, 8
  br i1 %done, label %end, label %each
bad:
  call void @llvm.trap()
  unreachable
end:
  store [8 x [16 x <16 x i32>]] zeroinitializer, ptr @llmc_tiles, align 64
  store i32 1, ptr @llmc_tile_ready
  ret void
}

define linkonce_odr hidden ptr @llmc_emulated_tile(i32 %t) #1 {
  %ready = load i32, ptr @llmc_tile_ready
  %on = icmp eq i32 %ready, 1
  br i1 %on, label %good, label %bad
bad:
  call void @llvm.trap()
  unreachable
good:
  %p = getelementptr [16 x <16 x i32>], ptr @llmc_tiles, i32 %t
  ret ptr %p
}

define linkonce_odr hidden void @llmc_emulated_zero(i32 %t) #1 {
  %p = call ptr @llmc_emulated_tile(i32 %t)
  store [16 x <16 x i32>] zeroinitializer, ptr %p, align 64
  ret void
}

define linkonce_odr hidden void @llmc_emulated_move(i32 %t, ptr %memory, i32 %stride, i1 %load) #1 {
  %p = call ptr @llmc_emulated_tile(i32 %t)
  %step = sext i32 %stride to i64
  br label %each
each:
  %r = phi i64 [ 0, %0 ], [ %next, %each ]
  %off = mul i64 %r, %step
  %there = getelementptr i8, ptr %memory, i64 %off
  %here = getelementptr <16 x i32>, ptr %p, i64 %r
  %from = select i1 %load, ptr %there, ptr %here
  %to = select i1 %load, ptr %here, ptr %there
  %v = load <16 x i32>, ptr %from, align 1
  store <16 x i32> %v, ptr %to, align 1
  %next = add i64 %r, 1
  %done = icmp eq i64 %next, 16
  br i1 %done, label %end, label %each
end:
  ret void
}
"""


def _loops(name: str, phis: str, body: str, end: str) -> str:
    """For each row m of A and of C, which is %c: `body` takes word %a of A and line %b of B to the sums of
    `phis`; `end` makes %sum, the new row of C."""
    return f"""
define linkonce_odr hidden void @llmc_emulated_{name}(i32 %tc, i32 %ta, i32 %tb) #1 {{
entry:
  %pc = call ptr @llmc_emulated_tile(i32 %tc)
  %pa = call ptr @llmc_emulated_tile(i32 %ta)
  %pb = call ptr @llmc_emulated_tile(i32 %tb)
  br label %row
row:
  %m = phi i64 [ 0, %entry ], [ %m.next, %finish ]
  %c.p = getelementptr <16 x i32>, ptr %pc, i64 %m
  %c = load <16 x i32>, ptr %c.p, align 64
  br label %word
word:
  %k = phi i64 [ 0, %row ], [ %k.next, %word ]
{phis}
{_OPERANDS}
{body}
  %k.next = add i64 %k, 1
  %k.done = icmp eq i64 %k.next, 16
  br i1 %k.done, label %finish, label %word
finish:
{end}
  store <16 x i32> %sum, ptr %c.p, align 64
  %m.next = add i64 %m, 1
  %m.done = icmp eq i64 %m.next, 16
  br i1 %m.done, label %end, label %row
end:
  ret void
}}
"""


_OPERANDS = """
  %a.row = getelementptr <16 x i32>, ptr %pa, i64 %m
  %a.p = getelementptr i32, ptr %a.row, i64 %k
  %a.word = load i32, ptr %a.p, align 4
  %a.first = insertelement <16 x i32> undef, i32 %a.word, i32 0
  %a = shufflevector <16 x i32> %a.first, <16 x i32> undef, <16 x i32> zeroinitializer
  %b.p = getelementptr <16 x i32>, ptr %pb, i64 %k
  %b = load <16 x i32>, ptr %b.p, align 64"""


def _splat(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 16) + ">"


def _dot_s8u8() -> str:
    """C += Σ of the products of the four bytes of a word: sign extended of A, zero extended of B; sums wrap."""
    lines, last = [], "%acc.in"
    for byte in range(4):
        up, down = _splat(24 - byte * 8), _splat(24)
        lines += [
            f"  %as{byte} = shl <16 x i32> %a, {up}",
            f"  %ax{byte} = ashr <16 x i32> %as{byte}, {down}",
            f"  %bs{byte} = shl <16 x i32> %b, {up}",
            f"  %bx{byte} = lshr <16 x i32> %bs{byte}, {down}",
            f"  %p{byte} = mul <16 x i32> %ax{byte}, %bx{byte}",
            f"  %s{byte} = add <16 x i32> {last}, %p{byte}",
        ]
        last = f"%s{byte}"
    phi = "  %acc.in = phi <16 x i32> [ %c, %row ], [ %s3, %word ]"
    return _loops("dot_s8u8", phi, "\n".join(lines), "  %sum = add <16 x i32> %s3, zeroinitializer")


_FLOATS = "<16 x float>"


def _flushed(result: str, value: str) -> list[str]:
    """A denormal number becomes a zero of its sign: DAZ of what is read, FTZ of what is computed."""
    ints = "<16 x i32>"
    return [
        f"  {result}.b = bitcast {_FLOATS} {value} to {ints}",
        f"  {result}.e = and {ints} {result}.b, {_splat(0x7F800000)}",
        f"  {result}.s = and {ints} {result}.b, {_splat(-(1 << 31))}",
        f"  {result}.d = icmp eq {ints} {result}.e, zeroinitializer",
        f"  {result}.v = select <16 x i1> {result}.d, {ints} {result}.s, {ints} {result}.b",
        f"  {result} = bitcast {ints} {result}.v to {_FLOATS}",
    ]


def _dot_bf16() -> str:
    """Even and odd elements of K in two chains of fma from 0; C += even + odd."""
    phis, lines = [], []
    for half, name in enumerate(("low", "high")):
        phis.append(f"  %in{half} = phi {_FLOATS} [ zeroinitializer, %row ], [ %f{half}, %word ]")
        for side in "ab":
            lines.append(f"  %{side}w{half} = call {_FLOATS} @llmc_bf16_{name}(<16 x i32> %{side})")
            lines += _flushed(f"%{side}{half}", f"%{side}w{half}")
        call = f"call {_FLOATS} @llvm.fma.v16f32({_FLOATS} %a{half}, {_FLOATS} %b{half}, {_FLOATS} %in{half})"
        lines += [f"  %s{half} = {call}", *_flushed(f"%f{half}", f"%s{half}")]
    end = [
        f"  %cw = bitcast <16 x i32> %c to {_FLOATS}",
        *_flushed("%cf", "%cw"),
        f"  %both = fadd {_FLOATS} %f0, %f1",
        *_flushed("%bothf", "%both"),
        f"  %new = fadd {_FLOATS} %cf, %bothf",
        *_flushed("%newf", "%new"),
        f"  %sum = bitcast {_FLOATS} %newf to <16 x i32>",
    ]
    return _loops("dot_bf16", "\n".join(phis), "\n".join(lines), "\n".join(end))


_DOTS = {"s8u8": _dot_s8u8, "bf16": _dot_bf16}


def instructions(kind: str, dots: Iterable[tuple[int, int, int]]) -> str:
    """What `ir.tiles.instructions` gives, without AMX."""
    from llmc.compiler.targets.cpu.kernels.ir import tiles

    shape = ", ".join(f"i8 {value}" for value in tiles._shape())
    head = "define linkonce_odr hidden i32 @llmc_tile_"
    parts = [
        f"@llmc_tile_shape = private unnamed_addr constant <64 x i8> <{shape}>, align 64\n",
        _STATE,
        _DOTS[kind](),
        f"{head}configure() #0 {{\n  call void @llmc_emulated_configure(ptr @llmc_tile_shape)\n  ret i32 0\n}}\n",
        f"{head}release() #0 {{\n  store i32 0, ptr @llmc_tile_ready\n  ret i32 0\n}}\n",
    ]
    for n in range(8):
        parts.append(f"{head}zero_{n}() #0 {{\n  call void @llmc_emulated_zero(i32 {n})\n  ret i32 0\n}}\n")
        for name, load in (("load", "true"), ("store", "false")):
            call = f"call void @llmc_emulated_move(i32 {n}, ptr %p, i32 %stride, i1 {load})"
            parts.append(f"{head}{name}_{n}(ptr %p, i32 %stride) #0 {{\n  {call}\n  ret i32 0\n}}\n")
    for c, a, b in sorted(set(dots)):
        call = f"call void @llmc_emulated_dot_{kind}(i32 {c}, i32 {a}, i32 {b})"
        parts.append(f"{head}dot_{kind}_{c}_{a}_{b}() #0 {{\n  {call}\n  ret i32 0\n}}\n")
    parts.append("attributes #1 = { noinline nounwind }\n")
    return "".join(parts)


def configured(library: ctypes.CDLL) -> bool:
    """Whether the last kernel of an emulation left the registers configured."""
    return bool(ctypes.c_int32.in_dll(library, "llmc_tile_ready").value)
