"""Attention with int8 keys and values: exact sums of integer products.

A query is rounded to integers of up to 16 bits, scaled by its largest magnitude. A row's weights within a partition are
rounded likewise, after each is multiplied by its value's scale. Integer sums do not depend on order. A key that a query
does not see has weight 0, so its numbers do not count.

Numbers are stored plus 128; a sum corrects for that by subtracting 128 times the sum of its factors.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_walk import NEVER, Attention
from llmc.compiler.targets.cpu.kernels.ir import kv_numbers
from llmc.compiler.targets.cpu.kernels.kv_pools import SMALLEST
from llmc.compiler.targets.cpu.target import Target

_ZERO = 128
_MOST = 32767
_PAIRS = 2  # words of factors per word of four numbers


def _limit(terms: int) -> int:
    """The largest factor for which a sum of `terms` products with 8-bit numbers fits 32 bits."""
    return min(_MOST, (2**31 - 1) // (_ZERO * terms))


def _ints(name: str, *args: b.Expr) -> b.Expr:
    return T.call_extern("int32x16", f"llmc_{name}", *args)


class Int8Attention(Attention):
    def __init__(self, spec: KernelSpec, target: Target) -> None:
        super().__init__(spec, target, 12 if target.lanes == 16 else 4, 2)
        self.query_words = self.words * _PAIRS

    def helpers(self, target: Target) -> str:
        return kv_numbers.widest() + kv_numbers.products(target)

    def allocate(self) -> None:
        # Rows span whole vectors: the last one is stored whole.
        self.query_stride = self.vectors * b.WIDTH // 4 * _PAIRS
        self.queries = T.alloc_buffer((self.rows * self.query_stride,), "int32", scope="local")
        self.query_bias = T.alloc_buffer((self.rows,), "int32", scope="local")
        self.query_scale = T.alloc_buffer((self.rows,), "float32", scope="local")
        self.weight_stride = self.partition // 4 * _PAIRS
        self.weights = T.alloc_buffer((self.most * self.weight_stride,), "int32", scope="local")
        self.weight_bias = T.alloc_buffer((self.most,), "int32", scope="local")
        self.weight_scale = T.alloc_buffer((self.most,), "float32", scope="local")

    def prepare_query(self, row: b.Expr, source: b.Expr) -> None:
        values, state = b.Vectors(self.vectors), b.Vectors(2)
        state[0] = b.splat(0.0)
        for v, (start, count) in enumerate(b.pieces(self.dim)):
            value = b.load_vector(self.k["q"], source + start, count)
            values[v] = b.call("mul", value, b.splat(self.scale))
            state[0] = b.call("widest", state[0], values[v])
        limit, total = _limit(self.dim), b.Vectors(1, "int32")
        self.factors(state, limit)
        total[0] = T.broadcast(T.int32(0), b.WIDTH)
        for v in range(self.vectors):
            self.put_factors(values[v], state[1], limit, total, b.at(self.queries, row * self.query_stride + v * 8))
        b.store(self.query_bias, T.call_extern("int32", "llmc_s16_sum", total[0]) * -_ZERO, row)
        b.store(self.query_scale, state.lane(0), row)

    def factors(self, state: b.Vectors, limit: int) -> None:
        """Turns per-lane magnitudes of a row, in state[0], into its scale (state[0]) and the inverse (state[1])."""
        state[0] = b.call("widest_lane", state[0])
        state[1] = b.call("div", b.splat(float(limit)), b.call("max", state[0], b.splat(SMALLEST)))
        state[0] = b.call("div", state[0], b.splat(float(limit)))

    def put_factors(self, value: b.Expr, inverse: b.Expr, limit: int, total: b.Vectors, place: b.Expr) -> None:
        """Stores 16 values as integer factors, and adds them to `total`."""
        number = b.Vectors(1, "int32")
        number[0] = _ints("rounded_s16", value, inverse, b.splat(float(limit)))
        total[0] = total[0] + number[0]
        b.do("put_pairs", number[0], place)

    def dots(self, acc: b.Vectors, at: int, word: tuple[b.Expr, b.Expr], factors: b.Expr, index: b.Expr) -> None:
        """Adds the products of a vector of words with a row's factors for them."""
        for part in range(_PAIRS):
            factor = T.broadcast(factors[index + part], b.WIDTH)
            acc[at] = _ints("dot_s16", acc[at], word[part], factor)

    def numbers(self, raw: b.Expr) -> tuple[b.Expr, b.Expr]:
        """The numbers of words, in the form in which they are multiplied."""
        parts = b.Vectors(1, "int32"), b.Vectors(_PAIRS, "int32")
        parts[0][0] = raw
        for part, name in enumerate(("bytes_even", "bytes_odd")):
            parts[1][part] = _ints(name, parts[0][0])
        return parts[1][0], parts[1][1]

    def score(self, row0: b.Expr, key0: b.Expr, offset: b.Expr, top: b.Vectors, m: int, *, fetch: bool) -> None:
        n, k = self.key_vectors, self.k
        acc = b.Vectors(m * n, "int32")
        for i in range(m):
            for j in range(n):
                acc[i * n + j] = T.broadcast(self.query_bias[row0 + i], b.WIDTH)
        key = b.let(key0 + offset)
        base, within = self.key_place(key)
        query = b.let(row0 * self.query_stride)
        with T.serial(self.words) as word:
            if fetch:
                self.values.fetch(k["v_pool"], n)
            at = base + within + word * self.block
            parts = [self.numbers(k["k_pool"][T.ramp(at + j * b.WIDTH, 1, b.WIDTH)]) for j in range(n)]
            for i in range(m):
                for j in range(n):
                    self.dots(acc, i * n + j, parts[j], self.queries, query + word * _PAIRS + i * self.query_stride)
        if fetch:
            self.values.fetch(k["v_pool"], n)
        scores = b.Vectors(m * n)
        for j in range(n):
            at_scale = base + within + (self.pools.key_scales + j * b.WIDTH)
            scale = b.kept(b.call("load_f32", b.at(k["k_pool"], at_scale), b.WIDTH))
            for i in range(m):
                value = b.call("mul", b.call("floats_of", acc[i * n + j]), b.splat(self.query_scale[row0 + i]))
                scores[i * n + j] = b.call("mul", value, scale)
        self.keep_scores(row0, key, offset, scores, top, m)

    def weights_of(self, i: b.Expr, top: b.Expr, vector0: b.Expr, vector1: b.Expr) -> b.Expr:
        cells, state = b.Vectors(2), b.Vectors(2)
        cells[0], cells[1], state[0] = top, b.splat(0.0), b.splat(0.0)
        with T.serial(vector0, vector1) as v:
            place = v + i * (self.partition // b.WIDTH)
            weight = b.Vectors(2)
            weight[0] = b.call("exp2", b.call("sub", self.scores[place], cells[0]))
            cells[1] = b.call("add", cells[1], weight[0])
            weight[1] = b.call("mul", weight[0], self.value_scales[v])
            # The scale of an unseen key may be arbitrary.
            self.scores[place] = b.call("unless", self.scores[place], b.splat(NEVER), weight[1])
            state[0] = b.call("widest", state[0], self.scores[place])
        limit, total = _limit(self.partition), b.Vectors(1, "int32")
        self.factors(state, limit)
        total[0] = T.broadcast(T.int32(0), b.WIDTH)
        with T.serial(vector0, vector1) as v:
            value = self.scores[v + i * (self.partition // b.WIDTH)]
            self.put_factors(value, state[1], limit, total, b.at(self.weights, i * self.weight_stride + v * 8))
        b.store(self.weight_bias, T.call_extern("int32", "llmc_s16_sum", total[0]) * -_ZERO, i)
        b.store(self.weight_scale, state.lane(0), i)
        return cells[1]

    def weigh(
        self,
        row0: b.Expr,
        span: tuple[b.Expr, b.Expr, b.Expr],
        columns: list[b.Expr],
        keep: b.Vectors,
        gain: b.Vectors,
        m: int,
        *,
        fetch: bool,
    ) -> None:
        low, high, key0 = span
        n, k, width = len(columns), self.k, self.vectors * b.WIDTH
        acc = b.Vectors(m * n, "int32")
        for i in range(m):
            for j in range(n):
                acc[i * n + j] = T.broadcast(self.weight_bias[i], b.WIDTH)
        with T.serial(b.let(T.truncdiv(low, self.block)), b.let(T.truncdiv(high, self.block) + 1)) as block:
            base, block0 = self.block_base(block, self.pools.value_words), b.let(block * self.block)
            # In words that also hold unseen keys, those keys have weight 0.
            first = b.let(T.truncdiv(T.max(low - block0, 0), self.lanes))
            last = b.let(T.truncdiv(T.min(high - block0, self.block - 1), self.lanes) + 1)
            weight0 = b.let(T.truncdiv(block0 - key0, self.lanes) * _PAIRS)
            with T.serial(first, last) as word:
                if fetch:
                    self.keys.fetch(k["k_pool"], n)
                at = base + word * width
                parts = [self.numbers(k["v_pool"][T.ramp(at + c * b.WIDTH, 1, b.WIDTH)]) for c in columns]
                for i in range(m):
                    for j in range(n):
                        self.dots(
                            acc, i * n + j, parts[j], self.weights, weight0 + word * _PAIRS + i * self.weight_stride
                        )
        for i in range(m):
            scale = b.kept(b.splat(self.weight_scale[i]))
            for j, column in enumerate(columns):
                value = b.call("mul", b.call("floats_of", acc[i * n + j]), scale)
                value = b.call("add", value, b.splat(0.0))  # avoids −0
                self.part.fold_values((row0 + i) * self.vectors + column, value, keep[i], gain[i])
