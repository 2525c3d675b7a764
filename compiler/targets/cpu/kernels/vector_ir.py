"""Vector helpers in LLVM IR text, inlined into the kernels: every operation whose rounding matters is spelt out here.

All vectors are 16 float32 wide; LLVM splits them on AVX2. Products that feed a sum are either a fused fma or pass
through an arithmetic fence, so the code generator never chooses between fused and unfused.
"""

from __future__ import annotations

from llmc.compiler.targets.cpu.kernels.ir_text import F32, FMA, I1, I16, I32, block, constant, define, float_bits, splat

_IOTA = constant(range(16))


def _broadcast(result: str, kind: str, scalar: str) -> str:
    vector = f"<16 x {kind}>"
    return (
        f"  {result}.i = insertelement {vector} undef, {kind} {scalar}, i32 0\n"
        f"  {result} = shufflevector {vector} {result}.i, {vector} undef, {I32} zeroinitializer\n"
    )


def _mask() -> str:
    return _broadcast("%ns", "i32", "%n") + f"  %m = icmp slt {I32} {_IOTA}, %ns\n"


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
"""


def _binary(name: str, op: str, fence: bool) -> str:
    body = f"  %r = {op} {F32} %a, %b\n"
    if fence:
        body += f"  %f = call {F32} @llvm.arithmetic.fence.v16f32({F32} %r)\n"
    return define(F32, name, f"{F32} %a, {F32} %b", body + f"  ret {F32} {'%f' if fence else '%r'}\n")


def fold(name: str, step: str) -> str:
    """Reduce 16 lanes by halves, lane i with lane i + 8, 4, 2, 1: one fixed tree. The result is in every lane."""
    body, value = "", "%v"
    for half in (8, 4, 2, 1):
        order = constant((lane + half) % 16 for lane in range(16))
        body += f"  %s{half} = shufflevector {F32} {value}, {F32} undef, {I32} {order}\n"
        body += f"  %r{half} = {step.format(a=value, b=f'%s{half}')}\n"
        value = f"%r{half}"
    return define(F32, name, f"{F32} %v", body + f"  ret {F32} {value}\n")


def _polynomial(*coefficients: str) -> list[str]:
    """Horner's rule in %r, highest power first: %q1, %q2, …, the last one the value."""
    first, *rest = map(float_bits, coefficients)
    lines, factors = [], ("%r", first)
    for number, coefficient in enumerate(rest, 1):
        lines.append(f"%q{number} = {FMA.format(*factors, coefficient)}")
        factors = (f"%q{number}", "%r")
    return lines


def _scale(value: str) -> list[str]:
    """%y = value · 2^%i, in the field of the exponent."""
    return [
        f"%e = shl {I32} %i, {splat(23)}",
        f"%b = bitcast {F32} {value} to {I32}",
        f"%s = add {I32} %b, %e",
        f"%y = bitcast {I32} %s to {F32}",
    ]


_ONE = "0x3FF0000000000000"


def _exp() -> str:
    """exp(x), relative error below 2e-7; 0 below -87.33, exp(0) = 1 exactly; x above 88 is taken as 88."""
    log2e, ln2_high, ln2_low = (
        float_bits("0x3FF7154760000000"),
        float_bits("0xBFE6300000000000"),
        float_bits("0x3F2BD01060000000"),
    )
    top, bottom = float_bits("0x4056000000000000"), float_bits("0xC055D51EC0000000")
    powers = ("0x3F2A0D2CE0000000", "0x3F56E879C0000000", "0x3F81112100000000", "0x3FA5553820000000",
              "0x3FC5555540000000", "0x3FE0000000000000", _ONE, _ONE)  # fmt: skip
    lines = [
        f"%under = fcmp olt {F32} %v, {bottom}",
        f"%cap = call {F32} @llvm.minnum.v16f32({F32} %v, {F32} {top})",
        f"%x = call {F32} @llvm.maxnum.v16f32({F32} %cap, {F32} {bottom})",
        f"%t0 = fmul {F32} %x, {log2e}",
        f"%t = call {F32} @llvm.arithmetic.fence.v16f32({F32} %t0)",
        f"%n = call {F32} @llvm.roundeven.v16f32({F32} %t)",
        f"%r0 = {FMA.format('%n', ln2_high, '%x')}",
        f"%r = {FMA.format('%n', ln2_low, '%r0')}",
        *_polynomial(*powers),
        f"%i = fptosi {F32} %n to {I32}",
        *_scale("%q7"),
        f"%z = select {I1} %under, {F32} zeroinitializer, {F32} %y",
        f"ret {F32} %z",
    ]
    return define(F32, "exp", f"{F32} %v", block(lines))


