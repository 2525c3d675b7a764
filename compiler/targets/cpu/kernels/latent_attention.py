"""latent_attention: all heads share one key per token, whose leading elements are also its value.

The walk and the score chains are those of `paged_attention`; heads form groups, each of which reads the keys itself. In
this layout a word of a value holds elements of one token, so a vector's lanes are tokens. Each lane of a value element
is one chain over ascending keys; one tree adds the lanes at the end of a partition.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_floats import FloatAttention
from llmc.compiler.targets.cpu.kernels.ir import lane_sums, vector
from llmc.compiler.targets.cpu.kernels.kv_pools import KvPools
from llmc.compiler.targets.cpu.target import Target

_STEP = lane_sums.COUNT  # value elements that are summed together


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    inputs = ("q", "q_rotated", "block_tables", "token_seq", "positions", "k_pool")
    return (*inputs, *(("partials",) if spec.as_dict()["segments"] else ()), "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    plan = LatentAttention(spec, target)
    floats = dict.fromkeys(("q", "q_rotated", "partials", "out"), "float32")
    types = {**floats, "k_pool": plan.pools.word_dtype}
    puts = tuple(("f32", 1, count) for count in {count for _, count in b.pieces(plan.dim)})
    helpers = vector.helpers(target.mcpu, puts=puts) + plan.helpers(target)
    kernel = b.Kernel(spec.symbol(), [(name, types.get(name, "int32")) for name in buffers(spec)], helpers)
    with kernel as k:
        plan.run(k)
    return kernel.function()


def _walk_spec(spec: KernelSpec, most: int) -> KernelSpec:
    """The spec as `Attention` expects it: groups of heads take the place of KV heads, and values are the keys' leading
    part."""
    p = spec.as_dict()
    heads = int(p["num_heads"])
    group = max(count for count in range(1, most + 1) if heads % count == 0)
    return KernelSpec.of(
        spec.family,
        spec.op,
        num_heads=heads,
        num_kv_heads=heads // group,
        head_dim=p["rank"],
        window=0,
        act_dtype="f32",
        row_tile=1,
        **{name: p[name] for name in ("block_size", "kv_dtype", "scale", "segments")},
    )


class LatentAttention(FloatAttention):
    """`dim` is the width of a value and of a latent query, `key_dim` that of a key."""

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        p = spec.as_dict()
        super().__init__(_walk_spec(spec, 8 if target.lanes == 16 else 6), target)
        self.key_dim = int(p["head_dim"])
        self.rotated = self.key_dim - self.dim
        self.pools = KvPools(self.kv, 1, self.key_dim, self.block, int(p["key_scales"]))
        self.words = self.key_dim // self.lanes
        self.query_words = b.ceil_div(self.key_dim, b.WIDTH) * b.WIDTH // b.lanes_of(self.query)
        self.key_blocks = self.partition // b.WIDTH
        # Rows whose sums fit the registers together.
        most = 6 if target.lanes == 16 else 1
        self.at_once = {m: max(n for n in range(1, most + 1) if m % n == 0) for m in (self.most, self.single)}

    def helpers(self, target: Target) -> str:
        return super().helpers(target) + lane_sums.helpers()

    def allocate(self) -> None:
        self.queries = T.alloc_buffer((self.rows * self.query_words,), b.word_dtype(self.query), scope="local")
        self.bases = T.alloc_buffer((self.key_blocks,), "int32", scope="local")
        self.sums = T.alloc_buffer((self.most * self.vectors * b.WIDTH,), "float32", scope="local")

    def base_of(self, entry: b.Expr, kv_head: b.Expr, words: int) -> b.Expr:
        """All heads share the keys."""
        return b.let(self.k["block_tables"][entry] * words)

    def tiles(
        self, token: b.Expr, count: b.Expr, kv_head: b.Expr, segment0: b.Expr, segment1: b.Expr, m: int, *, fetch: bool
    ) -> None:
        """Prefetches nothing: even one token's heads compute enough per key."""
        super().tiles(token, count, kv_head, segment0, segment1, m, fetch=False)

    def prepare_query(self, row: b.Expr, source: b.Expr) -> None:
        rotated = b.let(T.truncdiv(source, self.dim) * self.rotated)
        places = [("q", source + start, start, count) for start, count in b.pieces(self.dim)]
        places += [("q_rotated", rotated + s, self.dim + s, count) for s, count in b.pieces(self.rotated)]
        for name, at, start, count in places:
            value = b.call("mul", b.load_vector(self.k[name], at, count), b.splat(self.scale * self.gain))
            to = row * self.query_words + start // b.lanes_of(self.query)
            # The rotated part begins where the latent part ends, possibly within a vector.
            b.store_vector(self.queries, value, to, count, self.query)

    def score(self, row0: b.Expr, key0: b.Expr, offset: b.Expr, top: b.Vectors, m: int, *, fetch: bool) -> None:
        """With scales, each part of a key is one chain, and is multiplied by the scale of its own."""
        if not self.scaled:
            super().score(row0, key0, offset, top, m, fetch=fetch)
            return
        key = b.let(key0 + offset)
        base, within = self.key_place(key)
        place, query, latent = base + within, b.let(row0 * self.query_words), self.dim // self.lanes
        total = self.products(place, query, 0, latent, m, fetch=False)
        scales = self.scales_of_keys(place, 0)
        for i in range(m * self.key_vectors):
            total[i] = b.call("mul", total[i], scales[i % self.key_vectors])
        rotated = self.products(place, query, latent, self.words, m, fetch=False)
        scales = self.scales_of_keys(place, 1)
        for i in range(m * self.key_vectors):
            total[i] = b.call("fma", rotated[i], scales[i % self.key_vectors], total[i])
        self.keep_scores(row0, key, offset, total, top, m)

    def weights_of(self, i: b.Expr, top: b.Expr, vector0: b.Expr, vector1: b.Expr) -> b.Expr:
        cells = b.Vectors(2)
        cells[0], cells[1] = top, b.splat(0.0)
        with T.serial(vector0, vector1) as v:
            place = v + i * self.key_blocks
            weight = b.Vectors(1)
            weight[0] = b.call("exp2", b.call("sub", self.scores[place], cells[0]))
            cells[1] = b.call("add", cells[1], weight[0])
            if self.scaled:
                weight[0] = b.call("mul", weight[0], b.call("mul", self.value_scales[v], b.splat(self.gain)))
            self.scores[place] = weight[0]
        return cells[1]

    def read_value_scales(self, key0: b.Expr, vector0: b.Expr, vector1: b.Expr) -> None:
        """Reads the scales of the latent vectors, which are the values."""
        with T.serial(vector0, vector1) as v:
            base, within = self.key_place(b.let(key0 + v * b.WIDTH))
            at = base + self.pools.key_scales + within
            self.value_scales[v] = b.call("load_f32", b.at(self.k["k_pool"], at), b.WIDTH)

    def weigh_all(
        self,
        row0: b.Expr,
        span: tuple[b.Expr, b.Expr, b.Expr],
        keep: b.Vectors,
        gain: b.Vectors,
        m: int,
        *,
        fetch: bool,
    ) -> None:
        """Values of unseen keys are skipped, not multiplied by 0: 0 · NaN would be NaN."""
        _, high, key0 = span
        last = b.let(T.truncdiv(high - key0, b.WIDTH) + 1)
        # Vectors of keys that all rows see: later rows belong to the same token or a later one.
        whole = b.let(T.truncdiv(T.max(T.min(self.last[row0], high) - key0 + 1, 0), b.WIDTH))
        with T.serial(last) as v:
            base, within = self.key_place(b.let(key0 + v * b.WIDTH))
            b.store(self.bases, base + within, v)
        rows = self.at_once[m]
        with T.serial(m // rows) as part, T.serial(self.dim // _STEP) as step:
            self.sum_up(row0, key0, b.let(part * rows), b.let(step * _STEP), rows, _STEP, whole, last)
        if rest := self.dim % _STEP:
            with T.serial(m // rows) as part:
                self.sum_up(row0, key0, b.let(part * rows), T.int32(self.dim - rest), rows, rest, whole, last)
        with T.serial(m) as i, T.serial(self.vectors) as column:
            value = b.load_vector(self.sums, (i * self.vectors + column) * b.WIDTH)
            value = b.call("add", value, b.splat(0.0))  # avoids −0
            self.part.fold_values((row0 + i) * self.vectors + column, value, keep[i], gain[i])

    def sum_up(
        self,
        row0: b.Expr,
        key0: b.Expr,
        row: b.Expr,
        element: b.Expr,
        rows: int,
        count: int,
        whole: b.Expr,
        last: b.Expr,
    ) -> None:
        """Σ weight · value of `count` elements from `element` on, for `rows` rows of the tile from `row` on.

        whole, last: end of the key vectors that all rows see, and of those that some see.
        """
        acc = b.Vectors(rows * _STEP)
        for i in range(rows * _STEP):
            acc[i] = b.splat(0.0)

        def visible(value: b.Expr, v: b.Expr, i: int) -> b.Expr:
            """0 in the lanes of keys that row i does not see."""
            first, bound = self.first[row0 + row + i], self.last[row0 + row + i]
            return b.call("in_range", value, b.splat(0.0), key0 + v * b.WIDTH, first, bound)

        def add(v: b.Expr, *, seen: bool) -> None:
            at = b.let(self.bases[v] + T.truncdiv(element, self.lanes) * self.block)
            weights = [self.scores[v + (row + i) * self.key_blocks] for i in range(rows)]
            if self.scaled and not seen:
                # What is no number is told by its scale, which the weight was multiplied by.
                weights = [b.kept(visible(weight, v, i)) for i, weight in enumerate(weights)]
            for word in range(count // self.lanes):
                raw = self.k["k_pool"][T.ramp(at + word * self.block, 1, b.WIDTH)]
                for place, (value,) in self.floats([raw]):
                    for i in range(rows):
                        weight, taken, index = weights[i], value, i * _STEP + word * self.lanes + place
                        if not seen and not self.scaled:
                            taken = visible(value, v, i)
                        acc[index] = b.call("fma", weight, taken, acc[index])

        with T.serial(whole) as v:
            add(v, seen=True)
        with T.serial(whole, last) as v:
            add(v, seen=False)
        for i in range(rows):
            to = b.at(self.sums, (row + i) * (self.vectors * b.WIDTH) + element)
            b.do(lane_sums.NAME, *(acc[i * _STEP + j] for j in range(_STEP)), to, T.int32(count))
