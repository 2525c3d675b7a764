"""Attention to keys and values that become float32, of 32, 16 or 8 bits: chains of multiply-adds.

For bf16 on a target with the bf16 dot product, queries and weights are rounded to bf16, and a chain takes two elements
a step. 8-bit floats have scales: a score is multiplied by its key's scale, a weight by its value's.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_walk import Attention
from llmc.compiler.targets.cpu.kernels.ir import bf16, fp8, int8, kv_numbers
from llmc.compiler.targets.cpu.target import Target

_PARTS = {
    "bf16": ("bf16_low", "bf16_high"),
    "f16": ("f16_low", "f16_high"),
    "fp8_e4m3": tuple(f"e4m3_{place}" for place in range(4)),
    "fp8_e5m2": tuple(f"e5m2_{place}" for place in range(4)),
    "int8": tuple(f"byte_{place}" for place in range(4)),
}
"""Helpers that convert the elements of a word to float32."""
_GAINS = {"fp8_e4m3": 2.0**8, "int8": 2.0**-24}
"""Factors that those helpers leave out."""


class FloatAttention(Attention):
    def __init__(self, spec: KernelSpec, target: Target) -> None:
        kv = str(spec.as_dict()["kv_dtype"])
        self.dot = kv == "bf16" and target.bf16_dot
        # A value, or (word, part of the word).
        super().__init__(spec, target, 12 if target.lanes == 16 else 6, 1 if kv == "f32" or self.dot else 2)
        self.query = "bf16" if self.dot else "f32"
        self.query_words = b.ceil_div(self.dim, b.WIDTH) * b.WIDTH // b.lanes_of(self.query)
        self.scaled, self.gain = self.pools.largest is not None, _GAINS.get(kv, 1.0)

    def helpers(self, target: Target) -> str:
        match self.kv:
            case "fp8_e4m3":
                return fp8.elements()
            case "fp8_e5m2":
                return kv_numbers.e5m2_elements()
            case "int8":
                return int8.bytes_to_floats()
        return bf16.dot() if self.dot else ""

    def allocate(self) -> None:
        self.queries = T.alloc_buffer((self.rows * self.query_words,), b.word_dtype(self.query), scope="local")
        if self.dot:
            self.weights = T.alloc_buffer((self.most * self.partition // 2,), "int32", scope="local")

    def prepare_query(self, row: b.Expr, source: b.Expr) -> None:
        k = self.k
        for start, count in b.pieces(self.dim):
            value = b.call("mul", b.load_vector(k["q"], source + start, count), b.splat(self.scale * self.gain))
            at = row * self.query_words + start // b.lanes_of(self.query)
            if self.dot:
                b.do("narrow_bf16", value, b.at(self.queries, at))
            else:
                b.store_vector(self.queries, value, at)

    def score(self, row0: b.Expr, key0: b.Expr, offset: b.Expr, top: b.Vectors, m: int, *, fetch: bool) -> None:
        """Scores of one step's keys, key0 + offset onwards."""
        key = b.let(key0 + offset)
        base, within = self.key_place(key)
        place, query = base + within, b.let(row0 * self.query_words)
        acc = self.products(place, query, 0, self.words, m, fetch=fetch)
        if self.scaled:
            scales = self.scales_of_keys(place, 0)
            for i in range(m * self.key_vectors):
                acc[i] = b.call("mul", acc[i], scales[i % self.key_vectors])
        self.keep_scores(row0, key, offset, acc, top, m)

    def products(self, place: b.Expr, query: b.Expr, first: int, last: int, m: int, *, fetch: bool) -> b.Vectors:
        """Products of m rows with the words [first, last) of the keys at `place`, `key_vectors` vectors a row.

        A product is one chain over the words' elements. query: place of the first row.
        """
        n, k = self.key_vectors, self.k
        acc = b.Vectors(m * n)
        for i in range(m * n):
            acc[i] = b.splat(0.0)
        with T.serial(first, last) as word:
            if fetch:
                self.values.fetch(k["v_pool"], n)
            at = [place + word * self.block + j * b.WIDTH for j in range(n)]
            for half, keys in self.halves(k["k_pool"], at):
                for i in range(m):
                    step = word if self.dot else word * self.lanes + half
                    q = b.splat(self.queries[query + (step + i * self.query_words)])
                    for j in range(n):
                        acc[i * n + j] = b.call(
                            "dot_bf16" if self.dot else "fma", *self.terms(acc[i * n + j], q, keys[j])
                        )
        return acc

    def scales_of_keys(self, place: b.Expr, part: int) -> list[b.Expr]:
        """The scales of part `part` of the keys at `place`."""
        first = self.pools.key_scales + part * self.block
        places = [place + (first + j * b.WIDTH) for j in range(self.key_vectors)]
        return [b.kept(b.call("load_f32", b.at(self.k["k_pool"], at), b.WIDTH)) for at in places]

    def halves(self, pool: b.Expr, at: list[b.Expr]) -> list[tuple[int, list[b.Expr]]]:
        """The factors held by the words at `at`, in the order of the chain."""
        raw = [pool[T.ramp(i, 1, b.WIDTH)] for i in at]
        return [(0, raw)] if self.dot else self.floats(raw)

    def floats(self, raw: list[b.Expr]) -> list[tuple[int, list[b.Expr]]]:
        """The elements of words as float32, by position in a word."""
        if self.lanes == 1:
            return [(0, raw)]
        if self.kv == "int8":
            raw = [b.kept(T.call_extern("int32x16", "llmc_signed_bytes", word), "int32") for word in raw]
        found = []
        for place, part in enumerate(_PARTS[self.kv]):
            values = b.Vectors(len(raw))
            for j, word in enumerate(raw):
                values[j] = b.call(part, word)
            found.append((place, [values[j] for j in range(len(raw))]))
        return found

    def terms(self, acc: b.Expr, factor: b.Expr, values: b.Expr) -> tuple[b.Expr, b.Expr, b.Expr]:
        """Arguments of the multiply-add."""
        return (acc, factor, values) if self.dot else (factor, values, acc)

    def weights_of(self, i: b.Expr, top: b.Expr, vector0: b.Expr, vector1: b.Expr) -> b.Expr:
        """Turns the scores of the tile's row i into weights; returns their sums per lane."""
        cells = b.Vectors(2)
        cells[0], cells[1] = top, b.splat(0.0)
        with T.serial(vector0, vector1) as v:
            place = v + i * (self.partition // b.WIDTH)
            weight = b.Vectors(1)
            weight[0] = b.call("exp2", b.call("sub", self.scores[place], cells[0]))
            cells[1] = b.call("add", cells[1], weight[0])
            if self.dot:
                b.do("narrow_bf16", weight[0], b.at(self.weights, place * (b.WIDTH // 2)))
            elif self.scaled:
                self.scores[place] = b.call("mul", weight[0], b.call("mul", self.value_scales[v], b.splat(self.gain)))
            else:
                self.scores[place] = weight[0]
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
        """Σ weight · value over keys low … high of the partition at key0, for some vectors of a row.

        Values of keys that the row does not see are skipped, not multiplied by 0: 0 · NaN would be NaN.
        """
        low, high, key0 = span
        n, k, width = len(columns), self.k, self.vectors * b.WIDTH
        acc = b.Vectors(m * n)
        for i in range(m * n):
            acc[i] = b.splat(0.0)

        def add(i: int, place: b.Expr, half: int, values: list[b.Expr]) -> None:
            """Adds values to the sum of row i. place: position of the word's first key in the partition."""
            if self.dot:
                weight = b.splat(self.weights[T.truncdiv(place, 2) + i * (self.partition // 2)])
            else:
                weight = b.splat(self.scores.lane(place + (i * self.partition + half)))
            for j in range(n):
                terms = self.terms(acc[i * n + j], weight, values[j])
                acc[i * n + j] = b.call("dot_bf16" if self.dot else "fma", *terms)

        def add_seen(i: int, key: b.Expr, half: int, values: list[b.Expr]) -> None:
            """As `add`, restricted to keys that row i sees. key: the word's first key."""
            sees = [self.sees(row0 + i, key + part) for part in ((0, 1) if self.dot else (half,))]
            if self.dot:
                low_half = T.Select(sees[0], T.int32(0xFFFF), T.int32(0))
                high_half = T.Select(sees[1], T.int32(-0x10000), T.int32(0))
                mask = T.broadcast(b.let(T.bitwise_or(low_half, high_half)), b.WIDTH)
                add(i, key - key0, half, [T.bitwise_and(value, mask) for value in values])
            else:
                with b.when(sees[0]):
                    add(i, key - key0, half, values)

        def add_words(base: b.Expr, block0: b.Expr, first: b.Expr, last: b.Expr, *, seen: bool) -> None:
            """Adds the words of a block. seen: whether each row sees all of their keys."""
            with T.serial(first, last) as word:
                if fetch and seen:
                    self.keys.fetch(k["k_pool"], n)
                at = [base + word * width + column * b.WIDTH for column in columns]
                key = block0 + word * self.lanes
                key = key if seen else b.let(key)
                for half, values in self.halves(k["v_pool"], at):
                    for i in range(m):
                        if seen:
                            add(i, key - key0, half, values)
                        else:
                            add_seen(i, key, half, values)

        # Keys that all rows see: later rows belong to the same token or a later one.
        all_low, all_high = b.let(T.max(self.first[row0 + (m - 1)], low)), b.let(T.min(self.last[row0], high))
        # Rows of one token see the same keys, but may start within different words.
        differ = self.lanes > 1 or not fetch

        def add_edge(block: b.Expr) -> None:
            """Adds a block with keys that some rows do not see."""
            base, block0 = self.block_base(block, self.pools.value_words), b.let(block * self.block)

            def words(keys: b.Expr) -> b.Expr:
                """Whole words of the block before `keys`."""
                return T.truncdiv(T.max(T.min(keys - block0, self.block), 0), self.lanes)

            start, end = b.let(words(low)), b.let(words(high + self.lanes))
            seen0 = b.let(T.min(words(all_low + (self.lanes - 1)), end))
            seen1 = b.let(T.max(words(all_high + 1), seen0))
            if differ and (self.window or self.chunk):
                add_words(base, block0, start, seen0, seen=False)
            add_words(base, block0, seen0, seen1, seen=True)
            if differ:
                add_words(base, block0, seen1, end, seen=False)

        block0, block1 = b.let(T.truncdiv(low, self.block)), b.let(T.truncdiv(high, self.block) + 1)
        whole0 = b.let(T.min(T.truncdiv(all_low + (self.block - 1), self.block), block1))
        whole1 = b.let(T.max(T.truncdiv(all_high + 1, self.block), whole0))

        def add_blocks(first: b.Expr, last: b.Expr) -> None:
            with T.serial(first, last) as block:
                base, key = self.block_base(block, self.pools.value_words), b.let(block * self.block)
                add_words(base, key, T.int32(0), T.int32(self.block // self.lanes), seen=True)

        def add_edges(first: b.Expr, last: b.Expr) -> None:
            with T.serial(first, last) as block:
                add_edge(block)

        if self.window or self.chunk:
            # Edges lie on both sides of the whole blocks; one copy of their code serves both.
            with T.serial(2) as side:
                before = side == 0
                first, last = T.Select(before, block0, whole1), T.Select(before, whole0, block1)
                add_edges(b.let(first), b.let(last))
                add_blocks(whole0, b.let(T.Select(before, whole1, whole0)))
        else:
            add_blocks(whole0, whole1)
            add_edges(whole1, block1)
        for i in range(m):
            for j, column in enumerate(columns):
                value = b.call("add", acc[i * n + j], b.splat(0.0))  # avoids −0
                self.part.fold_values((row0 + i) * self.vectors + column, value, keep[i], gain[i])

    def sees(self, row: b.Expr, key: b.Expr) -> b.Expr:
        return T.And(self.first[row] <= key, key <= self.last[row])
