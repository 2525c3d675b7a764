"""rope_kv_write and paged_attention, on a row-major cache: block, KV head, position in the block, element."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError, Param
from llmc.compiler.targets.reference.kernels.frame import (
    BLOCK_TABLE_STRIDE,
    NUM_TOKENS,
    Array,
    Cell,
    Expr,
    Frame,
    let,
    rounded,
    when,
    widened,
)
from llmc.compiler.targets.reference.kernels.functions import exp, tanh
from llmc.compiler.targets.reference.kernels.kv_pools import key_pool, value_pool
from llmc.compiler.targets.reference.kernels.rows import write_activation


class RopeWrite:
    """What a spec of rope_kv_write says, or of the op that also attends. buffers: dtype by name, in operand order."""

    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self.heads, self.kv_heads, self.head_dim = (int(p[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
        if p.get("reads_cache"):
            self.kv_heads = 0
        self.rotary, self.block, self.norm_eps = int(p["rotary_dim"]), int(p["block_size"]), float(p["norm_eps"])
        self.qk_norm, self.norm_rotated = bool(p["qk_norm"]), bool(p.get("norm_rotated", False))
        self.stated_scales = bool(p.get("kv_scales", False))
        sizes = str(p["kv_dtype"]), max(1, self.kv_heads), self.head_dim, self.block
        self.keys, self.values = key_pool(*sizes), value_pool(*sizes)
        norms = {"q_norm": "f32", "k_norm": "f32"} if self.qk_norm else {}
        scales = {"kv_scales": "f32"} if self.stated_scales else {}
        self.buffers = {"qkv": "f32", **norms, **scales, "cos_sin": "f32", "positions": "i32"}
        if self.kv_heads:
            pools = {"k_pool": self.keys.buffer_dtype, "v_pool": self.values.buffer_dtype}
            self.buffers |= {"slot_mapping": "i32", **pools}
        self.buffers["out"] = "f32"

    @property
    def half(self) -> int:
        """Pairs of elements that are rotated."""
        return self.rotary // 2

    @property
    def all_heads(self) -> int:
        """Of queries, keys and values."""
        return self.heads + 2 * self.kv_heads


def rope_kv_write(spec: KernelSpec) -> tirx.PrimFunc:
    rope = RopeWrite(spec)
    with (
        Frame(spec.symbol(), rope.buffers) as k,
        k.share(k.scalar(NUM_TOKENS) * rope.all_heads) as unit,
    ):
        token, head = let(T.truncdiv(unit, rope.all_heads)), let(T.truncmod(unit, rope.all_heads))
        source = let(unit * rope.head_dim)
        angle = let(k.raw("positions", token) * rope.rotary)
        turned = Array(rope.head_dim)

        def find_factor(factor: Cell, element: Callable[[Expr], Expr]) -> None:
            """1 / sqrt(mean square)."""
            squares = Cell(T.float32(0.0))
            with T.serial(rope.head_dim) as i:
                squares.set(squares.get() + element(i) * element(i))
            mean = squares.get() / T.float32(rope.head_dim)
            factor.set(T.float32(1.0) / T.sqrt(mean + T.float32(rope.norm_eps)))

        def turn(norm: str) -> None:
            """Fills `turned` with the head, normed and rotated, as the spec says in which order."""
            factor, first = Cell(T.float32(1.0)), rope.qk_norm and not rope.norm_rotated
            if first:
                find_factor(factor, lambda i: k.raw("qkv", source + i))

            def value(i: Expr) -> Expr:
                plain = k.raw("qkv", source + i)
                return let(plain * factor.get() * k.raw(norm, i), "float32") if first else plain

            with T.serial(rope.half) as i:
                cos, sin = k.raw("cos_sin", angle + i), k.raw("cos_sin", angle + rope.half + i)
                low, high = value(i), value(rope.half + i)
                turned[i] = low * cos - high * sin
                turned[rope.half + i] = high * cos + low * sin
            with T.serial(rope.rotary, rope.head_dim) as i:
                turned[i] = value(i)
            if rope.norm_rotated:
                find_factor(factor, lambda i: turned[i])
                with T.serial(rope.head_dim) as i:
                    turned[i] = turned[i] * factor.get() * (k.raw(norm, i) if rope.qk_norm else T.float32(1.0))

        def stated() -> Expr | None:
            """The checkpoint's scale, if stated: those of keys, then of values, head by head."""
            return let(k.raw("kv_scales", head - rope.heads), "float32") if rope.stated_scales else None

        with when(head < rope.heads):
            turn("q_norm")
            with T.serial(rope.head_dim) as i:
                k.store("out", turned[i], (token * rope.heads + head) * rope.head_dim + i)
        if rope.kv_heads:
            slot = let(k.raw("slot_mapping", token))
            kv_block, offset = let(T.truncdiv(slot, rope.block)), let(T.truncmod(slot, rope.block))
            with when(T.And(head >= rope.heads, head < rope.heads + rope.kv_heads)):
                turn("k_norm")
                rope.keys.write(k, kv_block, let(head - rope.heads), offset, lambda i: turned[i], stated())
            with when(head >= rope.heads + rope.kv_heads):
                own = let(head - (rope.heads + rope.kv_heads))
                rope.values.write(k, kv_block, own, offset, lambda i: k.raw("qkv", source + i), stated())
    return k.function()


