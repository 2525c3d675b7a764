"""Vector helpers in LLVM IR text, inlined into the kernels: every operation whose rounding matters is spelt out here.

All vectors are 16 float32 wide; LLVM splits them on AVX2. Products that feed a sum are either a fused fma or pass
through an arithmetic fence, so the code generator never chooses between fused and unfused.
"""

from __future__ import annotations

from llmc.compiler.kernels.ir_text import FMA, F, H, I, M, block, constant, define, float_bits, splat

_IOTA = constant(range(16))


def _broadcast(result: str, kind: str, scalar: str) -> str:
    vector = f"<16 x {kind}>"
    return (
        f"  {result}.i = insertelement {vector} undef, {kind} {scalar}, i32 0\n"
        f"  {result} = shufflevector {vector} {result}.i, {vector} undef, {I} zeroinitializer\n"
    )


def _mask() -> str:
    return _broadcast("%ns", "i32", "%n") + f"  %m = icmp slt {I} {_IOTA}, %ns\n"


def _load(name: str, kind: str) -> str:
    vector = f"<16 x {kind}>"
    align = 2 if kind == "i16" else 4
    suffix = {"float": "v16f32", "i16": "v16i16", "i32": "v16i32"}[kind]
    call = f"call {vector} @llvm.masked.load.{suffix}.p0(ptr %p, i32 {align}, {M} %m, {vector} zeroinitializer)"
    return define(vector, name, "ptr %p, i32 %n", f"{_mask()}  %r = {call}\n  ret {vector} %r\n")


def _store(name: str, kind: str) -> str:
    vector = f"<16 x {kind}>"
    align = 2 if kind == "i16" else 4
    suffix = {"float": "v16f32", "i16": "v16i16", "i32": "v16i32"}[kind]
    call = f"call void @llvm.masked.store.{suffix}.p0({vector} %v, ptr %p, i32 {align}, {M} %m)"
    return define("i32", name, f"{vector} %v, ptr %p, i32 %n", f"{_mask()}  {call}\n  ret i32 0\n")


_DECLARATIONS = f"""
declare {F} @llvm.fma.v16f32({F}, {F}, {F})
declare {F} @llvm.sqrt.v16f32({F})
declare {F} @llvm.roundeven.v16f32({F})
declare {F} @llvm.maxnum.v16f32({F}, {F})
declare {F} @llvm.minnum.v16f32({F}, {F})
declare {F} @llvm.arithmetic.fence.v16f32({F})
declare {F} @llvm.masked.load.v16f32.p0(ptr, i32, {M}, {F})
declare {H} @llvm.masked.load.v16i16.p0(ptr, i32, {M}, {H})
declare {I} @llvm.masked.load.v16i32.p0(ptr, i32, {M}, {I})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.masked.store.v16f32.p0({F}, ptr, i32, {M})
declare void @llvm.masked.store.v16i16.p0({H}, ptr, i32, {M})
declare void @llvm.masked.store.v16i32.p0({I}, ptr, i32, {M})
declare void @llvm.masked.store.v32i16.p0(<32 x i16>, ptr, i32, <32 x i1>)
"""


def _binary(name: str, op: str, fence: bool) -> str:
    body = f"  %r = {op} {F} %a, %b\n"
    if fence:
        body += f"  %f = call {F} @llvm.arithmetic.fence.v16f32({F} %r)\n"
    return define(F, name, f"{F} %a, {F} %b", body + f"  ret {F} {'%f' if fence else '%r'}\n")


def fold(name: str, step: str) -> str:
    """Reduce 16 lanes by halves, lane i with lane i + 8, 4, 2, 1: one fixed tree. The result is in every lane."""
    body, value = "", "%v"
    for half in (8, 4, 2, 1):
        order = constant((lane + half) % 16 for lane in range(16))
        body += f"  %s{half} = shufflevector {F} {value}, {F} undef, {I} {order}\n"
        body += f"  %r{half} = {step.format(a=value, b=f'%s{half}')}\n"
        value = f"%r{half}"
    return define(F, name, f"{F} %v", body + f"  ret {F} {value}\n")


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
        f"%e = shl {I} %i, {splat(23)}",
        f"%b = bitcast {F} {value} to {I}",
        f"%s = add {I} %b, %e",
        f"%y = bitcast {I} %s to {F}",
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
        f"%under = fcmp olt {F} %v, {bottom}",
        f"%cap = call {F} @llvm.minnum.v16f32({F} %v, {F} {top})",
        f"%x = call {F} @llvm.maxnum.v16f32({F} %cap, {F} {bottom})",
        f"%t0 = fmul {F} %x, {log2e}",
        f"%t = call {F} @llvm.arithmetic.fence.v16f32({F} %t0)",
        f"%n = call {F} @llvm.roundeven.v16f32({F} %t)",
        f"%r0 = {FMA.format('%n', ln2_high, '%x')}",
        f"%r = {FMA.format('%n', ln2_low, '%r0')}",
        *_polynomial(*powers),
        f"%i = fptosi {F} %n to {I}",
        *_scale("%q7"),
        f"%z = select {M} %under, {F} zeroinitializer, {F} %y",
        f"ret {F} %z",
    ]
    return define(F, "exp", f"{F} %v", block(lines))


