"""delta_rule: the gated delta rule over the tokens of each sequence; lines are columns of a head's state."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.states import Inputs, States
from llmc.compiler.targets.gpu.state_tiles import LINES, PIECE, StateTile
from llmc.compiler.targets.reference.kernels.delta import INPUTS, NORM_EPS
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let

_FACTS = 2, 3  # strength of a write, what the state keeps; then also the product of query and key


def delta_rule(spec: KernelSpec) -> tirx.PrimFunc:
    """A token's query and key, its vectors, get length 1, and the query is multiplied by key_dim^-1/2."""
    with Frame(spec.symbol(), {"qkv": "f32", "gates": "f32", **INPUTS, "k_pool": "f32", "out": "f32"}) as k:
        _DeltaRule(k, spec).run()
    return k.function()


class _DeltaRule(States):
    def __init__(self, k: Frame, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self._num_heads, self._key_heads, self._tiled = int(p["heads"]), int(p["key_heads"]), bool(p["tiled"])
        tile = StateTile(int(p["key_dim"]), int(p["value_dim"]))
        self._keys = self._key_heads * tile.size
        self._stride = 2 * self._keys + self._num_heads * tile.lines
        super().__init__(
            k, "qkv", tile, self._num_heads, aligned=self._stride % PIECE == 0, by_lines=True,
            facts=_FACTS, sums=2 * LINES,
        )  # fmt: skip

    def inputs(self, row: Expr, head: Expr) -> Inputs:
        heads, size = self._num_heads, self.tile.size
        key_head = T.truncmod(head, self._key_heads) if self._tiled else T.truncdiv(head, heads // self._key_heads)
        query, gate = let(row * self._stride + key_head * size), let(row * (2 * heads) + head)
        lines = let(row * self._stride + 2 * self._keys + head * self.tile.lines)
        return Inputs((query, let(query + self._keys)), lines, [("gates", gate), ("gates", gate + heads)])

    def prepare(self, vectors: Sequence[Array], facts: Sequence[Expr]) -> Sequence[Expr]:
        query, key = vectors
        of_query, of_key, product = (Cell(T.float32(0.0)) for _ in range(3))
        with self.each() as (place, _):
            of_query.set(fma(query[place], query[place], of_query.get()))
            of_key.set(fma(key[place], key[place], of_key.get()))
            product.set(fma(query[place], key[place], product.get()))
        self.team.add((of_query, of_key, product))
        unit_query, unit_key = (
            let(T.float32(factor) / T.sqrt(squares.get() + T.float32(NORM_EPS)), "float32")
            for factor, squares in ((self.tile.size**-0.5, of_query), (1.0, of_key))
        )
        with self.each() as (place, _):
            query[place] = query[place] * unit_query
            key[place] = key[place] * unit_key
        return *facts, product.get() * unit_query * unit_key

    def advance(self, vectors: Sequence[Array], facts: Sequence[Expr], lines: Sequence[Expr]) -> list[Expr]:
        """The result is the changed state times the query. That is the state before it times the query, plus the change
        times the product of query and key: so both sums over a line are added at once."""
        (query, key), (writes, kept, product) = vectors, facts
        told, read = ([Cell(T.float32(0.0)) for _ in range(LINES)] for _ in range(2))
        with self.each() as (place, of_lines):
            for number, at in enumerate(of_lines):
                self.state[at] = self.state[at] * kept
                told[number].set(fma(self.state[at], key[place], told[number].get()))
                read[number].set(fma(self.state[at], query[place], read[number].get()))
        self.team.add((*told, *read))
        changes = [let((value - of.get()) * writes, "float32") for value, of in zip(lines, told, strict=True)]
        with self.each() as (place, of_lines):
            for change, at in zip(changes, of_lines, strict=True):
                self.state[at] = fma(key[place], change, self.state[at])
        return [let(fma(change, product, of.get()), "float32") for change, of in zip(changes, read, strict=True)]
