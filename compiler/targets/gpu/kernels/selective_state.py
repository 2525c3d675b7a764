"""selective_state: Mamba-2's states over the tokens of each sequence; lines are rows of a head's state."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.states import Inputs, States
from llmc.compiler.targets.gpu.state_tiles import LINES, PIECE, StateTile
from llmc.compiler.targets.reference.kernels.delta import INPUTS
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let

_FACTS = 3, 3  # step, what the state keeps, skip


def selective_state(spec: KernelSpec) -> tirx.PrimFunc:
    """The vectors of a token are the directions in which it writes and reads."""
    buffers = {"xbc": "f32", "steps": "f32", "skip": "f32", **INPUTS, "k_pool": "f32", "out": "f32"}
    with Frame(spec.symbol(), buffers) as k:
        _SelectiveState(k, spec).run()
    return k.function()


class _SelectiveState(States):
    def __init__(self, k: Frame, spec: KernelSpec) -> None:
        p = spec.as_dict()
        self._num_heads, self._groups = int(p["heads"]), int(p["groups"])
        tile = StateTile(int(p["state_size"]), int(p["head_dim"]))
        self._values = self._num_heads * tile.lines
        self._stride = self._values + 2 * self._groups * tile.size
        aligned = self._stride % PIECE == 0 and self._values % PIECE == 0
        super().__init__(
            k, "xbc", tile, self._num_heads, aligned=aligned, by_lines=False,
            facts=_FACTS, sums=LINES,
        )  # fmt: skip

    def inputs(self, row: Expr, head: Expr) -> Inputs:
        heads, size = self._num_heads, self.tile.size
        group = T.truncdiv(head, heads // self._groups)
        writes, step = let(row * self._stride + self._values + group * size), let(row * (2 * heads) + head)
        facts = [("steps", step), ("steps", step + heads), ("skip", head)]
        return Inputs(
            (writes, let(writes + self._groups * size)), let(row * self._stride + head * self.tile.lines), facts
        )

    def advance(self, vectors: Sequence[Array], facts: Sequence[Expr], lines: Sequence[Expr]) -> list[Expr]:
        (writes, reads), (step, kept, skip) = vectors, facts
        found = [Cell(T.float32(0.0)) for _ in range(LINES)]
        added = [let(x * step, "float32") for x in lines]
        with self.each() as (place, of_lines):
            for number, at in enumerate(of_lines):
                self.state[at] = fma(added[number], writes[place], self.state[at] * kept)
                found[number].set(fma(self.state[at], reads[place], found[number].get()))
        self.team.add(found)
        return [let(fma(x, skip, of.get()), "float32") for x, of in zip(lines, found, strict=True)]
