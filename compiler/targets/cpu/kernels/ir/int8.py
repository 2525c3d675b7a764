"""Quantized numbers: products of bytes, and conversion between numbers and floats. Integer sums are exact."""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir.lookup import lookup
from llmc.compiler.targets.cpu.kernels.ir.text import F32, I32, block, constant, define, kept_sum, splat
from llmc.compiler.targets.cpu.target import Target

_B = "<64 x i8>"


def dot(target: Target) -> str:
    """acc + Σ of 4 products of unsigned bytes of w and signed bytes of x, per lane."""
    args = f"{I32} %acc, {I32} %w, {I32} %x"
    if target.int8_dot:
        intrinsic = f"{I32} @llvm.x86.avx512.vpdpbusd.512"
        lines = [
            f"%wb = bitcast {I32} %w to {_B}",
            f"%xb = bitcast {I32} %x to {_B}",
            f"%r = call {intrinsic}({I32} %acc, {_B} %wb, {_B} %xb)",
            f"ret {I32} %r",
        ]
        return f"declare {intrinsic}({I32}, {_B}, {_B})\n" + define(I32, "dot_u8s8", args, block(lines))
    # Even and odd bytes as 16-bit numbers: sums of two products cannot overflow 32 bits.
    h = "<32 x i16>"
    eight = splat(8, "i16", 32)
    lines = [
        f"%wh = bitcast {I32} %w to {h}",
        f"%xh = bitcast {I32} %x to {h}",
        f"%w0 = and {h} %wh, {splat(255, 'i16', 32)}",
        f"%w1 = lshr {h} %wh, {eight}",
        f"%xs = shl {h} %xh, {eight}",
        f"%x0 = ashr {h} %xs, {eight}",
        f"%x1 = ashr {h} %xh, {eight}",
    ]
    if target.lanes == 16:
        declaration = f"declare {I32} @llvm.x86.avx512.pmaddw.d.512({h}, {h})\n"
        lines += [f"%p{i} = call {I32} @llvm.x86.avx512.pmaddw.d.512({h} %w{i}, {h} %x{i})" for i in (0, 1)]
    else:
        half, eight_words = "<16 x i16>", "<8 x i32>"
        declaration = f"declare {eight_words} @llvm.x86.avx2.pmadd.wd({half}, {half})\n"
        order = [constant(range(first, first + 16)) for first in (0, 16)]
        whole = constant(range(16))
        for i in (0, 1):
            for part in (0, 1):
                for name in ("w", "x"):
                    value = f"{h} %{name}{i}"
                    lines.append(f"%{name}{i}{part} = shufflevector {value}, {h} undef, <16 x i32> {order[part]}")
                call = f"call {eight_words} @llvm.x86.avx2.pmadd.wd({half} %w{i}{part}, {half} %x{i}{part})"
                lines.append(f"%q{i}{part} = {call}")
            lines.append(f"%p{i} = shufflevector {eight_words} %q{i}0, {eight_words} %q{i}1, <16 x i32> {whole}")
    lines += [f"%s = add {I32} %p0, %p1", f"%t = add {I32} %acc, %s"]
    # With AVX2 there are too few registers in either order.
    lines += [*kept_sum("%t", "%r"), f"ret {I32} %r"] if target.lanes == 16 else [f"ret {I32} %t"]
    return declaration + define(I32, "dot_u8s8", args, block(lines))


def _byte(place: int) -> str:
    """Signed byte `place` of each lane · 2²⁴ as float32, exactly: the byte moves to the top of its lane."""
    order = []
    for lane in range(16):
        order += [64, 64, 64, lane * 4 + place]
    shuffle = constant(order)
    lines = [
        f"%b = bitcast {I32} %w to {_B}",
        f"%s = shufflevector {_B} %b, {_B} zeroinitializer, <64 x i32> {shuffle}",
        f"%i = bitcast {_B} %s to {I32}",
        f"%r = sitofp {I32} %i to {F32}",
        f"ret {F32} %r",
    ]
    return define(F32, f"byte_{place}", f"{I32} %w", block(lines))


