"""Vector helpers in LLVM IR text, inlined into the kernels: every operation whose rounding matters is spelt out here.

All vectors are 16 float32 wide; LLVM splits them on AVX2. Products that feed a sum are either a fused fma or pass
through an arithmetic fence, so the code generator never chooses between fused and unfused.
"""

from __future__ import annotations

_SHAPE = "<" + ", ".join(["i32 {}"] * 16) + ">"
_IOTA = _SHAPE.format(*range(16))
_F = "<16 x float>"
_I = "<16 x i32>"
_H = "<16 x i16>"
_M = "<16 x i1>"


def _splat(value: str, kind: str) -> str:
    """A constant vector."""
    return "<" + ", ".join([f"{kind} {value}"] * 16) + ">"


def _broadcast(result: str, kind: str, scalar: str) -> str:
    vector = f"<16 x {kind}>"
    return (
        f"  {result}.i = insertelement {vector} undef, {kind} {scalar}, i32 0\n"
        f"  {result} = shufflevector {vector} {result}.i, {vector} undef, {_I} zeroinitializer\n"
    )


def _define(result: str, name: str, args: str, body: str) -> str:
    return f"define linkonce_odr hidden {result} @llmc_{name}({args}) #0 {{\n{body}}}\n"


def _mask() -> str:
    return _broadcast("%ns", "i32", "%n") + f"  %m = icmp slt {_I} {_IOTA}, %ns\n"


def _load(name: str, kind: str) -> str:
    vector = f"<16 x {kind}>"
    align = 2 if kind == "i16" else 4
    suffix = {"float": "v16f32", "i16": "v16i16", "i32": "v16i32"}[kind]
    call = f"call {vector} @llvm.masked.load.{suffix}.p0(ptr %p, i32 {align}, {_M} %m, {vector} zeroinitializer)"
    return _define(vector, name, "ptr %p, i32 %n", f"{_mask()}  %r = {call}\n  ret {vector} %r\n")


def _store(name: str, kind: str) -> str:
    vector = f"<16 x {kind}>"
    align = 2 if kind == "i16" else 4
    suffix = {"float": "v16f32", "i16": "v16i16", "i32": "v16i32"}[kind]
    call = f"call void @llvm.masked.store.{suffix}.p0({vector} %v, ptr %p, i32 {align}, {_M} %m)"
    return _define("i32", name, f"{vector} %v, ptr %p, i32 %n", f"{_mask()}  {call}\n  ret i32 0\n")


_DECLARATIONS = f"""
declare {_F} @llvm.fma.v16f32({_F}, {_F}, {_F})
declare {_F} @llvm.sqrt.v16f32({_F})
declare {_F} @llvm.roundeven.v16f32({_F})
declare {_F} @llvm.maxnum.v16f32({_F}, {_F})
declare {_F} @llvm.minnum.v16f32({_F}, {_F})
declare {_F} @llvm.arithmetic.fence.v16f32({_F})
declare {_F} @llvm.masked.load.v16f32.p0(ptr, i32, {_M}, {_F})
declare {_H} @llvm.masked.load.v16i16.p0(ptr, i32, {_M}, {_H})
declare {_I} @llvm.masked.load.v16i32.p0(ptr, i32, {_M}, {_I})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.masked.store.v16f32.p0({_F}, ptr, i32, {_M})
declare void @llvm.masked.store.v16i16.p0({_H}, ptr, i32, {_M})
declare void @llvm.masked.store.v16i32.p0({_I}, ptr, i32, {_M})
declare void @llvm.masked.store.v32i16.p0(<32 x i16>, ptr, i32, <32 x i1>)
"""


def _binary(name: str, op: str, fence: bool) -> str:
    body = f"  %r = {op} {_F} %a, %b\n"
    if fence:
        body += f"  %f = call {_F} @llvm.arithmetic.fence.v16f32({_F} %r)\n"
    return _define(_F, name, f"{_F} %a, {_F} %b", body + f"  ret {_F} {'%f' if fence else '%r'}\n")


def fold(name: str, step: str) -> str:
    """Reduce 16 lanes by halves, lane i with lane i + 8, 4, 2, 1: one fixed tree. The result is in every lane."""
    body, value = "", "%v"
    for half in (8, 4, 2, 1):
        order = _SHAPE.format(*[(lane + half) % 16 for lane in range(16)])
        body += f"  %s{half} = shufflevector {_F} {value}, {_F} undef, {_I} {order}\n"
        body += f"  %r{half} = {step.format(a=value, b=f'%s{half}')}\n"
        value = f"%r{half}"
    return _define(_F, name, f"{_F} %v", body + f"  ret {_F} {value}\n")