def _in_bf16(value: Expr) -> Expr:
    """A float32 rounded to bf16."""
    return let(widened("bf16", let(rounded("bf16", let(value, "float32")), "uint16")), "float32")


def seen_keys(k: Frame, p: Mapping[str, Param], token: Expr) -> tuple[Expr, Expr]:
    """The first and the last key that a token sees. p: the parameters of its op."""
    window, chunk = int(p["window"]), int(p.get("chunk", 0))
    last = let(k.raw("positions", token))
    first = let(T.max(last - (window - 1), 0)) if window else T.int32(0)
    if chunk:
        first = let(T.max(T.truncdiv(last, chunk) * chunk, first))
    if "both_ways" in p:
        end = k.raw("context_lens", k.raw("token_seq", token))
        last = let(T.min(end, last + window) - 1) if window else let(end - 1)
    return first, last


class Attention:
    """The keys that heads of one token attend to, and their scores; shared by kernels with their own key order.

    `begin` comes first, with a token and the first of its heads, all of one KV head.
    """

    def __init__(self, spec: KernelSpec) -> None:
        p = self._p = spec.as_dict()
        self.heads, self.head_dim, self.act = int(p["num_heads"]), int(p["head_dim"]), str(p["act_dtype"])
        self.sinks, self.segments = "sinks" in p, int(p["segments"])
        kv, block, self.kv_heads = str(p["kv_dtype"]), int(p["block_size"]), int(p["num_kv_heads"])
        if "both_ways" in p and ("chunk" in p or "bias" in p):
            raise KernelSpecError(f"paged_attention: neither chunks nor a bias by distance work both ways: {p}")
        self._block, self._group = block, self.heads // self.kv_heads
        self.keys, self.values = (
            key_pool(kv, self.kv_heads, self.head_dim, block),
            value_pool(kv, self.kv_heads, self.head_dim, block),
        )

    def buffers(self) -> dict[str, str]:
        p = self._p
        ends = {"context_lens": "i32"} if "both_ways" in p else {}
        inputs = {"q": "f32", "block_tables": "i32", "token_seq": "i32", "positions": "i32", **ends}
        pools = {"k_pool": self.keys.buffer_dtype, "v_pool": self.values.buffer_dtype}
        own = {**({"slopes": "f32"} if "bias" in p else {}), **({"sinks": "f32"} if self.sinks else {})}
        partials = {"partials": "f32"} if self.segments else {}
        return {**inputs, **pools, **own, **partials, "out": self.act}

    def begin(self, k: Frame, token: Expr, head: Expr, stride: Expr) -> None:
        """Starts a unit. stride: of the block tables. Afterwards keys `first` … `last` are those seen, and `kv_head` is
        the heads' own."""
        self.k, self.token, self.head = k, token, head
        self.kv_head = let(T.truncdiv(head, self._group))
        self._table = let(k.raw("token_seq", token) * stride)
        self.first, self.last = seen_keys(k, self._p, token)

    def place_of(self, position: Expr) -> tuple[Expr, Expr, Expr]:
        """(block, head, position in the block) of a token position."""
        kv_block = let(self.k.raw("block_tables", self._table + T.truncdiv(position, self._block)))
        return kv_block, self.kv_head, let(T.truncmod(position, self._block))

    def factor(self, position: Expr) -> Expr:
        """What the product of a query and a key's numbers is multiplied by."""
        scale = T.float32(float(self._p["scale"]))
        return let(self.keys.scale(self.k, *self.place_of(position)) * scale, "float32")

    @property
    def shapes(self) -> bool:
        """Whether scores are more than scaled products."""
        return bool(self._p.get("score_cap", 0.0)) or "bias" in self._p

    def score(self, value: Expr, head: Expr, last: Expr, position: Expr) -> Expr:
        """The score of a key for a head, given the scaled product. last: the last key that the token sees."""
        if cap := float(self._p.get("score_cap", 0.0)):
            value = let(tanh(value / T.float32(cap)) * T.float32(cap), "float32")
        return let(value + self._bias(head, last, position), "float32") if "bias" in self._p else value

    def _bias(self, head: Expr, last: Expr, position: Expr) -> Expr:
        slope = self.k.raw("slopes", head)
        if self._p["bias"] == "distance":
            return slope * T.Cast("float32", position - last)
        product = _in_bf16(_in_bf16(slope) * _in_bf16(T.Cast("float32", position)))
        return product * T.float32(float(self._p["scale"]))

    def write(self, token: Expr, head: Expr, element: Expr, value: Expr) -> None:
        at = let(head * self.head_dim + element)
        write_activation(self.k, token, self.heads * self.head_dim, self.act, at, value)