def _exp2() -> str:
    """2^x for x ≤ 0, relative error below 2e-7; 2^0 = 1 exactly, 0 for x ≤ -127 and for NaN."""
    bottom = float_bits("0xC05FC00000000000")
    rounder = float_bits("0x4168000000000000")  # adding 1.5 · 2^23 leaves the nearest integer in the low bits
    powers = ("0x3F55BBA140000000", "0x3F83CEA880000000", "0x3FAC6B7520000000", "0x3FCEBF9BC0000000",
              "0x3FE62E42A0000000", _ONE)  # fmt: skip
    lines = [
        f"%in = fcmp ogt {F32} %v, {bottom}",
        f"%x = select {I1} %in, {F32} %v, {F32} {bottom}",
        f"%t = fadd {F32} %x, {rounder}",
        f"%n = fsub {F32} %t, {rounder}",
        f"%r = fsub {F32} %x, %n",
        *_polynomial(*powers),
        f"%i = bitcast {F32} %t to {I32}",
        *_scale("%q5"),
        f"ret {F32} %y",
    ]
    return define(F32, "exp2", f"{F32} %v", block(lines))


def _round_bf16() -> str:
    """float32 to bfloat16 bits, round to nearest even; a NaN stays a (quiet) NaN."""
    lines = [
        f"%b = bitcast {F32} %v to {I32}",
        f"%t = lshr {I32} %b, {splat(16)}",
        f"%odd = and {I32} %t, {splat(1)}",
        f"%bias = add {I32} %odd, {splat(32767)}",
        f"%sum = add {I32} %b, %bias",
        f"%up = lshr {I32} %sum, {splat(16)}",
        f"%isnan = fcmp uno {F32} %v, %v",
        f"%quiet = or {I32} %t, {splat(64)}",
        f"%r = select {I1} %isnan, {I32} %quiet, {I32} %up",
        f"%h = trunc {I32} %r to {I16}",
        f"ret {I16} %h",
    ]
    return define(I16, "round_bf16", f"{F32} %v", block(lines))