def bytes_to_floats() -> str:
    """signed_bytes: unsigned bytes less 128; byte_0 … byte_3. Apart, or LLVM would give each of these its own xor."""
    lines = [f"%r = xor {I32} %w, {splat(-2139062144)}", f"ret {I32} %r"]
    return define(I32, "signed_bytes", f"{I32} %w", block(lines)) + "".join(_byte(place) for place in range(4))


def nibble(target: Target) -> str:
    """table[low 4 bits of each lane], for a 16-number table with constant step."""
    if target.lanes == 16:
        return lookup(target, "nibble")
    # Its first number determines the table.
    first = splat(0)
    lines = [
        f"%n = and {I32} %w, {splat(15)}",
        f"%f = sitofp {I32} %n to {F32}",
        f"%z = shufflevector {F32} %table, {F32} undef, {I32} {first}",
        f"%r = fadd {F32} %f, %z",
        f"ret {F32} %r",
    ]
    return define(F32, "nibble", f"{I32} %w, {F32} %table", block(lines))


def _rounded() -> str:
    """v · inverse rounded to nearest even and clamped to ±127; −127 for NaN."""
    limit = {sign: f"splat (float {sign}127.0)" for sign in ("", "-")}
    lines = [
        f"%t = fmul {F32} %v, %inverse",
        f"%l = call {F32} @llvm.maxnum.v16f32({F32} %t, {F32} {limit['-']})",
        f"%h = call {F32} @llvm.minnum.v16f32({F32} %l, {F32} {limit['']})",
        f"%n = call {F32} @llvm.roundeven.v16f32({F32} %h)",
        f"%r = fptosi {F32} %n to {I32}",
        f"ret {I32} %r",
    ]
    return define(I32, "rounded", f"{F32} %v, {F32} %inverse", block(lines))


def _reductions() -> str:
    text = ""
    for name, intrinsic in (("lanes_max", "smax"), ("lanes_sum", "add")):
        function = f"i32 @llvm.vector.reduce.{intrinsic}.v16i32"
        lines = [f"%r = call {function}({I32} %v)", "ret i32 %r"]
        text += f"declare {function}({I32})\n" + define("i32", name, f"{I32} %v", block(lines))
    return text


def put_name(row_tile: int, words: int) -> str:
    """Name of the helper that stores the first `words` words of four numbers, `row_tile` words apart."""
    return f"put_i8_{row_tile}_{words}"


def _put(row_tile: int, words: int) -> str:
    lines = [f"%n = trunc {I32} %v to <16 x i8>", "%w = bitcast <16 x i8> %n to <4 x i32>"]
    if row_tile == 1 and words == 4:
        lines.append("store <4 x i32> %w, ptr %p, align 4")
    else:
        for word in range(words):
            lines.append(f"%e{word} = extractelement <4 x i32> %w, i32 {word}")
            lines.append(f"%a{word} = getelementptr i32, ptr %p, i64 {word * row_tile}")
            lines.append(f"store i32 %e{word}, ptr %a{word}, align 4")
    return define("i32", put_name(row_tile, words), f"{I32} %v, ptr %p", block([*lines, "ret i32 0"]))