def _exp2() -> str:
    """2^x for x ≤ 0, relative error below 2e-7; 2^0 = 1 exactly, 0 for x ≤ -127 and for NaN."""
    bottom = float_bits("0xC05FC00000000000")
    rounder = float_bits("0x4168000000000000")  # adding 1.5 · 2^23 leaves the nearest integer in the low bits
    powers = ("0x3F55BBA140000000", "0x3F83CEA880000000", "0x3FAC6B7520000000", "0x3FCEBF9BC0000000",
              "0x3FE62E42A0000000", _ONE)  # fmt: skip
    lines = [
        f"%in = fcmp ogt {F} %v, {bottom}",
        f"%x = select {M} %in, {F} %v, {F} {bottom}",
        f"%t = fadd {F} %x, {rounder}",
        f"%n = fsub {F} %t, {rounder}",
        f"%r = fsub {F} %x, %n",
        *_polynomial(*powers),
        f"%i = bitcast {F} %t to {I}",
        *_scale("%q5"),
        f"ret {F} %y",
    ]
    return define(F, "exp2", f"{F} %v", block(lines))


def _round_bf16() -> str:
    """float32 to bfloat16 bits, round to nearest even; a NaN stays a (quiet) NaN."""
    lines = [
        f"%b = bitcast {F} %v to {I}",
        f"%t = lshr {I} %b, {splat(16)}",
        f"%odd = and {I} %t, {splat(1)}",
        f"%bias = add {I} %odd, {splat(32767)}",
        f"%sum = add {I} %b, %bias",
        f"%up = lshr {I} %sum, {splat(16)}",
        f"%isnan = fcmp uno {F} %v, %v",
        f"%quiet = or {I} %t, {splat(64)}",
        f"%r = select {M} %isnan, {I} %quiet, {I} %up",
        f"%h = trunc {I} %r to {H}",
        f"ret {H} %h",
    ]
    return define(H, "round_bf16", f"{F} %v", block(lines))


def _simple() -> str:
    fma = f"  %r = {FMA.format('%a', '%b', '%c')}\n  ret {F} %r\n"
    neg = f"  %n = fneg {F} %a\n  %r = {FMA.format('%n', '%b', '%c')}\n  ret {F} %r\n"
    low = f"  %s = shl {I} %w, {splat(16)}\n  %r = bitcast {I} %s to {F}\n  ret {F} %r\n"
    high = f"  %s = and {I} %w, {splat(-65536)}\n  %r = bitcast {I} %s to {F}\n  ret {F} %r\n"
    wide = (
        f"  %h = call {H} @llmc_load_i16(ptr %p, i32 %n)\n  %z = zext {H} %h to {I}\n"
        f"  %s = shl {I} %z, {splat(16)}\n  %r = bitcast {I} %s to {F}\n  ret {F} %r\n"
    )
    narrow = (
        f"  %h = call {H} @llmc_round_bf16({F} %v)\n"
        f"  %r = call i32 @llmc_store_i16({H} %h, ptr %p, i32 %n)\n  ret i32 0\n"
    )
    root = f"  %r = call {F} @llvm.sqrt.v16f32({F} %a)\n  ret {F} %r\n"
    larger = f"  %r = call {F} @llvm.maxnum.v16f32({F} %a, {F} %b)\n  ret {F} %r\n"
    wins = f"  %c = fcmp ogt {F} %a, %b\n  %r = select {M} %c, {F} %a, {F} %b\n  ret {F} %r\n"  # b for a NaN
    select = (
        _broadcast("%bs", "i32", "%base")
        + _broadcast("%los", "i32", "%lo")
        + _broadcast("%his", "i32", "%hi")
        + f"  %k = add {I} %bs, {_IOTA}\n  %above = icmp sge {I} %k, %los\n  %below = icmp sle {I} %k, %his\n"
        f"  %in = and {M} %above, %below\n  %r = select {M} %in, {F} %v, {F} %other\n  ret {F} %r\n"
    )
    sigmoid = (
        f"  %n = fneg {F} %v\n  %e = call {F} @llmc_exp({F} %n)\n"
        f"  %d = fadd {F} %e, {splat('1.0', 'float')}\n  %r = fdiv {F} %v, %d\n  ret {F} %r\n"
    )
    share = (
        "  %t = sext i32 %task to i64\n  %u = sext i32 %total to i64\n  %n = sext i32 %num to i64\n"
        "  %p = mul i64 %t, %u\n  %q = sdiv i64 %p, %n\n  %r = trunc i64 %q to i32\n  ret i32 %r\n"
    )
    return "".join(
        (
            define("i32", "share", "i32 %task, i32 %total, i32 %num", share),
            define(F, "fma", f"{F} %a, {F} %b, {F} %c", fma),
            define(F, "fnma", f"{F} %a, {F} %b, {F} %c", neg),
            define(F, "bf16_low", f"{I} %w", low),
            define(F, "bf16_high", f"{I} %w", high),
            define(F, "load_bf16", "ptr %p, i32 %n", wide),
            define("i32", "store_bf16", f"{F} %v, ptr %p, i32 %n", narrow),
            define(F, "sqrt", f"{F} %a", root),
            define(F, "max", f"{F} %a, {F} %b", larger),
            define(F, "larger", f"{F} %a, {F} %b", wins),
            define(F, "in_range", f"{F} %v, {F} %other, i32 %base, i32 %lo, i32 %hi", select),
            define(F, "silu", f"{F} %v", sigmoid),
            *(
                define(
                    "i32",
                    name,
                    "ptr %p",
                    f"  call void @llvm.prefetch.p0(ptr %p, i32 0, i32 {level}, i32 1)\n  ret i32 0\n",
                )
                for name, level in (("prefetch", 3), ("prefetch_l2", 2))
            ),
        )
    )


