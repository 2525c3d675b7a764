"""Queries in shared memory, and their products with keys."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.groups import Shared, some, spread
from llmc.compiler.targets.gpu.kernels.partition import rows_of
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.wide import WideRows
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let


class Queries:
    """`heads` neighbouring heads, of `all_heads`, of at most `tokens` tokens. name: of the buffer. width: of a head."""

    def __init__(self, k: Frame, name: str, all_heads: int, heads: int, tokens: int, width: int) -> None:
        self._k, self._name, self._all_heads, self._heads, self._width = k, name, all_heads, heads, width
        self._rows = heads * tokens
        # Element by element, so that an item finds the rows of one side by side.
        self._staged = Shared(self._rows * width)

    def load(self, run: Run, head: Expr) -> None:
        """Stages the queries of a run. head: the first."""
        width, of_token = self._width, self._heads * self._width
        source = let((run.token * self._all_heads + head) * width)
        if run.most == 1:
            with spread(self._k, of_token) as i:
                self._put(T.truncdiv(i, width), T.truncmod(i, width), source + i)
            return
        with some(self._k, let(run.count * of_token)) as i:
            token, within = let(T.truncdiv(i, of_token)), let(T.truncmod(i, of_token))
            row = let(token * self._heads + T.truncdiv(within, width))
            at = let(source + token * (self._all_heads * width) + within)
            self._put(row, T.truncmod(within, width), at)

    def _put(self, row: Expr, element: Expr, index: Expr) -> None:
        self.put(row, element, self._k.raw(self._name, index))

    def put(self, row: Expr, element: Expr, number: Expr) -> None:
        """Stages a number of a row."""
        self._staged[let(element * self._rows + row)] = number

    def products(self, run: Run, wide: WideRows, keys: Sequence[Expr]) -> list[list[Expr]]:
        """Of each key, for each row, a chain over elements. keys: indices of their first elements in `wide`."""
        totals = [[Cell(T.float32(0.0)) for _ in range(self._rows)] for _ in keys]

        def multiply(rows: int) -> None:
            with T.serial(self._width // wide.count) as turn:
                first = let(turn * wide.count)
                numbers = [wide.read(let(key + first)) for key in keys]
                for i in range(wide.count):
                    for row in range(rows):
                        query = let(self._staged[(first + i) * self._rows + row], "float32")
                        for of_key, number in zip(totals, numbers, strict=True):
                            of_key[row].set(fma(query, number[i], of_key[row].get()))

        rows_of(run, self._heads, multiply)
        return [[total.get() for total in of_key] for of_key in totals]
