"""selective_state: Mamba-2's states over the tokens of each sequence, one tile of rows of a head's state at a time.

A tile stays in L1 while the tokens of a step pass. The order of a sum depends on the size of a row alone, so a token
has the same bits in every step, whichever tokens are with it.
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

_TOGETHER = lane_sums.COUNT  # rows whose sums are found together
_TILE = b.WIDTH  # rows: their results are one cache line


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("xbc", "steps", "skip", *state_tokens.BUFFERS, "k_pool", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    types = dict.fromkeys(state_tokens.BUFFERS, "int32")
    helpers = vector.helpers(target.mcpu) + lane_sums.helpers()
    kernel = b.Kernel(spec.symbol(), [(name, types.get(name, "float32")) for name in buffers(spec)], helpers)
    with kernel as k:
        _States(spec).run(k)
    return kernel.function()


class _States:
    def __init__(self, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self.heads, self.head_dim, self.groups = int(p["heads"]), int(p["head_dim"]), int(p["groups"])
        self.state_size = int(p["state_size"])
        self.size = self.heads * self.head_dim
        self.stride = self.size + 2 * self.groups * self.state_size
        self.vectors = b.pieces(self.state_size)
        self.width = len(self.vectors) * b.WIDTH  # of a row in the tile; lanes beyond its end stay zero

    def run(self, k: b.Kernel) -> None:
        self.k = k
        seqs = k.scalar(state_tokens.NUM_SEQS)
        tiles = b.ceil_div(self.head_dim, _TILE)
        self.state = b.Scratch(_TILE * self.width, "float32")
        self.added, self.found = b.Scratch(_TILE, "float32"), b.Scratch(_TILE, "float32")
        # Sequences have unequal numbers of tokens. All of them have the same tiles, so tasks divide these first.
        with k.share(b.let(seqs * (self.heads * tiles))) as unit:
            place = b.let(T.truncdiv(unit, seqs))
            self.tokens = state_tokens.Tokens(k, b.let(T.truncmod(unit, seqs)))
            self.head = b.let(T.truncdiv(place, tiles))
            of_head = b.let(T.truncmod(place, tiles) * _TILE)
            self.first_row = b.let(self.head * self.head_dim + of_head)
            self.of_group = b.let(T.truncdiv(self.head, self.heads // self.groups) * self.state_size + self.size)
            last = self.head_dim - (tiles - 1) * _TILE
            if tiles == 1 or last == _TILE:
                self.pass_tokens(last)
            else:
                with T.If(of_head + _TILE <= self.head_dim):
                    with T.Then():
                        self.pass_tokens(_TILE)
                    with T.Else():
                        self.pass_tokens(last)

    def pass_tokens(self, rows: int) -> None:
        """rows: of the tile."""
        tokens = self.tokens
        with T.If(tokens.position > 0):
            with T.Then():
                self.fetch(rows, self.in_pool(tokens.slot))
            with T.Else(), T.serial(_TILE * self.width // b.WIDTH) as v:
                self.state.store(b.splat(0.0), v * b.WIDTH)
        with T.serial(tokens.first, tokens.end) as row:
            self.advance(rows, row)
            with b.when(row == tokens.keep_row):
                self.keep(rows, self.in_pool(tokens.keep_slot))
        self.keep(rows, self.in_pool(tokens.slot))

    def in_pool(self, slot: b.Expr) -> b.Expr:
        return b.let((slot * self.size + self.first_row) * self.state_size)

    def each_vector(self, rows: int, body: Callable[[b.Expr, b.Expr, int], None]) -> None:
        """Calls body(place in the tile, place in the pool behind the tile's first, count) for its vectors."""
        with T.serial(rows) as row:
            for start, count in self.vectors:
                body(b.let(row * self.width + start), b.let(row * self.state_size + start), count)

    def fetch(self, rows: int, pool: b.Expr) -> None:
        self.each_vector(
            rows,
            lambda at, source, count: self.state.store(b.load_vector(self.k["k_pool"], pool + source, count), at),
        )

    def keep(self, rows: int, pool: b.Expr) -> None:
        self.each_vector(
            rows,
            lambda at, to, count: b.store_vector(self.k["k_pool"], self.state.vector(at), pool + to, count),
        )

    def advance(self, rows: int, row: b.Expr) -> None:
        """Changes the states of the tile by a token, and writes its results."""
        gates = b.let(row * (2 * self.heads) + self.head)
        step, kept = (b.kept(b.splat(self.k["steps"][gates + at])) for at in (0, self.heads))
        x = b.kept(b.load_vector(self.k["xbc"], b.let(row * self.stride + self.first_row), rows))
        self.added.store(b.call("mul", x, step), 0)
        writes = b.let(row * self.stride + self.of_group)
        reads = b.let(writes + self.groups * self.state_size)
        # Rows beyond the head's last have any numbers, and are not written.
        with T.serial(b.ceil_div(rows, _TOGETHER)) as group:
            first = b.let(group * _TOGETHER)
            sums, added = b.Vectors(_TOGETHER), b.Vectors(_TOGETHER)
            for i in range(_TOGETHER):
                added[i] = b.splat(self.added.element(first + i))
            for start, count in self.vectors:
                write, read = (b.kept(b.load_vector(self.k["xbc"], at + start, count)) for at in (writes, reads))
                for i in range(_TOGETHER):
                    at = b.let((first + i) * self.width + start)
                    state = b.kept(b.call("fma", added[i], write, b.call("mul", self.state.vector(at), kept)))
                    self.state.store(state, at)
                    sums[i] = b.call("fma", state, read, sums[i]) if start else b.call("mul", state, read)
            b.do(lane_sums.NAME, *(sums[i] for i in range(_TOGETHER)), self.found.at(first), _TOGETHER)
        skip = b.splat(self.k["skip"][self.head])
        result = b.call("fma", x, skip, self.found.vector(0))
        b.store_vector(self.k["out"], result, b.let(row * self.size + self.first_row), rows)