def _exp() -> str:
    """exp(x), relative error below 2e-7; 0 below -87.33, exp(0) = 1 exactly; x above 88 is taken as 88."""
    hexed = {  # LLVM spells float constants as the bits of the equal double
        "log2e": "0x3FF7154760000000",
        "ln2hi": "0xBFE6300000000000",
        "ln2lo": "0x3F2BD01060000000",
        "p0": "0x3F2A0D2CE0000000",
        "p1": "0x3F56E879C0000000",
        "p2": "0x3F81112100000000",
        "p3": "0x3FA5553820000000",
        "p4": "0x3FC5555540000000",
        "p5": "0x3FE0000000000000",
        "one": "0x3FF0000000000000",
        "top": "0x4056000000000000",
        "bottom": "0xC055D51EC0000000",
    }
    c = {name: _splat(value, "float") for name, value in hexed.items()}
    fma = f"call {_F} @llvm.fma.v16f32({_F} {{}}, {_F} {{}}, {_F} {{}})"
    lines = [
        f"%under = fcmp olt {_F} %v, {c['bottom']}",
        f"%cap = call {_F} @llvm.minnum.v16f32({_F} %v, {_F} {c['top']})",
        f"%x = call {_F} @llvm.maxnum.v16f32({_F} %cap, {_F} {c['bottom']})",
        f"%t0 = fmul {_F} %x, {c['log2e']}",
        f"%t = call {_F} @llvm.arithmetic.fence.v16f32({_F} %t0)",
        f"%n = call {_F} @llvm.roundeven.v16f32({_F} %t)",
        f"%r0 = {fma.format('%n', c['ln2hi'], '%x')}",
        f"%r = {fma.format('%n', c['ln2lo'], '%r0')}",
        f"%q1 = {fma.format('%r', c['p0'], c['p1'])}",
        f"%q2 = {fma.format('%q1', '%r', c['p2'])}",
        f"%q3 = {fma.format('%q2', '%r', c['p3'])}",
        f"%q4 = {fma.format('%q3', '%r', c['p4'])}",
        f"%q5 = {fma.format('%q4', '%r', c['p5'])}",
        f"%q6 = {fma.format('%q5', '%r', c['one'])}",
        f"%q7 = {fma.format('%q6', '%r', c['one'])}",
        f"%i = fptosi {_F} %n to {_I}",
        f"%e = shl {_I} %i, {_splat('23', 'i32')}",
        f"%b = bitcast {_F} %q7 to {_I}",
        f"%s = add {_I} %b, %e",
        f"%y = bitcast {_I} %s to {_F}",
        f"%z = select {_M} %under, {_F} zeroinitializer, {_F} %y",
        f"ret {_F} %z",
    ]
    return _define(_F, "exp", f"{_F} %v", "".join(f"  {line}\n" for line in lines))


def _exp2() -> str:
    """2^x for x ≤ 0, relative error below 2e-7; 2^0 = 1 exactly, 0 for x ≤ -127 and for NaN."""
    hexed = {
        "bottom": "0xC05FC00000000000",
        "round": "0x4168000000000000",  # adding 1.5 · 2^23 leaves the nearest integer in the low bits
        "p0": "0x3F55BBA140000000",
        "p1": "0x3F83CEA880000000",
        "p2": "0x3FAC6B7520000000",
        "p3": "0x3FCEBF9BC0000000",
        "p4": "0x3FE62E42A0000000",
        "one": "0x3FF0000000000000",
    }
    c = {name: _splat(value, "float") for name, value in hexed.items()}
    fma = f"call {_F} @llvm.fma.v16f32({_F} {{}}, {_F} {{}}, {_F} {{}})"
    lines = [
        f"%in = fcmp ogt {_F} %v, {c['bottom']}",
        f"%x = select {_M} %in, {_F} %v, {_F} {c['bottom']}",
        f"%t = fadd {_F} %x, {c['round']}",
        f"%n = fsub {_F} %t, {c['round']}",
        f"%r = fsub {_F} %x, %n",
        f"%q1 = {fma.format('%r', c['p0'], c['p1'])}",
        f"%q2 = {fma.format('%q1', '%r', c['p2'])}",
        f"%q3 = {fma.format('%q2', '%r', c['p3'])}",
        f"%q4 = {fma.format('%q3', '%r', c['p4'])}",
        f"%q5 = {fma.format('%q4', '%r', c['one'])}",
        f"%i = bitcast {_F} %t to {_I}",
        f"%e = shl {_I} %i, {_splat('23', 'i32')}",
        f"%b = bitcast {_F} %q5 to {_I}",
        f"%s = add {_I} %b, %e",
        f"%y = bitcast {_I} %s to {_F}",
        f"ret {_F} %y",
    ]
    return _define(_F, "exp2", f"{_F} %v", "".join(f"  {line}\n" for line in lines))