def _tiles() -> str:
    """Helpers for row tiles whose 8 rows are in the lanes, twice: two words of each row at once.

    rows_max, rows_sum: combine both halves; the result is in both.
    store_rows: stores the first half.
    join_even, join_odd: of two vectors of floats, which hold four elements of each row. They are the low and high
    halves of a vector of bf16.
    put_rows: the bytes of two such vectors, as words of four.
    """
    half, swapped = "<8 x i32>", constant([*range(8, 16), *range(8)])
    first, second = constant(range(8)), constant(range(8, 16))
    text = ""
    for name, operation in (("rows_max", "smax"), ("rows_sum", "add")):
        step = f"add {I32} %v, %s"
        if operation == "smax":
            step = f"call {I32} @llvm.smax.v16i32({I32} %v, {I32} %s)"
            text += f"declare {I32} @llvm.smax.v16i32({I32}, {I32})\n"
        lines = [f"%s = shufflevector {I32} %v, {I32} undef, {I32} {swapped}", f"%r = {step}", f"ret {I32} %r"]
        text += define(I32, name, f"{I32} %v", block(lines))
    store = f"store {half} %h, ptr %p, align 4"
    lines = [f"%h = shufflevector {I32} %v, {I32} undef, {half} {first}", store, "ret i32 0"]
    text += define("i32", "store_rows", f"{I32} %v, ptr %p", block(lines))
    for name, order in (("even", [*range(8), *range(16, 24)]), ("odd", [*range(8, 16), *range(24, 32)])):
        lines = [f"%r = shufflevector {I32} %a, {I32} %b, {I32} {constant(order)}", f"ret {I32} %r"]
        text += define(I32, f"join_{name}", f"{I32} %a, {I32} %b", block(lines))
    lines = [
        f"%e = and {I32} %even, {splat(255)}",
        f"%o = and {I32} %odd, {splat(255)}",
        f"%s = shl {I32} %o, {splat(8)}",
        f"%w = or {I32} %e, %s",
        f"%l = shufflevector {I32} %w, {I32} undef, {half} {first}",
        f"%u = shufflevector {I32} %w, {I32} undef, {half} {second}",
        f"%t = shl {half} %u, splat (i32 16)",
        f"%h = or {half} %l, %t",
        store,
        "ret i32 0",
    ]
    return text + define("i32", "put_rows", f"{I32} %even, {I32} %odd, ptr %p", block(lines))


def steps() -> str:
    """step_times, step_plus: from the bytes step + 16 · zero of 16 columns at p.

    stepped: numbers · times + plus, bytewise; no byte overflows.
    """
    words, halves = "<64 x i8>", "<32 x i16>"
    low = splat(15, "i16", 32)
    read = [
        "%b = load <16 x i8>, ptr %p, align 1",
        f"%w = shufflevector <16 x i8> %b, <16 x i8> undef, <64 x i32> {constant(byte // 4 for byte in range(64))}",
        f"%h = bitcast {words} %w to {halves}",
        f"%s = and {halves} %h, {low}",
    ]
    times = [*read, f"%r = bitcast {halves} %s to {I32}", f"ret {I32} %r"]
    plus = [
        *read,
        f"%u = lshr {halves} %h, {splat(4, 'i16', 32)}",
        f"%z = and {halves} %u, {low}",
        f"%t = mul {halves} %s, %z",
        f"%d = mul {halves} %t, {splat(0x101, 'i16', 32)}",
        f"%m = bitcast {halves} %d to {words}",
        f"%c = sub {words} {splat(-128, 'i8', 64)}, %m",
        f"%r = bitcast {words} %c to {I32}",
        f"ret {I32} %r",
    ]
    stepped = [
        f"%n = bitcast {I32} %numbers to {halves}",
        f"%t = bitcast {I32} %times to {halves}",
        f"%m = mul {halves} %n, %t",
        f"%b = bitcast {halves} %m to {words}",
        f"%p = bitcast {I32} %plus to {words}",
        f"%s = add {words} %b, %p",
        f"%r = bitcast {words} %s to {I32}",
        f"ret {I32} %r",
    ]
    args = f"{I32} %numbers, {I32} %times, {I32} %plus"
    return (
        define(I32, "step_times", "ptr %p", block(times))
        + define(I32, "step_plus", "ptr %p", block(plus))
        + define(I32, "stepped", args, block(stepped))
    )


def rounding_helpers(puts: tuple[tuple[int, int], ...]) -> str:
    """rounded, lanes_max, lanes_sum and stores. puts: (row_tile, words) of each store."""
    return _rounded() + _reductions() + "".join(_put(*p) for p in sorted(set(puts)))


def tile_rounding_helpers() -> str:
    """rounded, and the helpers of `_tiles`."""
    return _rounded() + _tiles()