def paged_attention(spec: KernelSpec) -> tirx.PrimFunc:
    a = Attention(spec)
    if a.segments:
        raise KernelSpecError("paged_attention of this target does not cut contexts")
    head_dim = a.head_dim
    with Frame(spec.symbol(), a.buffers()) as k:
        stride = k.scalar(BLOCK_TABLE_STRIDE)
        with k.share(k.scalar(NUM_TOKENS) * a.heads) as unit:
            a.begin(k, let(T.truncdiv(unit, a.heads)), let(T.truncmod(unit, a.heads)), stride)
            totals = Array(head_dim)

            def score(position: Expr) -> Expr:
                factor, key = a.factor(position), a.keys.row(*a.place_of(position))
                total = Cell(T.float32(0.0))
                with T.serial(head_dim) as i:
                    total.set(total.get() + k.raw("q", unit * head_dim + i) * a.keys.number(k, key + i))
                return a.score(let(total.get() * factor, "float32"), a.head, a.last, position)

            most, weights = Cell(T.float32(-3.0e38)), Cell(T.float32(0.0))
            with T.serial(a.first, let(a.last + 1)) as position:
                most.set(T.max(most.get(), score(position)))
            if a.sinks:
                most.set(T.max(most.get(), k.raw("sinks", a.head)))
                weights.set(exp(k.raw("sinks", a.head) - most.get()))
            with T.serial(head_dim) as i:
                totals[i] = T.float32(0.0)
            with T.serial(a.first, let(a.last + 1)) as position:
                weight = exp(score(position) - most.get())
                weights.set(weights.get() + weight)
                place = a.place_of(position)
                value, factor = a.values.row(*place), let(weight * a.values.scale(k, *place), "float32")
                with T.serial(head_dim) as i:
                    totals[i] = totals[i] + factor * a.values.number(k, value + i)
            with T.serial(head_dim) as i:
                a.write(a.token, a.head, i, totals[i] / weights.get())
    return k.function()
