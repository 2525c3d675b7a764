"""The row of x that a linear layer norms itself: all items of a group read it, and it lies in shared memory.

Its bits are those of `rms_norm`, in any group: a sum of squares is as many chains as that kernel has items, of which an
item here has two that are neighbours, the ones that the tree joins first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fold import Fold, add
from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import Shared, all_of, calling, sync, unrolled
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile
from llmc.compiler.targets.gpu.kernels.rows import root_factor
from llmc.compiler.targets.gpu.kernels.tensor_sums import Layer
from llmc.compiler.targets.gpu.launch import items_of_row
from llmc.compiler.targets.gpu.linear_forms import FewForm
from llmc.compiler.targets.gpu.tensor_cores import STEP_BYTES
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, let

_WORDS = 4  # of a lane's part of a step
_STEP_WORDS = STEP_BYTES // 4


class NormedRow:
    """A warp's part of x for a stage, in registers, from the group's normed row. split: as in `few_rows`."""

    def __init__(self, of: Layer, form: FewForm, split: Expr, memory: Shared) -> None:
        self._of, self._form, self._split, self._memory = of, form, split, memory
        self._begin = form.row_begin // 4
        self._pairs = of.layer.width // 2
        self._readers = min(items_of_row(of.layer.width) // 2, calling(of.k).items)
        """Items that read the row: each has two chains."""
        self._turns = -(-self._pairs // self._readers)
        self._squares = Fold(of.k, add)
        self._norm, self._x = (Array(2 * self._turns, "uint32") for _ in range(2))
        self._words = Array(form.warp_steps * _WORDS, "uint32")

    @contextmanager
    def _each(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over an item's pairs: (turn, pair of the row)."""
        item = calling(self._of.k).item
        with ExitStack() as within:
            turn = within.enter_context(unrolled(self._turns))
            pair = let(turn * self._readers + item)
            few = [item < self._readers] if self._readers < calling(self._of.k).items else []
            within.enter_context(all_of(few + ([pair < self._pairs] if self._pairs % self._readers else [])))
            yield turn, pair

    def _read(self, buffer: str, to: Array, first: Expr | int) -> None:
        with self._each() as (turn, pair):
            call("llmc_load8", to.address(turn * 2), self._of.k.address(buffer, let(first + pair * 2)))

    def begin(self, tile: Tile) -> None:
        self._first = let(tile.row(T.int32(0)) * self._of.layer.width)

    def ahead(self) -> None:
        """Before the wait for earlier kernels: none writes the norm's weight."""
        self._read("norm", self._norm, 0)

    def arrive(self, busy: list[Expr]) -> None:
        """Behind the wait: norms the row. busy: conditions of warps that multiply; all others help."""
        of, layer = self._of, self._of.layer
        self._read("x", self._x, self._first)
        chains = [Cell(T.float32(0.0)) for _ in range(2)]
        with self._each() as (turn, _):
            for one, chain in enumerate(chains):
                number = let(T.reinterpret("float32", self._x[turn * 2 + one]), "float32")
                chain.set(fma(number, number, chain.get()))
        # Items without chains have 0, which changes no sum of squares.
        squares = self._squares(let(chains[0].get() + chains[1].get(), "float32"))
        factor = root_factor(squares, layer.width, float(of.p["eps"]))
        with self._each() as (turn, pair):
            numbers = [
                let(
                    T.reinterpret("float32", self._x[turn * 2 + one])
                    * factor
                    * T.reinterpret("float32", self._norm[turn * 2 + one]),
                    "float32",
                )
                for one in range(2)
            ]
            # Rounds as `rms_norm` does, but that a NaN keeps no bits, which products would not keep either.
            self._memory[let(self._begin + pair)] = T.call_pure_extern(
                "uint32", f"llmc_rounded_{layer.dtype}", *numbers
            )
        sync()

    def enter(self, stage: Expr, count: int) -> None:
        """Before a stage is multiplied, of `count`."""
        layer, form = self._of.layer, self._form
        first = let(stage * form.depth + self._split * form.warp_steps)
        for i in range(form.warp_steps):
            step = let(T.min(first + i, layer.steps - 1)) if layer.steps % form.depth else let(first + i)
            at = let(self._begin + step * _STEP_WORDS + self._of.lane * _WORDS)
            call("llmc_load16", self._words.address(i * _WORDS), self._memory.address(at))

    def words(self, step: int, tile: int) -> list[Expr]:
        return [self._words[step * _WORDS + i] for i in range(_WORDS)]
