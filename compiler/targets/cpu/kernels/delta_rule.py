"""delta_rule: the gated delta rule over the tokens of each sequence, one tile of value columns of a head at a time.

The state of a tile stays in L1 while the tokens of a step pass. It is read and written once for a token: what a token
changes is added in the pass that finds what the next token is told. The order of a sum depends on the key's size alone,
so a token has the same bits in every step, whichever tokens are with it.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels import state_tokens
from llmc.compiler.targets.cpu.kernels.ir import lane_sums, vector
from llmc.compiler.targets.cpu.target import Target

NORM_EPS = 1e-6  # as models.delta_ops has it
_CHAINS = 2  # independent partial sums of a column
_STEP = 4  # key elements per iteration, a multiple of the chains
_TOGETHER = 16  # tokens whose queries and keys are measured together, at most
_AHEAD = 16  # elements of the key whose state in the pool is prefetched
_REACHING = 32  # tokens over which the prefetches of a slot that will be written are spread
_OF_QUERY, _OF_KEY, _OF_BOTH, _NONE = range(lane_sums.COUNT)  # places of a token's sums


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("qkv", "gates", *state_tokens.BUFFERS, "k_pool", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    types = dict.fromkeys(state_tokens.BUFFERS, "int32")
    helpers = vector.helpers(target.mcpu) + lane_sums.helpers()
    kernel = b.Kernel(spec.symbol(), [(name, types.get(name, "float32")) for name in buffers(spec)], helpers)
    with kernel as k:
        _Rule(spec, target).run(k)
    return kernel.function()


class _Rule:
    def __init__(self, spec: KernelSpec, target: Target) -> None:
        p = spec.as_dict()
        self.heads, self.key_heads, self.tiled = int(p["heads"]), int(p["key_heads"]), bool(p["tiled"])
        self.key_dim, self.value_dim = int(p["key_dim"]), int(p["value_dim"])
        self.key_size = self.key_heads * self.key_dim
        self.stride = 2 * self.key_size + self.heads * self.value_dim
        # The sums of a tile are 8 registers, as many as multiply-adds are under way.
        self.tile = 2 * target.lanes

    def run(self, k: b.Kernel) -> None:
        self.k = k
        seqs = k.scalar(state_tokens.NUM_SEQS)
        tiles = b.ceil_div(self.value_dim, self.tile)
        self.state = b.Scratch(self.key_dim * self.tile, "float32")
        self.sums, self.units = (b.Scratch(_TOGETHER * lane_sums.COUNT, "float32") for _ in range(2))
        # Sequences have unequal numbers of tokens. All of them have the same tiles, so tasks divide these first.
        with k.share(b.let(seqs * (self.heads * tiles))) as unit:
            place = b.let(T.truncdiv(unit, seqs))
            self.tokens = state_tokens.Tokens(k, b.let(T.truncmod(unit, seqs)))
            self.head = b.let(T.truncdiv(place, tiles))
            of_neighbours = T.truncdiv(self.head, self.heads // self.key_heads)
            self.key_head = b.let(T.truncmod(self.head, self.key_heads) if self.tiled else of_neighbours)
            self.column = b.let(T.truncmod(place, tiles) * self.tile)
            last = self.value_dim - (tiles - 1) * self.tile
            if tiles == 1 or last == self.tile:
                self.pass_tokens(b.pieces(last))
            else:
                with T.If(self.column + self.tile <= self.value_dim):
                    with T.Then():
                        self.pass_tokens(b.pieces(self.tile))
                    with T.Else():
                        self.pass_tokens(b.pieces(last))

    # ---- places -----------------------------------------------------------------------------------------------------

    def query(self, row: b.Expr) -> b.Expr:
        return b.let(row * self.stride + self.key_head * self.key_dim)

    def key(self, row: b.Expr) -> b.Expr:
        return b.let(self.query(row) + self.key_size)

    def of_values(self, row: b.Expr, stride: int) -> b.Expr:
        """Where the tile's columns begin in a row that ends with the values of heads."""
        return b.let(row * stride + (stride - self.heads * self.value_dim) + self.head * self.value_dim + self.column)

    def in_pool(self, slot: b.Expr) -> b.Expr:
        return b.let((slot * self.heads + self.head) * (self.key_dim * self.value_dim) + self.column)

    # ---- the tokens of a sequence -----------------------------------------------------------------------------------

    def pass_tokens(self, columns: list[tuple[int, int]]) -> None:
        """columns: (start within the tile, count) of its vectors."""
        self.columns = columns
        self.told, self.seen = b.Vectors(_CHAINS * len(columns)), b.Vectors(_CHAINS * len(columns))
        self.change = b.Vectors(len(columns))
        tokens, start = self.tokens, self.tokens.first
        self.slot, self.keep_slot = self.in_pool(tokens.slot), self.in_pool(tokens.keep_slot)
        self.clear()
        with T.If(tokens.position > 0):
            with T.Then():
                self.fetch(self.slot)
            with T.Else(), T.serial(self.key_dim * self.tile // b.WIDTH) as v:
                self.state.store(b.splat(0.0), v * b.WIDTH)
        with T.serial(T.truncdiv(tokens.end - start + (_TOGETHER - 1), _TOGETHER)) as group:
            first = b.let(start + group * _TOGETHER)
            count = b.let(T.min(tokens.end - first, _TOGETHER))
            self.measure(first, count)
            with T.serial(count) as i:
                row = b.let(first + i)
                held = self.finish(row, i)
                with T.If(row + 1 < tokens.end):
                    with T.Then():
                        self.clear()
                        self.advance(row, held)
                        with b.when(row == tokens.keep_row):
                            self.keep()
                    with T.Else():
                        self.leave(row, held, self.slot)
                        with b.when(row == tokens.keep_row):
                            self.leave(row, held, self.keep_slot)

    def measure(self, first: b.Expr, count: b.Expr) -> None:
        """Lengths of the queries and keys of tokens, and their products: of several, since one would be waited for."""
        with T.serial(count) as i:
            row = b.let(first + i)
            query, key = self.query(row), self.key(row)
            for start, _ in self.columns:
                b.do("prefetch", b.at(self.k["qkv"], self.of_values(row, self.stride) + start))
            sums = b.Vectors(lane_sums.COUNT)
            for start, size in b.pieces(self.key_dim):
                q, k = (b.kept(b.load_vector(self.k["qkv"], at + start, size)) for at in (query, key))
                for place, (one, other) in enumerate(((q, q), (k, k), (q, k))):
                    sums[place] = b.call("fma", one, other, sums[place]) if start else b.call("mul", one, other)
            sums[_NONE] = b.splat(0.0)
            vectors = [sums[place] for place in range(lane_sums.COUNT)]
            b.do(lane_sums.NAME, *vectors, self.sums.at(i * lane_sums.COUNT), lane_sums.COUNT)
        with T.serial(_TOGETHER * lane_sums.COUNT // b.WIDTH) as v:
            root = b.call("sqrt", b.call("add", self.sums.vector(v * b.WIDTH), b.splat(NORM_EPS)))
            self.units.store(b.call("div", b.splat(1.0), root), v * b.WIDTH)

    def finish(self, row: b.Expr, i: b.Expr) -> b.Expr:
        """From the sums of a token: what it changes, and its output. Returns how much of the state it holds.

        i: among those that were measured.
        """

        def of_token(memory: b.Scratch, place: int) -> b.Expr:
            return b.kept(b.splat(memory.element(i * lane_sums.COUNT + place)))

        gates = b.let(row * (2 * self.heads) + self.head)
        writes, held = (b.kept(b.splat(self.k["gates"][gates + at])) for at in (0, self.heads))
        of_key, alike = of_token(self.units, _OF_KEY), of_token(self.sums, _OF_BOTH)
        told_by, written_by = b.kept(b.call("mul", held, of_key)), b.kept(b.call("mul", writes, of_key))
        shown_by = b.kept(b.call("mul", of_token(self.units, _OF_QUERY), b.splat(self.key_dim**-0.5)))
        source, to = self.of_values(row, self.stride), self.of_values(row, self.heads * self.value_dim)
        for c, (start, count) in enumerate(self.columns):
            told, seen = (b.call("add", sums[c], sums[len(self.columns) + c]) for sums in (self.told, self.seen))
            value = b.load_vector(self.k["qkv"], source + start, count)
            self.change[c] = b.call("mul", b.call("fnma", told, told_by, value), written_by)
            shown = b.call("fma", alike, self.change[c], b.call("mul", seen, held))
            b.store_vector(self.k["out"], b.call("mul", shown, shown_by), to + start, count)
        return held

    # ---- passes over the state --------------------------------------------------------------------------------------

    def each_key(self, body: Callable[[b.Expr, int], None]) -> None:
        """Calls body(element of the key, its partial sum)."""
        whole = self.key_dim // _STEP
        with T.serial(whole) as step:
            for i in range(_STEP):
                body(b.let(step * _STEP + i), i % _CHAINS)
        for i in range(whole * _STEP, self.key_dim):
            body(T.int32(i), i % _CHAINS)

    def clear(self) -> None:
        for i in range(_CHAINS * len(self.columns)):
            self.told[i], self.seen[i] = b.splat(0.0), b.splat(0.0)

    def find(self, query: b.Expr, i: b.Expr, c: int, chain: int, state: b.Expr) -> None:
        """Adds what the state tells to element i of a token's key and query, in a column."""
        at = chain * len(self.columns) + c
        self.told[at] = b.call("fma", state, b.splat(self.k["qkv"][query + self.key_size + i]), self.told[at])
        self.seen[at] = b.call("fma", state, b.splat(self.k["qkv"][query + i]), self.seen[at])

    def changed(self, held: b.Expr, key: b.Expr, i: b.Expr, c: int) -> b.Expr:
        """The state behind a token whose change is known."""
        before = b.call("mul", self.state.vector(i * self.tile + c * b.WIDTH), held)
        return b.kept(b.call("fma", b.splat(self.k["qkv"][key + i]), self.change[c], before))

    def fetch(self, pool: b.Expr) -> None:
        """Reads the state, and finds what the first token is told and sees."""
        query = self.query(self.tokens.first)

        def body(i: b.Expr, chain: int) -> None:
            for c, (start, count) in enumerate(self.columns):
                state = b.kept(b.load_vector(self.k["k_pool"], pool + i * self.value_dim + start, count))
                self.state.store(state, i * self.tile + c * b.WIDTH)
                b.do("prefetch", b.at(self.k["k_pool"], pool + (i + _AHEAD) * self.value_dim + start))
                self.find(query, i, c, chain, state)

        self.each_key(body)

    def advance(self, row: b.Expr, held: b.Expr) -> None:
        """Changes the state by a token, and finds what the next one is told and sees. Prefetches what is read later."""
        query, key = self.query(row + 1), self.key(row)
        self.reach(row, self.slot, self.tokens.end - 1)
        self.reach(row, self.keep_slot, self.tokens.keep_row)
        later = b.let(T.min(row + _TOGETHER, self.tokens.end - 1))
        for ahead in (self.query(later), self.key(later)):
            for start, _ in b.pieces(self.key_dim):
                b.do("prefetch_l2", b.at(self.k["qkv"], ahead + start))

        def body(i: b.Expr, chain: int) -> None:
            for c in range(len(self.columns)):
                state = self.changed(held, key, i, c)
                self.state.store(state, i * self.tile + c * b.WIDTH)
                self.find(query, i, c, chain, state)

        self.each_key(body)

    def reach(self, row: b.Expr, pool: b.Expr, last: b.Expr) -> None:
        """Prefetches a token's part of a slot that is written behind row `last`, if that comes soon."""
        each = b.ceil_div(self.key_dim, _REACHING)
        first = b.let((last - row - 1) * each)
        with b.when(T.And(first >= 0, first < self.key_dim)), T.serial(each) as n:
            i = b.let(T.min(first + n, self.key_dim - 1))
            for start, _ in self.columns:
                b.do("prefetch_write", b.at(self.k["k_pool"], pool + i * self.value_dim + start))

    def keep(self) -> None:
        """Writes the state to the slot where it is kept."""

        def body(i: b.Expr, _: int) -> None:
            for c, (start, count) in enumerate(self.columns):
                state = self.state.vector(i * self.tile + c * b.WIDTH)
                b.store_vector(self.k["k_pool"], state, self.keep_slot + i * self.value_dim + start, count)

        self.each_key(body)

    def leave(self, row: b.Expr, held: b.Expr, pool: b.Expr) -> None:
        """Writes the state behind the last token."""
        key = self.key(row)

        def body(i: b.Expr, _: int) -> None:
            for c, (start, count) in enumerate(self.columns):
                state = self.changed(held, key, i, c)
                b.store_vector(self.k["k_pool"], state, pool + i * self.value_dim + start, count)

        self.each_key(body)
