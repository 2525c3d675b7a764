"""The vocabulary of all helpers: vector types of 16 lanes, constants, definitions, fma."""

from __future__ import annotations

import struct
from collections.abc import Iterable

F32 = "<16 x float>"
I32 = "<16 x i32>"
I16 = "<16 x i16>"
I1 = "<16 x i1>"
FMA = f"call {F32} @llvm.fma.v16f32({F32} {{}}, {F32} {{}}, {F32} {{}})"
"""A format string for an fma of three operands."""


def constant(values: Iterable[object], kind: str = "i32") -> str:
    """A constant vector; of i32, usable as a shuffle mask."""
    return "<" + ", ".join(f"{kind} {value}" for value in values) + ">"


def splat(value: object, kind: str = "i32", lanes: int = 16) -> str:
    """A constant vector with one value in all lanes."""
    return constant([value] * lanes, kind)


def float_bits(double: str) -> str:
    """A constant vector of a float32, given as LLVM wants it: the bits of the equal double."""
    return splat(double, "float")


def number(value: float) -> str:
    """A constant vector of `value` rounded to float32."""
    (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    return float_bits("0x" + struct.pack(">d", nearest).hex().upper())


def block(lines: Iterable[str]) -> str:
    """The body of a function."""
    return "".join(f"  {line}\n" for line in lines)


def kept_sum(total: str, result: str) -> list[str]:
    """Lines that set `result` to `total`, a sum of integers, after which LLVM does not add anything to its terms.

    Otherwise it adds the products of several steps first and keeps them in registers, so that sums go to the stack.
    Needs the declarations of `vector`.
    """
    return [
        f"{result}.f = bitcast {I32} {total} to {F32}",
        f"{result}.k = call {F32} @llvm.arithmetic.fence.v16f32({F32} {result}.f)",
        f"{result} = bitcast {F32} {result}.k to {I32}",
    ]


def broadcast(result: str, kind: str, scalar: str) -> str:
    """IR that sets every lane of `result` to a scalar."""
    vector = f"<16 x {kind}>"
    return block(
        [
            f"{result}.i = insertelement {vector} undef, {kind} {scalar}, i32 0",
            f"{result} = shufflevector {vector} {result}.i, {vector} undef, {I32} zeroinitializer",
        ]
    )


def define(result: str, name: str, args: str, body: str) -> str:
    """Defines the function llmc_`name`, which kernels inline."""
    return f"define linkonce_odr hidden {result} @llmc_{name}({args}) #0 {{\n{body}}}\n"