def _round_bf16() -> str:
    """float32 to bfloat16 bits, round to nearest even; a NaN stays a (quiet) NaN."""
    lines = [
        f"%b = bitcast {_F} %v to {_I}",
        f"%t = lshr {_I} %b, {_splat('16', 'i32')}",
        f"%odd = and {_I} %t, {_splat('1', 'i32')}",
        f"%bias = add {_I} %odd, {_splat('32767', 'i32')}",
        f"%sum = add {_I} %b, %bias",
        f"%up = lshr {_I} %sum, {_splat('16', 'i32')}",
        f"%isnan = fcmp uno {_F} %v, %v",
        f"%quiet = or {_I} %t, {_splat('64', 'i32')}",
        f"%r = select {_M} %isnan, {_I} %quiet, {_I} %up",
        f"%h = trunc {_I} %r to {_H}",
        f"ret {_H} %h",
    ]
    return _define(_H, "round_bf16", f"{_F} %v", "".join(f"  {line}\n" for line in lines))


def _simple() -> str:
    fma = f"  %r = call {_F} @llvm.fma.v16f32({_F} %a, {_F} %b, {_F} %c)\n  ret {_F} %r\n"
    neg = f"  %n = fneg {_F} %a\n  %r = call {_F} @llvm.fma.v16f32({_F} %n, {_F} %b, {_F} %c)\n  ret {_F} %r\n"
    low = f"  %s = shl {_I} %w, {_splat('16', 'i32')}\n  %r = bitcast {_I} %s to {_F}\n  ret {_F} %r\n"
    high = f"  %s = and {_I} %w, {_splat('-65536', 'i32')}\n  %r = bitcast {_I} %s to {_F}\n  ret {_F} %r\n"
    wide = (
        f"  %h = call {_H} @llmc_load_i16(ptr %p, i32 %n)\n  %z = zext {_H} %h to {_I}\n"
        f"  %s = shl {_I} %z, {_splat('16', 'i32')}\n  %r = bitcast {_I} %s to {_F}\n  ret {_F} %r\n"
    )
    narrow = (
        f"  %h = call {_H} @llmc_round_bf16({_F} %v)\n"
        f"  %r = call i32 @llmc_store_i16({_H} %h, ptr %p, i32 %n)\n  ret i32 0\n"
    )
    root = f"  %r = call {_F} @llvm.sqrt.v16f32({_F} %a)\n  ret {_F} %r\n"
    larger = f"  %r = call {_F} @llvm.maxnum.v16f32({_F} %a, {_F} %b)\n  ret {_F} %r\n"
    wins = f"  %c = fcmp ogt {_F} %a, %b\n  %r = select {_M} %c, {_F} %a, {_F} %b\n  ret {_F} %r\n"  # b for a NaN
    select = (
        _broadcast("%bs", "i32", "%base")
        + _broadcast("%los", "i32", "%lo")
        + _broadcast("%his", "i32", "%hi")
        + f"  %k = add {_I} %bs, {_IOTA}\n  %above = icmp sge {_I} %k, %los\n  %below = icmp sle {_I} %k, %his\n"
        f"  %in = and {_M} %above, %below\n  %r = select {_M} %in, {_F} %v, {_F} %other\n  ret {_F} %r\n"
    )
    sigmoid = (
        f"  %n = fneg {_F} %v\n  %e = call {_F} @llmc_exp({_F} %n)\n"
        f"  %d = fadd {_F} %e, {_splat('1.0', 'float')}\n  %r = fdiv {_F} %v, %d\n  ret {_F} %r\n"
    )
    share = (
        "  %t = sext i32 %task to i64\n  %u = sext i32 %total to i64\n  %n = sext i32 %num to i64\n"
        "  %p = mul i64 %t, %u\n  %q = sdiv i64 %p, %n\n  %r = trunc i64 %q to i32\n  ret i32 %r\n"
    )
    return "".join(
        (
            _define("i32", "share", "i32 %task, i32 %total, i32 %num", share),
            _define(_F, "fma", f"{_F} %a, {_F} %b, {_F} %c", fma),
            _define(_F, "fnma", f"{_F} %a, {_F} %b, {_F} %c", neg),
            _define(_F, "bf16_low", f"{_I} %w", low),
            _define(_F, "bf16_high", f"{_I} %w", high),
            _define(_F, "load_bf16", "ptr %p, i32 %n", wide),
            _define("i32", "store_bf16", f"{_F} %v, ptr %p, i32 %n", narrow),
            _define(_F, "sqrt", f"{_F} %a", root),
            _define(_F, "max", f"{_F} %a, {_F} %b", larger),
            _define(_F, "larger", f"{_F} %a, {_F} %b", wins),
            _define(_F, "in_range", f"{_F} %v, {_F} %other, i32 %base, i32 %lo, i32 %hi", select),
            _define(_F, "silu", f"{_F} %v", sigmoid),
            *(
                _define(
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
declare {_F} @llvm.x86.avx512bf16.dpbf16ps.512({_F}, <32 x bfloat>, <32 x bfloat>)
"""
    + _define(
        _F,
        "dot_bf16",
        f"{_F} %c, {_I} %a, {_I} %b",
        f"""  %x = bitcast {_I} %a to <32 x bfloat>
  %y = bitcast {_I} %b to <32 x bfloat>
  %r = call {_F} @llvm.x86.avx512bf16.dpbf16ps.512({_F} %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret {_F} %r
""",
    )
    + _define(
        "i32",
        "narrow_bf16",
        f"{_F} %v, ptr %p",
        f"""  %h = fptrunc {_F} %v to <16 x bfloat>
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
        body += f"  %h0 = call {_H} @llmc_round_bf16({_F} %v)\n"
        keep = "<" + ", ".join(f"i1 {'true' if lane < count else 'false'}" for lane in range(16)) + ">"
        body += f"  %h = select {_M} {keep}, {_H} %h0, {_H} zeroinitializer\n"
        body += f"  %w = bitcast {_H} %h to <8 x i32>\n"
    source = "%v" if dtype == "f32" else "%w"
    if row_tile == 1 and words == lanes:
        body += f"  store <{lanes} x {kind}> {source}, ptr %p, align 4\n"
    else:
        for lane in range(words):
            body += f"  %e{lane} = extractelement <{lanes} x {kind}> {source}, i32 {lane}\n"
            body += f"  %a{lane} = getelementptr {kind}, ptr %p, i64 {lane * row_tile}\n"
            body += f"  store {kind} %e{lane}, ptr %a{lane}, align 4\n"
    return _define("i32", name, f"{_F} %v, ptr %p", body + "  ret i32 0\n")


def scatter_name(dtype: str, stride: int, count: int, odd: int = 0) -> str:
    """Helper that stores `count` elements of one row, words of one or two elements `stride` words apart.

    odd: the first element is the second one of its word.
    """
    return f"scatter_{dtype}_{stride}_{count}_{odd}"


def _scatter(dtype: str, stride: int, count: int, odd: int) -> str:
    """Whole words where two elements of one are at hand."""
    lanes = 1 if dtype == "f32" else 2
    kind, source = ("float", f"{_F} %v") if lanes == 1 else ("i16", f"{_H} %h")
    body = ""
    if lanes == 2:
        body = f"  %h = call {_H} @llmc_round_bf16({_F} %v)\n  %w = bitcast {_H} %h to <8 x i32>\n"
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
    return _define("i32", scatter_name(dtype, stride, count, odd), f"{_F} %v, ptr %p", body + "  ret i32 0\n")


def half_name(count: int) -> str:
    """Helper that stores `count` bf16 as one half of as many neighbouring words: (values, first word, half)."""
    return f"half_bf16_{count}"


def _half(count: int) -> str:
    """Leaves the other halves alone, which another thread may be writing."""
    lanes = ", ".join(f"i32 {lane // 2 if lane % 2 == 0 else 'undef'}" for lane in range(32))
    mask = ", ".join(f"i1 {'true' if lane % 2 == 0 and lane // 2 < count else 'false'}" for lane in range(32))
    body = (
        f"  %h = call {_H} @llmc_round_bf16({_F} %v)\n"
        f"  %w = shufflevector {_H} %h, {_H} undef, <32 x i32> <{lanes}>\n"
        "  %a = getelementptr i16, ptr %p, i32 %half\n"
        f"  call void @llvm.masked.store.v32i16.p0(<32 x i16> %w, ptr %a, i32 2, <32 x i1> <{mask}>)\n  ret i32 0\n"
    )
    return _define("i32", half_name(count), f"{_F} %v, ptr %p, i32 %half", body)


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
        fold("sum_lanes", f"fadd {_F} {{a}}, {{b}}"),
        fold("max_lanes", f"call {_F} @llvm.maxnum.v16f32({_F} {{a}}, {_F} {{b}})"),
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
