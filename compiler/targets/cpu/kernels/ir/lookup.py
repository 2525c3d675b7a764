"""Looks up 4-bit numbers in a table of 16 floats held in registers."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, constant, define, splat
from llmc.compiler.targets.cpu.target import Target

_F8, _I8 = "<8 x float>", "<8 x i32>"


def lookup(target: Target, name: str = "lookup") -> str:
    """table[low 4 bits of each lane]."""
    args = f"{I32} %w, {F32} %table"
    if target.lanes == 16:
        intrinsic = f"{F32} @llvm.x86.avx512.permvar.sf.512"
        lines = [f"%r = call {intrinsic}({F32} %table, {I32} %w)", f"ret {F32} %r"]
        return f"declare {intrinsic}({F32}, {I32})\n" + define(F32, name, args, block(lines))
    # Three bits select within each half of the table, higher bits ignored; the fourth bit selects the half.
    intrinsic = f"{_F8} @llvm.x86.avx2.permps"
    low, high = constant(range(8)), constant(range(8, 16))
    lines = []
    for half, order in (("l", low), ("h", high)):
        lines.append(f"%t{half} = shufflevector {F32} %table, {F32} undef, {_I8} {order}")
        lines.append(f"%w{half} = shufflevector {I32} %w, {I32} undef, {_I8} {order}")
    for half in "lh":
        lines += [f"%{t}{half} = call {intrinsic}({_F8} %t{t}, {_I8} %w{half})" for t in "lh"]
        lines += [
            f"%s{half} = shl {_I8} %w{half}, {splat(28, lanes=8)}",
            f"%c{half} = icmp slt {_I8} %s{half}, zeroinitializer",
            f"%r{half} = select <8 x i1> %c{half}, {_F8} %h{half}, {_F8} %l{half}",
        ]
    lines += [f"%r = shufflevector {_F8} %rl, {_F8} %rh, <16 x i32> {constant(range(16))}", f"ret {F32} %r"]
    return f"declare {intrinsic}({_F8}, {_I8})\n" + define(F32, name, args, block(lines))