_DOT = (
    f"""
declare {F} @llvm.x86.avx512bf16.dpbf16ps.512({F}, <32 x bfloat>, <32 x bfloat>)
"""
    + define(
        F,
        "dot_bf16",
        f"{F} %c, {I} %a, {I} %b",
        f"""  %x = bitcast {I} %a to <32 x bfloat>
  %y = bitcast {I} %b to <32 x bfloat>
  %r = call {F} @llvm.x86.avx512bf16.dpbf16ps.512({F} %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret {F} %r
""",
    )
    + define(
        "i32",
        "narrow_bf16",
        f"{F} %v, ptr %p",
        f"""  %h = fptrunc {F} %v to <16 x bfloat>
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
        body += f"  %h0 = call {H} @llmc_round_bf16({F} %v)\n"
        keep = constant(("true" if lane < count else "false" for lane in range(16)), "i1")
        body += f"  %h = select {M} {keep}, {H} %h0, {H} zeroinitializer\n"
        body += f"  %w = bitcast {H} %h to <8 x i32>\n"
    source = "%v" if dtype == "f32" else "%w"
    if row_tile == 1 and words == lanes:
        body += f"  store <{lanes} x {kind}> {source}, ptr %p, align 4\n"
    else:
        for lane in range(words):
            body += f"  %e{lane} = extractelement <{lanes} x {kind}> {source}, i32 {lane}\n"
            body += f"  %a{lane} = getelementptr {kind}, ptr %p, i64 {lane * row_tile}\n"
            body += f"  store {kind} %e{lane}, ptr %a{lane}, align 4\n"
    return define("i32", name, f"{F} %v, ptr %p", body + "  ret i32 0\n")


def scatter_name(dtype: str, stride: int, count: int, odd: int = 0) -> str:
    """Helper that stores `count` elements of one row, words of one or two elements `stride` words apart.

    odd: the first element is the second one of its word.
    """
    return f"scatter_{dtype}_{stride}_{count}_{odd}"


def _scatter(dtype: str, stride: int, count: int, odd: int) -> str:
    """Whole words where two elements of one are at hand."""
    lanes = 1 if dtype == "f32" else 2
    kind, source = ("float", f"{F} %v") if lanes == 1 else ("i16", f"{H} %h")
    body = ""
    if lanes == 2:
        body = f"  %h = call {H} @llmc_round_bf16({F} %v)\n  %w = bitcast {H} %h to <8 x i32>\n"
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
    return define("i32", scatter_name(dtype, stride, count, odd), f"{F} %v, ptr %p", body + "  ret i32 0\n")


def half_name(count: int) -> str:
    """Helper that stores `count` bf16 as one half of as many neighbouring words: (values, first word, half)."""
    return f"half_bf16_{count}"


def _half(count: int) -> str:
    """Leaves the other halves alone, which another thread may be writing."""
    lanes = constant(lane // 2 if lane % 2 == 0 else "undef" for lane in range(32))
    mask = constant(("true" if lane % 2 == 0 and lane // 2 < count else "false" for lane in range(32)), "i1")
    body = (
        f"  %h = call {H} @llmc_round_bf16({F} %v)\n"
        f"  %w = shufflevector {H} %h, {H} undef, <32 x i32> {lanes}\n"
        "  %a = getelementptr i16, ptr %p, i32 %half\n"
        f"  call void @llvm.masked.store.v32i16.p0(<32 x i16> %w, ptr %a, i32 2, <32 x i1> {mask})\n  ret i32 0\n"
    )
    return define("i32", half_name(count), f"{F} %v, ptr %p, i32 %half", body)


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
        fold("sum_lanes", f"fadd {F} {{a}}, {{b}}"),
        fold("max_lanes", f"call {F} @llvm.maxnum.v16f32({F} {{a}}, {F} {{b}})"),
        _exp(),
        _exp2(),
        _round_bf16(),
        _simple(),
        _DOT if bf16_dot else "",
        *(_put(*p) for p in sorted(set(puts))),
        *(_scatter(*s) for s in sorted(set(scatters))),
        *(_half(count) for count in sorted(set(halves))),
        f'attributes #0 = {{ alwaysinline nounwind "target-cpu"="{mcpu}" }}\n',
    ]
    return "".join(parts)
