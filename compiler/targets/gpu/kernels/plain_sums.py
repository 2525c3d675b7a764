"""Sums of a linear layer by plain multiplications, of a block of rows of x by weight rows.

A sum is `CHAINS` chains. A piece of K is what one read gives, or a scale group where sums of integers are scaled. Chain
c has every eighth piece from piece c on, in ascending order, and chains meet in a tree of neighbours. So bits depend on
the layer alone: neither on a tile's form nor on other rows. Products are added by fma for floats, and exactly for
integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.groups import Shared, unrolled
from llmc.compiler.targets.gpu.kernels.weight_reads import Read, WeightReads
from llmc.compiler.targets.gpu.kernels.x_reads import XReads
from llmc.compiler.targets.gpu.plain_forms import CHAINS, PLACES, PlainForm
from llmc.compiler.targets.reference.kernels.frame import Array, Expr, Frame, let, when

_APART = 4
"""Words between the chains in shared memory, so that neighbours are in different banks."""

Add = Callable[[Expr, Expr, Expr], Expr]
"""(x, weight, sum) -> the sum with their product."""


def add_integers(x: Expr, weight: Expr, total: Expr) -> Expr:
    return total + x * weight


def add_words(x: Expr, weight: Expr, total: Expr) -> Expr:
    """Products of words of four numbers."""
    return total + T.call_pure_extern("int32", "llmc_dot4", x, weight)


class Sums:
    """How a layer's products are added.

    x, weights: of `width` elements a row. scale: of a weight row's scale group, of `length` elements, where exact sums
    of integers are scaled one by one; None where all are one sum, of floats or of integers.
    """

    def __init__(
        self, x: XReads, weights: WeightReads, width: int, add: Add = fma, length: int = 0,
        scale: Callable[[Frame, Expr, Expr], Expr] | None = None,
    ) -> None:  # fmt: skip
        self.x, self.weights, self.width, self.add, self.scale = x, weights, width, add, scale
        self.number = "float32" if add is fma else "int32"
        self.total = "int32" if add is not fma and scale is None else "float32"
        self._reads = length // weights.count if scale else 1  # of a piece
        self._whole, self._rest = divmod(width // weights.count, self._reads)

    def count(self, chain: Expr) -> Expr:
        """Reads of a chain."""
        count = let(T.truncdiv(self._whole - chain + (CHAINS - 1), CHAINS) * self._reads)
        if not self._rest:
            return count
        return let(count + T.Select(chain == self._whole % CHAINS, self._rest, 0))

    def first(self, chain: Expr, read: Expr) -> Expr:
        """The first element of a chain's read."""
        if self._reads == 1:
            return let((read * CHAINS + chain) * self.weights.count)
        piece = let(T.truncdiv(read, self._reads) * CHAINS + chain)
        return let((piece * self._reads + T.truncmod(read, self._reads)) * self.weights.count)

    def ending(self, chain: Expr, read: Expr, count: Expr) -> AbstractContextManager[None]:
        """Where a read is the last one of its scale group."""
        return when(T.Or(T.truncmod(read + 1, self._reads) == 0, read + 1 == count))

    def group(self, chain: Expr, read: Expr) -> Expr:
        """The scale group of a chain's read."""
        return let(T.truncdiv(read, self._reads) * CHAINS + chain)


class Block:
    """The sums of an item in a form: one chain of `form.rows` rows of x by some weight rows."""

    def __init__(self, k: Frame, sums: Sums, form: PlainForm, parts: int) -> None:
        self._k, self._sums, self._form, self._parts = k, sums, form, parts

    def compute(self, chain: Expr, starts: Sequence[Expr], weight_rows: Sequence[Expr]) -> list[Array]:
        """By weight row, the sums by row of x. starts: of these rows in x. weight_rows: of the weight."""
        k, sums, form, weights = self._k, self._sums, self._form, self._sums.weights
        self._starts, self._weight_rows = Array(form.rows, "int32"), weight_rows
        for i, start in enumerate(starts):
            self._starts[i] = start
        self._exact = [self._zeros(sums.number) for _ in weight_rows]
        self._scaled = [self._zeros("float32") for _ in weight_rows] if sums.scale else self._exact
        count, ahead = sums.count(chain), form.reads(self._parts, weights.bytes)

        def turn(read: Expr, ahead: int) -> None:
            reads = [let(read + i) for i in range(ahead)]
            firsts = [sums.first(chain, one) for one in reads]
            found = [[weights.read(k, row, first) for row in weight_rows] for first in firsts]
            for one, first, of_rows in zip(reads, firsts, found, strict=True):
                self._add(first, of_rows)
                if sums.scale:
                    with sums.ending(chain, one, count):
                        self._scale(sums.group(chain, one))

        turns = let(T.truncdiv(count, ahead))
        with T.serial(turns) as number:
            turn(let(number * ahead), ahead)
        if ahead > 1:
            done = let(turns * ahead)
            with T.serial(let(count - done)) as number:
                turn(let(done + number), 1)
        return self._scaled

    def _zeros(self, dtype: str) -> Array:
        zeros = Array(self._form.rows, dtype)
        with unrolled(self._form.rows) as row:
            zeros[row] = T.Cast(dtype, T.int32(0))
        return zeros

    def _add(self, first: Expr, reads: Sequence[Read]) -> None:
        """Adds the products of reads, some elements at a time, since all numbers of these are in registers."""
        k, sums = self._k, self._sums
        for begin in range(0, sums.weights.count, sums.x.count):
            numbers = [Array(sums.x.count, sums.number) for _ in reads]
            with unrolled(sums.x.count) as i:
                for of_row, read in zip(numbers, reads, strict=True):
                    of_row[i] = sums.weights.element(k, read, let(i + begin))
            at = let(first + begin)
            with unrolled(self._form.rows) as row:
                start = let(self._starts[row])
                words = sums.x.read(k, start, at)
                with unrolled(sums.x.count) as i:
                    x = sums.x.element(k, start, at, words, i)
                    for total, of_row in zip(self._exact, numbers, strict=True):
                        total[row] = sums.add(x, of_row[i], total[row])

    def _scale(self, group: Expr) -> None:
        assert self._sums.scale is not None
        for weight_row, exact, scaled in zip(self._weight_rows, self._exact, self._scaled, strict=True):
            scale = let(self._sums.scale(self._k, weight_row, group), "float32")
            with unrolled(self._form.rows) as row:
                scaled[row] = scaled[row] + T.Cast("float32", exact[row]) * scale
                exact[row] = T.int32(0)


class Meeting:
    """Shared memory in which chains meet."""

    def __init__(self, forms: Sequence[PlainForm], parts: int, dtype: str) -> None:
        self._dtype = dtype
        self._pitch = max(form.rows * form.own(parts) for form in forms) * parts * PLACES + _APART
        self._memory = Shared(CHAINS * self._pitch, dtype)

    def put(self, chain: Expr, place: Expr, block: Sequence[Array], rows: int) -> None:
        """The sums of an item."""
        for number, of_weight in enumerate(block):
            with unrolled(rows) as row:
                at = let(chain * self._pitch + (number * rows + row) * PLACES + place)
                self._memory[at] = of_weight[row]

    def total(self, number: Expr, place: Expr) -> Expr:
        """A sum of all chains. number: of the sum in its item."""
        at = let(number * PLACES + place)
        found = [let(self._memory[at + chain * self._pitch], self._dtype) for chain in range(CHAINS)]
        while len(found) > 1:
            found = [let(a + b, self._dtype) for a, b in zip(found[::2], found[1::2], strict=True)]
        return found[0]
