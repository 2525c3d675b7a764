"""The reduction of paged_attention, shared by prefill and decode and by all kinds of cached numbers.

Keys are split into partitions of fixed size, counted from position 0; a segment is a run of partitions. A score is a
chain over head_dim. A partition's softmax uses its own maximum, and its values are weighed by a chain over keys.
Partitions are folded in order into their segment, segments in order into the result, so any thread may compute a
segment. A key that a query does not see has weight exactly 0 and leaves every chain unchanged, so queries may be
processed together.

Queries are scaled by log2(e) · scale beforehand, and weights are powers of two. `attention_scores.py` has the score
adjustments of some models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_fetch import Fetches
from llmc.compiler.targets.cpu.kernels.attention_scores import Shaping
from llmc.compiler.targets.cpu.kernels.attention_split import partition_keys, segment_keys
from llmc.compiler.targets.cpu.kernels.attention_state import (
    FLOOR,
    Partials,
    Rows,
    first_key,
    last_key,
    sink_of,
    write_row,
)
from llmc.compiler.targets.cpu.kernels.kv_pools import KvPools
from llmc.compiler.targets.cpu.target import Target

NEVER = -3.0e38  # score of an unseen key; so far below FLOOR that its weight is 0
_TOGETHER = 56  # approximate number of query rows, for head_dim up to 128, that share one read of K and V


def _cell(value: b.Expr) -> b.Expr:
    """An int32 variable."""
    cell = T.alloc_buffer((1,), "int32", scope="local")
    b.store(cell, value, 0)
    return cell


class Attention(ABC):
    """The parts of attention that do not depend on the arithmetic for keys and values.

    most: rows in a register tile.
    beside: registers needed in addition to its sums while values are weighed.
    """

    def __init__(self, spec: KernelSpec, target: Target, most: int, beside: int) -> None:
        p = spec.as_dict()
        self.heads, self.kv_heads, self.dim = int(p["num_heads"]), int(p["num_kv_heads"]), int(p["head_dim"])
        self.block, self.window, self.segments = int(p["block_size"]), int(p["window"]), int(p["segments"])
        self.chunk, self.sinks = int(p.get("chunk", 0)), bool(p.get("sinks", False))
        self.both_ways = bool(p.get("both_ways", False))
        self.kv, self.act, self.row_tile = str(p["kv_dtype"]), str(p["act_dtype"]), int(p["row_tile"])
        self.pools = KvPools(self.kv, self.kv_heads, self.dim, self.block)
        self.lanes = self.pools.lanes
        if self.heads % self.kv_heads or self.dim % b.lanes_of(self.act):
            raise KernelSpecError(f"paged_attention: heads, block_size or head_dim do not fit: {p}")
        if self.both_ways and (self.chunk or "bias" in p):
            raise KernelSpecError(f"paged_attention: neither chunks nor a bias by distance work both ways: {p}")
        self.shaping = Shaping(p)
        self.scale = self.shaping.query_factor
        self.vectors = b.ceil_div(self.dim, b.WIDTH)
        self.words = self.dim // self.lanes  # of one key
        self.partition, self.segment = partition_keys(self.block), segment_keys(self.block)
        self.blocks = self.partition // self.block  # per partition
        self.group = self.heads // self.kv_heads
        wide = target.lanes == 16
        self.key_vectors = 2 if wide and self.block % 32 == 0 else 1
        self.registers = 31 if wide else 9
        # Rows in a register tile: of one token, and of several.
        self.most, self.beside = most, beside
        self.single = b.ceil_div(self.group, b.ceil_div(self.group, self.most))
        unit = self.most // math.gcd(self.most, self.group)  # tokens whose rows fill whole tiles
        rows = _TOGETHER * 128 // max(self.vectors * b.WIDTH, 128)
        self.together = unit * max(1, rows // (unit * self.group))
        self.rows = max(self.together * self.group, b.ceil_div(self.group, self.single) * self.single)

    def run(self, k: b.Kernel) -> None:
        self.k, self.stride = k, k.scalar(3)
        self.num_rows = k.scalar(0)
        self.first = T.alloc_buffer((self.rows,), "int32", scope="local")
        self.last = T.alloc_buffer((self.rows,), "int32", scope="local")
        self.scores = b.Vectors(self.most * self.partition // b.WIDTH)
        if self.pools.largest is not None:
            self.value_scales = b.Vectors(self.partition // b.WIDTH)
        self.shaping.allocate(self.rows)
        self.allocate()
        self.values = Fetches(self.blocks, b.ceil_div(self.pools.value_words, b.WIDTH))
        self.keys = Fetches(self.blocks, b.ceil_div(self.pools.key_words, b.WIDTH))
        self.part = Rows(self.rows, self.vectors)
        if self.segments:
            self.partials = Partials(k["partials"], self.heads, self.segments, self.dim)
            self.run_segments()
        else:
            self.result = Rows(self.rows, self.vectors)
            self.run_whole()

    # ---- who does what ----------------------------------------------------------------------------------------------

    def each_run(self, body: Callable[[b.Expr, b.Expr, b.Expr, b.Expr], None]) -> None:
        """Loops over runs of neighbouring tokens of one sequence: body(first token, count, first segment, end)."""
        k = self.k
        start = _cell(T.int32(0))
        with T.serial(self.num_rows) as token, b.when(token == start[0]):
            count = _cell(T.int32(1))
            most = b.let(T.min(self.num_rows - token, self.together))
            with T.serial(1, most) as i, b.when(k["token_seq"][token + i] == k["token_seq"][token]):
                b.store(count, i + 1, 0)
            b.store(start, token + count[0], 0)
            first = self.first_key(k["positions"][token])
            last = self.last_key(token + count[0] - 1)
            body(token, count[0], b.let(T.truncdiv(first, self.segment)), b.let(T.truncdiv(last, self.segment) + 1))

    def run_whole(self) -> None:
        """Every num_tasks-th (run, KV head): later tokens see more keys, so contiguous shares would be uneven."""
        units = _cell(T.int32(0))

        def body(token: b.Expr, count: b.Expr, segment0: b.Expr, segment1: b.Expr) -> None:
            with T.serial(self.kv_heads) as kv_head:
                mine = T.truncmod(units[0] + kv_head, self.k.num_tasks) == self.k.task
                with b.when(mine):
                    self.attend(token, count, b.let(kv_head), segment0, segment1)
            b.store(units, units[0] + self.kv_heads, 0)

        self.each_run(body)

    def run_segments(self) -> None:
        """A contiguous share of all (run, KV head, segment)."""
        units = _cell(T.int32(0))

        def add(_token: b.Expr, _count: b.Expr, segment0: b.Expr, segment1: b.Expr) -> None:
            b.store(units, units[0] + (segment1 - segment0) * self.kv_heads, 0)

        self.each_run(add)
        begin, end = self.k.share_bounds(units[0])
        b.store(units, T.int32(0), 0)

        def body(token: b.Expr, count: b.Expr, segment0: b.Expr, segment1: b.Expr) -> None:
            segments = b.let(segment1 - segment0)
            first, last = b.let(T.max(begin - units[0], 0)), b.let(T.min(end - units[0], segments * self.kv_heads))
            with T.serial(first, last) as unit:
                kv_head, segment = b.let(T.truncdiv(unit, segments)), b.let(segment0 + T.truncmod(unit, segments))
                self.attend(token, count, kv_head, segment, segment + 1)
            b.store(units, units[0] + segments * self.kv_heads, 0)

        self.each_run(body)

    def first_key(self, position: b.Expr) -> b.Expr:
        return first_key(position, self.window, self.chunk)

    def last_key(self, token: b.Expr) -> b.Expr:
        """The last key that a token sees."""
        k = self.k
        if not self.both_ways:
            return k["positions"][token]
        return last_key(k["positions"][token], k["context_lens"][k["token_seq"][token]], self.window)

    # ---- one run of tokens, one kv head ------------------------------------------------------------------------------

    def attend(self, token: b.Expr, count: b.Expr, kv_head: b.Expr, segment0: b.Expr, segment1: b.Expr) -> None:
        with T.If(count == 1):
            with T.Then():
                self.tiles(token, count, kv_head, segment0, segment1, self.single, fetch=True)
            with T.Else():
                self.tiles(token, count, kv_head, segment0, segment1, self.most, fetch=False)

    def tiles(
        self, token: b.Expr, count: b.Expr, kv_head: b.Expr, segment0: b.Expr, segment1: b.Expr, m: int, *, fetch: bool
    ) -> None:
        """Computes tiles of m rows, a row being one head of one token. Rows past the last repeat it."""
        rows = b.let(count * self.group)
        tiles = b.let(T.truncdiv(rows + (m - 1), m))
        self.table = b.let(self.k["token_seq"][token] * self.stride)
        self.kv_head = kv_head
        if fetch:
            self.look_ahead(token, kv_head)
        with T.serial(tiles * m) as i:
            row = b.let(T.min(i, rows - 1))
            self.prepare_row(i, b.let(token + T.truncdiv(row, self.group)), b.let(T.truncmod(row, self.group)))
        low, high = b.let(self.first[0]), b.let(self.last[rows - 1])
        self.last_block = b.let(T.truncdiv(high, self.block))
        one = b.let(T.Cast("int32", segment1 - segment0 == 1))  # one segment: its result is final
        if not self.segments:
            with b.when(one == 0):
                self.result.clear(rows)
        per_segment = self.segment // self.partition
        with T.serial(segment0, segment1) as segment:
            self.part.clear(tiles * m)
            begin = b.let(T.max(T.truncdiv(low, self.partition), segment * per_segment))
            end = b.let(T.min(T.truncdiv(high, self.partition), segment * per_segment + (per_segment - 1)) + 1)
            with T.serial(begin, end) as part, T.serial(tiles) as tile:
                self.tile(b.let(tile * m), b.let(part * self.partition), m, fetch=fetch)
            if self.segments:
                with T.serial(rows) as row:
                    self.store_row(token, row, segment)
            else:
                with T.If(one == 1):
                    with T.Then(), T.serial(rows) as row:
                        self.write_row(self.part, token, row)
                    with T.Else(), T.serial(rows) as row:
                        self.result.fold_row(row, self.part)
        if not self.segments:
            with b.when(one == 0), T.serial(rows) as row:
                self.write_row(self.result, token, row)

    def prepare_row(self, row: b.Expr, token: b.Expr, head: b.Expr) -> None:
        """Stores the range of keys that a row sees, and its scaled query."""
        k = self.k
        b.store(self.last, self.last_key(token), row)
        b.store(self.first, self.first_key(k["positions"][token]), row)
        source = b.let((token * self.heads + self.kv_head * self.group + head) * self.dim)
        self.prepare_query(row, source)
        self.shaping.prepare_row(k, row, self.kv_head * self.group + head)

    def store_row(self, token0: b.Expr, row: b.Expr, segment: b.Expr) -> None:
        """Stores a segment's result, as final if the row sees no other segment."""
        first, last = b.let(T.truncdiv(self.first[row], self.segment)), b.let(T.truncdiv(self.last[row], self.segment))
        with b.when(T.And(first <= segment, segment <= last)), T.If(first == last):
            with T.Then():
                self.write_row(self.part, token0, row)
            with T.Else():
                token, head = self.token_head(token0, row)
                self.partials.store(self.partials.at(token, head, segment), self.part, row)

    def write_row(self, rows: Rows, token0: b.Expr, row: b.Expr) -> None:
        token, head = self.token_head(token0, row)
        sink = sink_of(self.k, head) if self.sinks else None
        write_row(self.k["out"], rows, row, token, head, self.heads, self.dim, self.act, self.row_tile, sink)

    def token_head(self, token0: b.Expr, row: b.Expr) -> tuple[b.Expr, b.Expr]:
        head = self.kv_head * self.group + T.truncmod(row, self.group)
        return b.let(token0 + T.truncdiv(row, self.group)), b.let(head)

    # ---- one tile, one partition -----------------------------------------------------------------------------------

    def tile(self, row0: b.Expr, key0: b.Expr, m: int, *, fetch: bool) -> None:
        """Computes one tile. Later rows belong to the same token or a later one, so their key ranges start and end no
        earlier."""
        low = b.let(T.max(self.first[row0], key0))
        high = b.let(T.min(self.last[row0 + (m - 1)], key0 + (self.partition - 1)))
        with b.when(low <= high):
            step = self.key_vectors * b.WIDTH
            step0, step1 = b.let(T.truncdiv(low - key0, step)), b.let(T.truncdiv(high - key0, step) + 1)
            top = b.Vectors(m)
            for i in range(m):
                top[i] = b.splat(FLOOR)
            if fetch:
                self.plan_fetches(key0)
            with T.serial(step0, step1) as s:
                self.score(row0, key0, b.let(s * step), top, m, fetch=fetch)
            if self.pools.largest is not None:
                self.read_value_scales(key0, step0 * self.key_vectors, step1 * self.key_vectors)
            keep, gain, total = b.Vectors(m), b.Vectors(m), b.Vectors(m)
            # One loop per step over all rows, so that rows do not wait for each other.
            with T.serial(m) as i:
                top[i] = b.call("max_lanes", top[i])
            with T.serial(m) as i:
                total[i] = self.weights_of(i, top[i], step0 * self.key_vectors, step1 * self.key_vectors)
            with T.serial(m) as i:
                keep[i], gain[i] = self.part.fold_totals(row0 + i, top[i], b.call("sum_lanes", total[i]))
            self.weigh_all(row0, (low, high, key0), keep, gain, m, fetch=fetch)

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
        """Calls `weigh` for all vectors of a row, as many at a time as registers allow."""
        most = max(1, (self.registers - 1) // (m + self.beside))
        size = b.ceil_div(self.vectors, b.ceil_div(self.vectors, most))
        groups, rest = divmod(self.vectors, size)

        def weigh(start: b.Expr, count: int) -> None:
            self.weigh(row0, span, [start + j for j in range(count)], keep, gain, m, fetch=fetch)

        # A loop: for wide heads, unrolled code would dominate the kernel.
        with T.serial(groups) as group:
            weigh(b.let(group * size), size)
        if rest:
            weigh(T.int32(groups * size), rest)

    def look_ahead(self, token: b.Expr, kv_head: b.Expr) -> None:
        """Plans prefetches of the keys probably read next: another head's, or the next token's.

        At the end of a task, these are the first keys of the thread's next task.
        """
        k = self.k
        unit = b.let(kv_head + token * self.kv_heads + (1 if self.segments else k.num_tasks))
        if not self.segments:
            task = b.let(k.task + k.scalar(5))
            task = b.let(T.Select(task < k.num_tasks, task, unit))
            unit = b.let(T.Select(unit < self.num_rows * self.kv_heads, unit, task))
        ahead = b.let(T.truncdiv(unit, self.kv_heads))
        self.next_head = b.let(T.truncmod(unit, self.kv_heads))
        known = b.let(T.Cast("int32", ahead < self.num_rows))
        ahead = b.let(T.min(ahead, self.num_rows - 1))
        first = T.truncdiv(self.first_key(k["positions"][ahead]), self.partition) * self.blocks
        self.next_table = b.let(k["token_seq"][ahead] * self.stride + first)
        self.next_count = b.let((T.truncdiv(self.last_key(ahead), self.block) + 1 - first) * known)

    def plan_fetches(self, key0: b.Expr) -> None:
        """Plans prefetches of this partition's values and the next partition's keys."""
        block0 = b.let(T.truncdiv(key0, self.block))
        keys, values = self.pools.key_words, self.pools.value_words
        self.values.begin(self.last_block + 1 - block0, lambda i: self.block_base(block0 + i, values))
        later = b.let(block0 + self.blocks)
        with T.If(later <= self.last_block):
            with T.Then():
                self.keys.begin(self.last_block + 1 - later, lambda i: self.block_base(later + i, keys))
            with T.Else():
                table, head = self.next_table, self.next_head
                self.keys.begin(self.next_count, lambda i: self.base_of(table + i, head, keys))

    def block_base(self, block: b.Expr, words: int) -> b.Expr:
        """Word offset in a pool of this KV head's part, `words` words long, of a block of the sequence."""
        return self.base_of(self.table + block, self.kv_head, words)

    def base_of(self, entry: b.Expr, kv_head: b.Expr, words: int) -> b.Expr:
        """As `block_base`, for an entry of the block tables."""
        return b.let((self.k["block_tables"][entry] * self.kv_heads + kv_head) * words)

    def key_place(self, key: b.Expr) -> tuple[b.Expr, b.Expr]:
        """Offset of this KV head's part of a key's block, and the key's position in it."""
        block = b.let(T.truncdiv(key, self.block))
        return self.block_base(block, self.pools.key_words), b.let(key - block * self.block)

    def read_value_scales(self, key0: b.Expr, vector0: b.Expr, vector1: b.Expr) -> None:
        """Loads value scales of the partition at key0, for some vectors of keys."""
        with T.serial(vector0, vector1) as v:
            key = b.let(key0 + v * b.WIDTH)
            block = b.let(T.truncdiv(key, self.block))
            at = self.block_base(block, self.pools.value_words) + self.pools.value_scales + (key - block * self.block)
            self.value_scales[v] = b.call("load_f32", b.at(self.k["v_pool"], at), b.WIDTH)

    def keep_scores(self, row0: b.Expr, key: b.Expr, offset: b.Expr, scores: b.Vectors, top: b.Vectors, m: int) -> None:
        """Processes one step's products of queries and keys: m rows, `key_vectors` vectors each, from `key` on.

        offset: position of `key` in its partition.
        """
        n = self.key_vectors
        scores = self.shaping.shaped(scores, m, n, row0, key, self.last)

        def keep(i: int, j: int, value: b.Expr) -> None:
            scores[i * n + j] = value
            top[i] = b.call("larger", scores[i * n + j], top[i])
            self.scores[T.truncdiv(offset, b.WIDTH) + (i * self.partition // b.WIDTH + j)] = scores[i * n + j]

        seen_by_all = T.And(self.first[row0 + (m - 1)] <= key, key + (n * b.WIDTH - 1) <= self.last[row0])
        with T.If(seen_by_all):
            with T.Then():
                for i in range(m):
                    for j in range(n):
                        keep(i, j, scores[i * n + j])
            with T.Else():
                for i in range(m):
                    bounds = self.first[row0 + i], self.last[row0 + i]
                    for j in range(n):
                        keep(i, j, b.call("in_range", scores[i * n + j], b.splat(NEVER), key + j * b.WIDTH, *bounds))

    # ---- by what keys and values are made of -----------------------------------------------------------------------

    @abstractmethod
    def helpers(self, target: Target) -> str:
        """IR text of additional helpers that this kernel uses."""

    @abstractmethod
    def allocate(self) -> None:
        """Allocates stack memory."""

    @abstractmethod
    def prepare_query(self, row: b.Expr, source: b.Expr) -> None:
        """Stores the scaled query of a row, read at `source`."""

    @abstractmethod
    def score(self, row0: b.Expr, key0: b.Expr, offset: b.Expr, top: b.Vectors, m: int, *, fetch: bool) -> None:
        """Scores of one step's keys, key0 + offset onwards; see `keep_scores`."""

    @abstractmethod
    def weights_of(self, i: b.Expr, top: b.Expr, vector0: b.Expr, vector1: b.Expr) -> b.Expr:
        """Turns the scores of the tile's row i into weights; returns their sums per lane."""

    @abstractmethod
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
        """Σ weight · value over keys low … high of the partition at key0, for some vectors of a row."""