def _simple() -> str:
    fma = f"  %r = {FMA.format('%a', '%b', '%c')}\n  ret {F32} %r\n"
    neg = f"  %n = fneg {F32} %a\n  %r = {FMA.format('%n', '%b', '%c')}\n  ret {F32} %r\n"
    low = f"  %s = shl {I32} %w, {splat(16)}\n  %r = bitcast {I32} %s to {F32}\n  ret {F32} %r\n"
    high = f"  %s = and {I32} %w, {splat(-65536)}\n  %r = bitcast {I32} %s to {F32}\n  ret {F32} %r\n"
    wide = (
        f"  %h = call {I16} @llmc_load_i16(ptr %p, i32 %n)\n  %z = zext {I16} %h to {I32}\n"
        f"  %s = shl {I32} %z, {splat(16)}\n  %r = bitcast {I32} %s to {F32}\n  ret {F32} %r\n"
    )
    narrow = (
        f"  %h = call {I16} @llmc_round_bf16({F32} %v)\n"
        f"  %r = call i32 @llmc_store_i16({I16} %h, ptr %p, i32 %n)\n  ret i32 0\n"
    )
    root = f"  %r = call {F32} @llvm.sqrt.v16f32({F32} %a)\n  ret {F32} %r\n"
    larger = f"  %r = call {F32} @llvm.maxnum.v16f32({F32} %a, {F32} %b)\n  ret {F32} %r\n"
    wins = f"  %c = fcmp ogt {F32} %a, %b\n  %r = select {I1} %c, {F32} %a, {F32} %b\n  ret {F32} %r\n"  # b for a NaN
    select = (
        _broadcast("%bs", "i32", "%base")
        + _broadcast("%los", "i32", "%lo")
        + _broadcast("%his", "i32", "%hi")
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
            define(F32, "bf16_low", f"{I32} %w", low),
            define(F32, "bf16_high", f"{I32} %w", high),
            define(F32, "load_bf16", "ptr %p, i32 %n", wide),
            define("i32", "store_bf16", f"{F32} %v, ptr %p, i32 %n", narrow),
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


_DOT = (
    f"""
declare {F32} @llvm.x86.avx512bf16.dpbf16ps.512({F32}, <32 x bfloat>, <32 x bfloat>)
"""
    + define(
        F32,
        "dot_bf16",
        f"{F32} %c, {I32} %a, {I32} %b",
        f"""  %x = bitcast {I32} %a to <32 x bfloat>
  %y = bitcast {I32} %b to <32 x bfloat>
  %r = call {F32} @llvm.x86.avx512bf16.dpbf16ps.512({F32} %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret {F32} %r
""",
    )
    + define(
        "i32",
        "narrow_bf16",
        f"{F32} %v, ptr %p",
        f"""  %h = fptrunc {F32} %v to <16 x bfloat>
  store <16 x bfloat> %h, ptr %p, align 32
  ret i32 0
""",
    )
)


def put_name(dtype: str, row_tile: int, count: int) -> str:
    """Helper that stores `count` consecutive elements of one row of a packed activation."""
    return f"put_{dtype}_{row_tile}_{count}"


def _put(dtype: str, row_tile: int, count: int) -> str:
    """Lanes past `count` are ignored; for bf16 an odd last element gets a zero partner."""
    name = put_name(dtype, row_tile, count)
    words = count if dtype == "f32" else (count + 1) // 2
    lanes = 16 if dtype == "f32" else 8
    kind = "float" if dtype == "f32" else "i32"
    body = ""
    if dtype == "bf16":
        body += f"  %h0 = call {I16} @llmc_round_bf16({F32} %v)\n"
        keep = constant(("true" if lane < count else "false" for lane in range(16)), "i1")
        body += f"  %h = select {I1} {keep}, {I16} %h0, {I16} zeroinitializer\n"
        body += f"  %w = bitcast {I16} %h to <8 x i32>\n"
    source = "%v" if dtype == "f32" else "%w"
    if row_tile == 1 and words == lanes:
        body += f"  store <{lanes} x {kind}> {source}, ptr %p, align 4\n"
    else:
        for lane in range(words):
            body += f"  %e{lane} = extractelement <{lanes} x {kind}> {source}, i32 {lane}\n"
            body += f"  %a{lane} = getelementptr {kind}, ptr %p, i64 {lane * row_tile}\n"
            body += f"  store {kind} %e{lane}, ptr %a{lane}, align 4\n"
    return define("i32", name, f"{F32} %v, ptr %p", body + "  ret i32 0\n")


def _put_tile() -> str:
    """put_tile_bf16 of 16 elements of each of 8 rows, %v0 … %v7: 8 words of 8 rows, a row tile of a packed activation.

    Two rows a vector, then words of four rows, then of eight.
    """
    lines = []
    for row in range(8):
        lines.append(f"%h{row} = call {I16} @llmc_round_bf16({F32} %v{row})")
        lines.append(f"%w{row} = bitcast {I16} %h{row} to <8 x i32>")
    for row in range(0, 8, 2):
        both = f"<8 x i32> %w{row}, <8 x i32> %w{row + 1}"
        lines.append(f"%p{row} = shufflevector {both}, {I32} {constant(range(16))}")
    for half in range(2):
        order = constant(row * 8 + half * 4 + word for word in range(4) for row in range(4))
        for row in (0, 4):
            lines.append(f"%q{half}{row} = shufflevector {I32} %p{row}, {I32} %p{row + 2}, {I32} {order}")
    for pair in range(4):
        half, word = divmod(2 * pair, 4)
        order = constant(side * 16 + w * 4 + row for w in (word, word + 1) for side in range(2) for row in range(4))
        lines.append(f"%r{pair} = shufflevector {I32} %q{half}0, {I32} %q{half}4, {I32} {order}")
        lines.append(f"%a{pair} = getelementptr i32, ptr %p, i64 {16 * pair}")
        lines.append(f"store {I32} %r{pair}, ptr %a{pair}, align 4")
    args = ", ".join(f"{F32} %v{row}" for row in range(8))
    return define("i32", "put_tile_bf16", f"{args}, ptr %p", block([*lines, "ret i32 0"]))


def scatter_name(dtype: str, stride: int, count: int, odd: int = 0) -> str:
    """Helper that stores `count` elements of one row, words of one or two elements `stride` words apart.

    odd: the first element is the second one of its word.
    """
    return f"scatter_{dtype}_{stride}_{count}_{odd}"


def _scatter(dtype: str, stride: int, count: int, odd: int) -> str:
    """Whole words where two elements of one are at hand."""
    lanes = 1 if dtype == "f32" else 2
    kind, source = ("float", f"{F32} %v") if lanes == 1 else ("i16", f"{I16} %h")
    body = ""
    if lanes == 2:
        body = f"  %h = call {I16} @llmc_round_bf16({F32} %v)\n  %w = bitcast {I16} %h to <8 x i32>\n"
    lane = 0
    while lane < count:
        word, half = divmod(lane + odd, lanes)
        pair = lanes == 2 and not odd and lane % 2 == 0 and lane + 1 < count
        stored = "i32" if pair else kind
        from_, index = ("<8 x i32> %w", lane // 2) if pair else (source, lane)
        body += f"  %e{lane} = extractelement {from_}, i32 {index}\n"
        body += f"  %a{lane} = getelementptr {kind}, ptr %p, i64 {word * stride * lanes + half}\n"
        body += f"  store {stored} %e{lane}, ptr %a{lane}, align {2 if stored == 'i16' else 4}\n"
        lane += 2 if pair else 1
    return define("i32", scatter_name(dtype, stride, count, odd), f"{F32} %v, ptr %p", body + "  ret i32 0\n")


def half_name(count: int) -> str:
    """Helper that stores `count` bf16 as one half of as many neighbouring words: (values, first word, half)."""
    return f"half_bf16_{count}"


def _half(count: int) -> str:
    """Leaves the other halves alone, which another thread may be writing."""
    lanes = constant(lane // 2 if lane % 2 == 0 else "undef" for lane in range(32))
    mask = constant(("true" if lane % 2 == 0 and lane // 2 < count else "false" for lane in range(32)), "i1")
    body = (
        f"  %h = call {I16} @llmc_round_bf16({F32} %v)\n"
        f"  %w = shufflevector {I16} %h, {I16} undef, <32 x i32> {lanes}\n"
        "  %a = getelementptr i16, ptr %p, i32 %half\n"
        f"  call void @llvm.masked.store.v32i16.p0(<32 x i16> %w, ptr %a, i32 2, <32 x i1> {mask})\n  ret i32 0\n"
    )
    return define("i32", half_name(count), f"{F32} %v, ptr %p, i32 %half", body)


def helpers(
    mcpu: str,
    bf16_dot: bool = False,
    puts: tuple[tuple[str, int, int], ...] = (),
    scatters: tuple[tuple[str, int, int, int], ...] = (),
    halves: tuple[int, ...] = (),
) -> str:
    """The IR text of all helpers, and those named by `put_name`, `scatter_name` and `half_name` of these arguments."""
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
        _exp(),
        _exp2(),
        _round_bf16(),
        _simple(),
        _DOT if bf16_dot else "",
        *(_put(*p) for p in sorted(set(puts))),
        _put_tile() if ("bf16", 8, 16) in puts else "",
        *(_scatter(*s) for s in sorted(set(scatters))),
        *(_half(count) for count in sorted(set(halves))),
        f'attributes #0 = {{ alwaysinline nounwind "target-cpu"="{mcpu}" }}\n',
    ]
    return "".join(parts)
