"""paged_attention: one reduction for prefill and decode.

Keys are cut into partitions of a fixed size counted from position 0. Within one: scores by an fma chain over head_dim,
softmax against the partition's maximum, values by an fma chain over keys; partitions are merged in order. A key that a
query does not see has weight exactly 0, which leaves every chain as it was: so queries may be processed together.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernels import builder as b
from llmc.compiler.kernels import vector_ir
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.targets.cpu import Target

_PARTITION = 256  # keys, at least
_NEVER = -3.0e38  # score of a key out of sight


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return (
        "q",
        "block_tables",
        "context_lens",
        "query_start",
        "token_seq",
        "positions",
        "k_pool",
        "v_pool",
        "out",
    )


def _groups(total: int, most: int) -> list[list[int]]:
    """0 … total-1 in the fewest groups of at most `most`."""
    size = b.ceil_div(total, b.ceil_div(total, most))
    return [list(range(start, min(start + size, total))) for start in range(0, total, size)]


class _Attention:
    def __init__(self, spec: KernelSpec, target: Target) -> None:
        p = spec.as_dict()
        self.heads, self.kv_heads, self.dim = int(p["num_heads"]), int(p["num_kv_heads"]), int(p["head_dim"])
        self.block, self.window, self.scale = int(p["block_size"]), int(p["window"]), float(p["scale"])
        self.kv, self.act, self.row_tile = str(p["kv_dtype"]), str(p["act_dtype"]), int(p["row_tile"])
        if self.heads % self.kv_heads or self.block % b.WIDTH or (self.act == "bf16" and self.dim % 2):
            raise b.KernelSpecError(f"paged_attention: heads, block_size or head_dim do not fit: {p}")
        self.padded = b.ceil_div(self.dim, b.WIDTH) * b.WIDTH
        self.partition = self.block * b.ceil_div(_PARTITION, self.block)
        wide = target.lanes == 16
        self.most = 8 if wide else 4  # query rows that share a load of K or V
        self.key_vectors = 2 if wide and self.block % 32 == 0 else 1
        self.value_vectors = 3 if wide else 1
        self.group = self.heads // self.kv_heads
        self.words = b.ceil_div(self.heads * self.dim, b.lanes_of(self.act))

    def attend(self, k: b.Kernel, rows: Sequence[tuple[int, int]], tokens: Sequence[b.Expr], kv_head: b.Expr) -> None:
        """Rows are (index into tokens, head within the group); all tokens belong to one sequence."""
        m, block, dim, nk = len(rows), self.block, self.dim, self.key_vectors
        table = b.let(k["token_seq"][tokens[0]] * self.stride)
        last = [b.let(k["positions"][t]) for t in tokens]
        first = [b.let(T.max(p - self.window + 1, 0)) if self.window else T.int32(0) for p in last]
        low, high = first[0], last[0]
        for f, p in zip(first[1:], last[1:], strict=True):
            low, high = T.min(low, f), T.max(high, p)
        low, high = b.let(low), b.let(high)
        query = [b.let(((tokens[t] * self.heads) + kv_head * self.group + g) * dim) for t, g in rows]

        out = b.Vectors(m * self.padded // b.WIDTH)
        scores = b.Vectors(m * self.partition // b.WIDTH)
        top, total = b.Vectors(m), b.Vectors(m)
        with T.serial(m * self.padded // b.WIDTH) as i:
            out[i] = b.splat(0.0)
        for i in range(m):
            top[i], total[i] = b.splat(_NEVER), b.splat(0.0)

        part0, part1 = b.let(T.truncdiv(low, self.partition)), b.let(T.truncdiv(high, self.partition) + 1)
        with T.serial(part0, part1) as part:
            key0 = b.let(part * self.partition)
            block0 = b.let(T.truncdiv(T.max(key0, low), block))
            block1 = b.let(T.truncdiv(T.min(key0 + (self.partition - 1), high), block) + 1)
            part_top, part_sum, keep, gain = b.Vectors(m), b.Vectors(m), b.Vectors(m), b.Vectors(m)
            for i in range(m):
                part_top[i], part_sum[i] = b.splat(_NEVER), b.splat(0.0)

            with T.serial(block0, block1) as blk:
                base = b.let((k["block_tables"][table + blk] * self.kv_heads + kv_head) * (dim * block))
                with T.serial(block // b.WIDTH // nk) as step:
                    acc, keys = b.Vectors(m * nk), b.Vectors(nk)
                    for i in range(m * nk):
                        acc[i] = b.splat(0.0)
                    with T.serial(dim) as d:
                        for j in range(nk):
                            at = base + d * block + (step * nk + j) * b.WIDTH
                            keys[j] = b.load_vector(k["k_pool"], at, b.WIDTH, self.kv)
                        for i in range(m):
                            for j in range(nk):
                                q = b.splat(k["q"][query[i] + d])
                                acc[i * nk + j] = b.call("fma", q, keys[j], acc[i * nk + j])
                    key = b.let(blk * block + step * (nk * b.WIDTH))
                    for i, (t, _) in enumerate(rows):
                        for j in range(nk):
                            s = b.call("mul", acc[i * nk + j], b.splat(self.scale))
                            at = key + j * b.WIDTH
                            s = b.call("in_range", s, b.splat(_NEVER), at, first[t], last[t])
                            acc[i * nk + j] = s
                            part_top[i] = b.call("max", part_top[i], acc[i * nk + j])
                            place = T.truncdiv(at - key0, b.WIDTH) + i * (self.partition // b.WIDTH)
                            scores[place] = acc[i * nk + j]
            for i in range(m):
                part_top[i] = b.call("max_lanes", part_top[i])

            vector0 = b.let(T.truncdiv(block0 * block - key0, b.WIDTH))
            vector1 = b.let(T.truncdiv(block1 * block - key0, b.WIDTH))
            for i, (t, _) in enumerate(rows):
                with T.serial(vector0, vector1) as v:
                    place = v + i * (self.partition // b.WIDTH)
                    weight = b.call("exp", b.call("sub", scores[place], part_top[i]))
                    key = key0 + v * b.WIDTH
                    weight = b.call("in_range", weight, b.splat(0.0), key, first[t], last[t])
                    scores[place] = weight
                    part_sum[i] = b.call("add", part_sum[i], scores[place])
                new_top = b.Vectors(1)
                new_top[0] = b.call("max", top[i], part_top[i])
                keep[i] = b.call("exp", b.call("sub", top[i], new_top[0]))
                gain[i] = b.call("exp", b.call("sub", part_top[i], new_top[0]))
                top[i] = new_top[0]
                gained = b.call("mul", b.call("sum_lanes", part_sum[i]), gain[i])
                total[i] = b.call("fma", total[i], keep[i], gained)
            self.weigh(k, m, table, kv_head, (low, high, key0, block0, block1), scores, keep, gain, out)

        for i, (t, g) in enumerate(rows):
            inverse = b.Vectors(1)
            inverse[0] = b.call("div", b.splat(1.0), total[i])
            base = b.packed_position(tokens[t], self.row_tile, self.words)
            for start, count in b.pieces(dim):
                v = b.call("mul", out[i * (self.padded // b.WIDTH) + start // b.WIDTH], inverse[0])
                v = b.call("add", v, b.splat(0.0))  # no negative zero
                element = (kv_head * self.group + g) * dim + start
                b.put(k["out"], v, base, element, self.act, self.row_tile, count)

    def weigh(
        self,
        k: b.Kernel,
        m: int,
        table: b.Expr,
        kv_head: b.Expr,
        span: tuple[b.Expr, ...],
        scores: b.Vectors,
        keep: b.Vectors,
        gain: b.Vectors,
        out: b.Vectors,
    ) -> None:
        """out = out * keep + gain * Σ score · value over the keys of one partition."""
        low, high, key0, block0, block1 = span
        vectors = self.padded // b.WIDTH
        for columns in _groups(vectors, self.value_vectors):
            n = len(columns)
            acc = b.Vectors(m * n)
            for i in range(m * n):
                acc[i] = b.splat(0.0)
            with T.serial(block0, block1) as blk:
                base = b.let((k["block_tables"][table + blk] * self.kv_heads + kv_head) * (self.block * self.padded))
                start = b.let(T.max(low - blk * self.block, 0))
                stop = b.let(T.min(high + 1 - blk * self.block, self.block))
                with T.serial(start, stop) as key:
                    values = b.Vectors(n)
                    for j, column in enumerate(columns):
                        at = base + key * self.padded + column * b.WIDTH
                        values[j] = b.load_vector(k["v_pool"], at, b.WIDTH, self.kv)
                    for i in range(m):
                        for j in range(n):
                            weight = b.splat(scores.lane(i * self.partition + (blk * self.block - key0) + key))
                            acc[i * n + j] = b.call("fma", weight, values[j], acc[i * n + j])
            for i in range(m):
                for j, column in enumerate(columns):
                    gained = b.call("mul", b.call("add", acc[i * n + j], b.splat(0.0)), gain[i])
                    at = i * vectors + column
                    out[at] = b.call("fma", out[at], keep[i], gained)

    def run(self, k: b.Kernel) -> None:
        rows = k.scalar(0)
        self.stride = k.scalar(3)
        together = max(1, self.most // self.group)
        units = b.let(T.truncdiv(rows + (together - 1), together) * self.kv_heads)

        def single(token: b.Expr, kv_head: b.Expr) -> None:
            for heads in _groups(self.group, self.most):
                self.attend(k, [(0, g) for g in heads], [token], kv_head)

        # Every num_tasks-th unit: later tokens see more keys, so contiguous shares would be uneven.
        with T.serial(b.let(T.truncdiv(units - k.task + (k.num_tasks - 1), k.num_tasks))) as turn:
            unit = b.let(k.task + turn * k.num_tasks)
            first = b.let(T.truncdiv(unit, self.kv_heads) * together)
            kv_head = b.let(T.truncmod(unit, self.kv_heads))
            if together == 1:
                single(first, kv_head)
                return
            stop = b.let(T.min(first + together, rows))
            flag = T.alloc_buffer((1,), "int32", scope="local")
            b.store(flag, T.Cast("int32", stop == first + together), 0)
            with T.serial(first, stop) as token:
                differs = k["token_seq"][token] != k["token_seq"][first]
                with b.when(differs):
                    b.store(flag, T.int32(0), 0)
            with T.If(flag[0] == 1):
                with T.Then():
                    rows_together = [(t, g) for t in range(together) for g in range(self.group)]
                    self.attend(k, rows_together, [b.let(first + t) for t in range(together)], kv_head)
                with T.Else(), T.serial(first, stop) as token:
                    single(token, kv_head)


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    plan = _Attention(spec, target)
    pool = b.TIR_DTYPE[plan.kv]
    floats = {"q": "float32", "k_pool": pool, "v_pool": pool, "out": b.word_dtype(plan.act)}
    puts = tuple((plan.act, plan.row_tile, count) for _, count in b.pieces(plan.dim))
    helpers = vector_ir.helpers(target.mcpu, puts=puts)
    kernel = b.Kernel(spec.symbol(), [(name, floats.get(name, "int32")) for name in buffers(spec)], helpers)
    with kernel as k:
        plan.run(k)
    return kernel.function()
