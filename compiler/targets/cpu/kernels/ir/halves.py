"""16-bit floats, bfloat16 and IEEE float16: float32 in registers, rounded to nearest even when stored.

A word holds two, the element of lower index in its low half. bfloat16 is the upper half of a float32, so a shift widens
it. float16 is converted by F16C instructions, which every level has. A magnitude that rounds beyond 65504 becomes
infinite, and subnormal numbers stay exact. A NaN stays a quiet NaN in both.
"""

from __future__ import annotations

from llmc.compiler.dtypes import BF16, F16, HALVES
from llmc.compiler.targets.cpu.kernels.ir.text import F32, I1, I16, I32, block, broadcast, define, splat


def helpers() -> str:
    """For each dtype:
    - `round` vectors to it and `widen` them, both in one (`to`), `load` and `store` from memory;
    - the `low` and the `high` half of words as floats;
    - of one word, a float (`low_one`, `high_one`), or that in every lane (`low_all`, `high_all`).
    """
    return "".join(_of(dtype) for dtype in HALVES)


def _of(dtype: str) -> str:
    return "".join(
        (
            define(I16, f"round_{dtype}", f"{F32} %v", block([*_ROUND[dtype], f"ret {I16} %h"])),
            define(F32, f"widen_{dtype}", f"{I16} %h", block([*_WIDEN[dtype], f"ret {F32} %r"])),
            _calls(F32, f"to_{dtype}", f"{F32} %v", [f"%h = call {I16} @llmc_round_{dtype}({F32} %v)"], dtype),
            _calls(F32, f"load_{dtype}", "ptr %p, i32 %n", [f"%h = call {I16} @llmc_load_i16(ptr %p, i32 %n)"], dtype),
            define("i32", f"store_{dtype}", f"{F32} %v, ptr %p, i32 %n", block(_store(dtype))),
            *(
                define(result, f"{dtype}_{half}{suffix}", f"{word} %w", block(_HALF[dtype](half == "high", lanes)))
                for half in ("low", "high")
                for suffix, lanes, result, word in (("", 16, F32, I32), ("_one", 1, "float", "i32"))
            ),
            *(define(F32, f"{dtype}_{half}_all", "i32 %w", _HALF_IN_ALL[dtype](half)) for half in ("low", "high")),
        )
    )


def _calls(result: str, name: str, args: str, bits: list[str], dtype: str) -> str:
    """Converts the halves that `bits` computes to floats."""
    lines = [*bits, f"%r = call {F32} @llmc_widen_{dtype}({I16} %h)", f"ret {F32} %r"]
    return define(result, name, args, block(lines))


def _store(dtype: str) -> list[str]:
    return [
        f"%h = call {I16} @llmc_round_{dtype}({F32} %v)",
        f"%r = call i32 @llmc_store_i16({I16} %h, ptr %p, i32 %n)",
        "ret i32 0",
    ]


def _vector(kind: str, lanes: int) -> str:
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def _number(value: int, lanes: int) -> str:
    return str(value) if lanes == 1 else splat(value, lanes=lanes)


def _half_of_bf16(high: bool, lanes: int) -> list[str]:
    words, floats = _vector("i32", lanes), _vector("float", lanes)
    moved = f"and {words} %w, {_number(-65536, lanes)}" if high else f"shl {words} %w, {_number(16, lanes)}"
    return [f"%s = {moved}", f"%r = bitcast {words} %s to {floats}", f"ret {floats} %r"]


def _half_of_f16(high: bool, lanes: int) -> list[str]:
    words, floats = _vector("i32", lanes), _vector("float", lanes)
    bits, halves = _vector("i16", lanes), _vector("half", lanes)
    return [
        f"%s = lshr {words} %w, {_number(16 if high else 0, lanes)}",
        f"%h = trunc {words} %s to {bits}",
        f"%n = bitcast {bits} %h to {halves}",
        f"%r = fpext {halves} %n to {floats}",
        f"ret {floats} %r",
    ]


def _bf16_in_all(half: str) -> str:
    of_words = [f"%r = call {F32} @llmc_{BF16.name}_{half}({I32} %ws)", f"ret {F32} %r"]
    return broadcast("%ws", "i32", "%w") + block(of_words)


def _f16_in_all(half: str) -> str:
    """Broadcasts the bits before converting them: given 16 equal words, LLVM would convert each half separately."""
    moved = block([f"%s = lshr i32 %w, {16 if half == 'high' else 0}", "%b = trunc i32 %s to i16"])
    return moved + broadcast("%h", "i16", "%b") + block([*_WIDEN[F16.name], f"ret {F32} %r"])


# Converts %v, 16 floats, to the bits %h.
_ROUND = {
    BF16.name: [
        f"%b = bitcast {F32} %v to {I32}",
        f"%t = lshr {I32} %b, {splat(16)}",
        f"%odd = and {I32} %t, {splat(1)}",
        f"%bias = add {I32} %odd, {splat(32767)}",
        f"%sum = add {I32} %b, %bias",
        f"%up = lshr {I32} %sum, {splat(16)}",
        f"%isnan = fcmp uno {F32} %v, %v",
        f"%quiet = or {I32} %t, {splat(64)}",
        f"%c = select {I1} %isnan, {I32} %quiet, {I32} %up",
        f"%h = trunc {I32} %c to {I16}",
    ],
    F16.name: [f"%n = fptrunc {F32} %v to <16 x half>", f"%h = bitcast <16 x half> %n to {I16}"],
}
# Converts the bits %h to the floats %r.
_WIDEN = {
    BF16.name: [
        f"%z = zext {I16} %h to {I32}",
        f"%s = shl {I32} %z, {splat(16)}",
        f"%r = bitcast {I32} %s to {F32}",
    ],
    F16.name: [f"%n = bitcast {I16} %h to <16 x half>", f"%r = fpext <16 x half> %n to {F32}"],
}
_HALF_IN_ALL = {BF16.name: _bf16_in_all, F16.name: _f16_in_all}
_HALF = {BF16.name: _half_of_bf16, F16.name: _half_of_f16}
