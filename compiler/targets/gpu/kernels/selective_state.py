"""selective_state: Mamba-2's states over the tokens of each sequence; lines are rows of a head's state."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.kernels.states import States
from llmc.compiler.targets.gpu.state_tiles import LINES, StateTile
from llmc.compiler.targets.reference.kernels.delta import INPUTS
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let

_FACTS = 3  # step, what the state keeps, skip


def selective_state(spec: KernelSpec) -> tirx.PrimFunc:
    buffers = {"xbc": "f32", "steps": "f32", "skip": "f32", **INPUTS, "k_pool": "f32", "out": "f32"}
    with Frame(spec.symbol(), buffers) as k:
        _SelectiveState(k, spec).run("xbc")
    return k.function()


class _SelectiveState(States):
    """The vectors of a token are the directions in which it writes and reads."""

    def __init__(self, k: Frame, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self._all_heads, self._groups = int(p["heads"]), int(p["groups"])
        tile = StateTile(int(p["state_size"]), int(p["head_dim"]))
        self._values = self._all_heads * tile.lines
        self._stride = self._values + 2 * self._groups * tile.size
        super().__init__(k, tile, self._all_heads, int(p["block_size"]), by_lines=False, facts=_FACTS, sums=LINES)

    def prepare(self, row: Expr) -> tuple[Sequence[Array], Sequence[Expr], Expr]:
        k, heads, size = self.k, self._all_heads, self.tile.size
        group = T.truncdiv(self.head, heads // self._groups)
        writes = let(row * self._stride + self._values + group * size)
        aligned = self._stride % 4 == 0 and self._values % 4 == 0
        vectors = [self.part("xbc", first, aligned) for first in (writes, let(writes + self._groups * size))]
        steps = [let(k.raw("steps", row * (2 * heads) + i * heads + self.head), "float32") for i in range(2)]
        facts = (*steps, let(k.raw("skip", self.head), "float32"))
        return vectors, facts, let(row * self._stride + self.head * self.tile.lines)

    def advance(self, vectors: Sequence[Array], facts: Sequence[Expr], inputs: Sequence[Expr]) -> list[Expr]:
        (writes, reads), (step, kept, skip) = vectors, facts
        found = [Cell(T.float32(0.0)) for _ in range(LINES)]
        added = [let(x * step, "float32") for x in inputs]
        with self.each() as (place, of_lines):
            for line, at in enumerate(of_lines):
                self.state[at] = fma(added[line], writes[place], self.state[at] * kept)
                found[line].set(fma(self.state[at], reads[place], found[line].get()))
        self.team.add(found)
        return [let(fma(x, skip, of.get()), "float32") for x, of in zip(inputs, found, strict=True)]
