"""Steps of an operand's rows in shared memory, copied there while earlier ones are multiplied."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fragments import Operand, call
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling
from llmc.compiler.targets.gpu.kernels.tensor_sums import Layer
from llmc.compiler.targets.gpu.tensor_cores import ITEMS
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, let


class Staged:
    """Rows of an operand staged in shared memory, for some steps. memory: words, from `begin` on."""

    def __init__(self, of: Layer, operand: Operand, count: int, stages: int, memory: Shared, begin: int) -> None:
        self._of, self._operand, self._count, self._stages = of, operand, count, stages
        self._row_words, self._memory, self._begin = operand.step_bytes // 4, memory, begin

    def rows(self, row_of: Callable[[Expr], Expr]) -> None:
        """Sets the rows to be copied from now on. row_of: buffer row, by staged position."""
        self._turns = []
        item, copied = calling(self._of.k).item, self._operand.copied
        pieces = self._operand.step_bytes // copied
        for done in range(0, self._count * pieces, ITEMS):
            index = let(item + done)
            place, at = let(T.truncdiv(index, pieces)), let(T.truncmod(index, pieces) * copied)
            self._turns.append((place, at, let(self._operand.seat(place, at)), row_of(place)))

    def _stage(self, step: Expr) -> Expr:
        return let(T.truncmod(step, self._stages) * (self._count * self._row_words) + self._begin)

    def copy(self, step: Expr) -> None:
        stage, operand = self._stage(step), self._operand
        for place, at, seat, row in self._turns:
            to = self._memory.address(let(stage + place * self._row_words + T.truncdiv(seat, 4)))
            call(f"llmc_copy{operand.copied}", to, operand.address(self._of.k, row, step, at))

    def read(self, step: Expr, place: Expr) -> Array:
        words, of = Array(4, "uint32"), self._of
        begin = let(self._stage(step) + place * self._row_words)
        self._operand.read(words, self._memory, begin, of.lane, of.of_row)
        return words
