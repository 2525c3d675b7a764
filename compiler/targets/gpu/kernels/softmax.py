"""Attention of a few query rows to keys that they share, one partition of keys at a time.

A partition has its own maximum, and chains over ascending keys. Partitions are folded in order into a result. So it
makes no difference whether one group computes all partitions, or several groups do and `attention_merge.py` folds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.attention_split import PARTITION, partial_floats
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.frame import NUM_TOKENS, Cell, Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.functions import exp

LEAST = -3.0e38
"""Maximum over no scores: below every score that is a number."""
Put = Callable[[int, Expr, Expr], None]
"""Takes (row, element, value)."""


def later_maximum(top: Expr, most: Expr) -> Expr:
    """The maximum of a result behind one more partition, whose own is `most`."""
    return let(T.max(top, most), "float32")


def scaled(from_maximum: Expr, to_maximum: Expr) -> Expr:
    """What sums relative to one maximum are multiplied by to be relative to another."""
    return let(exp(from_maximum - to_maximum), "float32")


def joined(total: Expr, keep: Expr, weight: Expr) -> Expr:
    """A sum of weights, and the weight of a score without values."""
    return total * keep + weight


def folded(total: Expr, keep: Expr, more: Expr, gain: Expr) -> Expr:
    """A sum of earlier partitions and one of the next."""
    return fma(total, keep, let(more * gain, "float32"))


class Sums:
    """One number for each row and each element of the values; an item holds every 64th element."""

    def __init__(self, k: Frame, rows: int, width: int) -> None:
        self._k, self._width, self._rows = k, width, range(rows)
        self._cells = [[Cell(T.float32(0.0)) for _ in range(-(-width // ITEMS))] for _ in self._rows]

    def clear(self) -> None:
        for row in self._cells:
            for cell in row:
                cell.set(T.float32(0.0))

    def each(self, body: Callable[[Expr, Sequence[Cell]], None]) -> None:
        """Calls body(element, its cell of each row) for every element of this item."""
        item = calling(self._k).item
        for turn in range(len(self._cells[0])):
            element = let(turn * ITEMS + item)
            with when(element < self._width):
                body(element, [self._cells[row][turn] for row in self._rows])

    def fold(self, later: Sums, keep: Sequence[Expr], gain: Sequence[Expr]) -> None:
        """Folds a partition's sums into this result. keep, gain: of each row."""
        for row, (cells, others) in enumerate(zip(self._cells, later._cells, strict=True)):
            for cell, other in zip(cells, others, strict=True):
                cell.set(folded(cell.get(), keep[row], other.get(), gain[row]))


class Partition:
    """The softmax of `rows` rows over one partition. width: of the values."""

    def __init__(self, k: Frame, rows: int, width: int) -> None:
        self._k, self._rows = k, range(rows)
        self._scores, self._factors = Shared(rows * PARTITION), Shared(rows * PARTITION)
        self.most, self.total = Shared(rows), Shared(rows)
        self.sums = Sums(k, rows, width)

    def compute(
        self,
        start: Expr,
        first: Expr,
        last: Expr,
        scores: Callable[[Expr], Sequence[Expr]],
        scale: Callable[[Expr], Expr],
        numbers: Callable[[Expr], Callable[[Expr], Expr]],
    ) -> None:
        """Keys `first` … `last` of the partition that begins at key `start`; afterwards item r has seen the maximum and
        the sum of row r, and all items after a `sync`.

        scores: of a key, for each row. scale: of a key's values. numbers: the elements of a key's values.
        """
        k, item, rows = self._k, calling(self._k).item, self._rows
        low, end = let(T.max(first - start, 0)), let(T.min(last - start, PARTITION - 1) + 1)

        def seen(j: Expr) -> Expr:
            return T.And(j >= low, j < end)

        sync()
        with spread(k, PARTITION) as j, when(seen(j)):
            for row, value in enumerate(scores(let(start + j))):
                self._scores[row * PARTITION + j] = value
        sync()
        with when(item < len(rows)):
            most = Cell(T.float32(LEAST))
            with T.serial(low, end) as j:
                most.set(T.max(most.get(), self._scores[item * PARTITION + j]))
            self.most[item] = most.get()
        sync()
        with spread(k, PARTITION) as j, when(seen(j)):
            factor = let(scale(let(start + j)), "float32")
            for row in rows:
                at = row * PARTITION + j
                weight = let(exp(self._scores[at] - self.most[row]), "float32")
                self._scores[at] = weight
                self._factors[at] = weight * factor
        sync()
        with when(item < len(rows)):
            total = Cell(T.float32(0.0))
            with T.serial(low, end) as j:
                total.set(total.get() + self._scores[item * PARTITION + j])
            self.total[item] = total.get()
        self.sums.clear()
        with T.serial(low, end) as j:
            of_key = numbers(let(start + j))
            factors = [let(self._factors[row * PARTITION + j], "float32") for row in rows]

            def add(element: Expr, cells: Sequence[Cell]) -> None:
                value = let(of_key(element), "float32")
                for row, cell in enumerate(cells):
                    cell.set(fma(factors[row], value, cell.get()))

            self.sums.each(add)

    def store(self, first: Expr, segments: int, width: int) -> None:
        """Writes the partition computed last to `partials`. first: its record there for the first row."""
        k, item, floats = self._k, calling(self._k).item, partial_floats(width)

        def at(row: int | Expr) -> Expr:
            return let((first + row * segments) * floats)

        with when(item < len(self._rows)):
            start = at(item)
            k.put_raw("partials", self.most[item], start + width)
            k.put_raw("partials", self.total[item], start + (width + 1))

        def write(element: Expr, cells: Sequence[Cell]) -> None:
            for row, cell in enumerate(cells):
                k.put_raw("partials", cell.get(), at(row) + element)

        self.sums.each(write)


class Result:
    """What partitions in order are folded into."""

    def __init__(self, k: Frame, rows: int, width: int) -> None:
        self._k, self._rows = k, range(rows)
        self._top, self._total = Shared(rows), Shared(rows)
        self._keep, self._gain = Shared(rows), Shared(rows)
        self._sums = Sums(k, rows, width)

    def begin(self) -> None:
        """Every item of the group must call it, and `sync` before `fold`."""
        item = calling(self._k).item
        self._sums.clear()
        sync()
        with when(item < len(self._rows)):
            self._top[item] = T.float32(LEAST)
            self._total[item] = T.float32(0.0)

    def fold(self, of: Partition) -> None:
        """Folds the partition computed last; item r does the sums of row r."""
        item = calling(self._k).item
        with when(item < len(self._rows)):
            before, most = let(self._top[item], "float32"), let(of.most[item], "float32")
            top = later_maximum(before, most)
            keep, gain = scaled(before, top), scaled(most, top)
            self._total[item] = folded(self._total[item], keep, of.total[item], gain)
            self._top[item], self._keep[item], self._gain[item] = top, keep, gain
        sync()
        keep, gain = ([let(shared[row], "float32") for row in self._rows] for shared in (self._keep, self._gain))
        self._sums.fold(of.sums, keep, gain)

    def finish(self, put: Put, sink: Callable[[Expr], Expr] | None) -> None:
        """Writes the values. sink: of a row, a score without values."""
        item = calling(self._k).item
        if sink is not None:
            sync()  # all items have read the factors of the last partition
            with when(item < len(self._rows)):
                before, one = let(self._top[item], "float32"), let(sink(item), "float32")
                top = later_maximum(before, one)
                self._keep[item] = scaled(before, top)
                self._total[item] = joined(self._total[item], self._keep[item], scaled(one, top))
        sync()

        def write(element: Expr, cells: Sequence[Cell]) -> None:
            for row, cell in enumerate(cells):
                value = cell.get() if sink is None else let(cell.get() * self._keep[row], "float32")
                put(row, element, value / self._total[row])

        self._sums.each(write)


class Keys(ABC):
    """What an op's attention attends to. `begin` comes first, for each unit of work."""

    @abstractmethod
    def begin(self, token: Expr, head: Expr) -> tuple[Expr, Expr]:
        """The first and the last key that a token sees. head: the first of the unit's heads."""

    @abstractmethod
    def load(self) -> None:
        """Stages the queries in shared memory."""

    @abstractmethod
    def scores(self, position: Expr) -> Sequence[Expr]:
        """The scores of a key, for each head."""

    @abstractmethod
    def scale(self, position: Expr) -> Expr:
        """The scale of a key's values."""

    @abstractmethod
    def numbers(self, position: Expr) -> Callable[[Expr], Expr]:
        """The elements of a key's values before scaling."""

    @abstractmethod
    def put(self, row: int, element: Expr, value: Expr) -> None:
        """Writes a result."""

    sink: Callable[[Expr], Expr] | None = None
    """Of a row, a score without values."""


def attend(k: Frame, keys: Keys, heads: int, rows: int, width: int, segments: int) -> None:
    """The body of a kernel: a group computes `rows` heads of a token, and of a split context one partition of it.

    segments: partitions side by side in the buffer `partials`; 0: a group walks the whole context.
    """
    parts, num_tokens = heads // rows, k.scalar(NUM_TOKENS)
    units = let(num_tokens * parts)
    partition = Partition(k, rows, width)
    result = None if segments else Result(k, rows, width)
    with calling(k).share_groups(let(units * max(1, segments))) as unit:
        # Units of later partitions come later: many have no keys, and groups pass them quickly.
        own, rest = let(T.truncdiv(unit, units)), let(T.truncmod(unit, units))
        token, head = let(T.truncdiv(rest, parts)), let(T.truncmod(rest, parts) * rows)
        first, last = keys.begin(token, head)
        start, end = let(T.truncdiv(first, PARTITION)), let(T.truncdiv(last, PARTITION) + 1)
        if segments:
            # As in `turns`, a compiler must not see that the loop has one turn at most.
            one = let(T.truncdiv(units, T.max(units, 1)))
            start, end = let(T.max(start, own)), let(T.min(end, own + one))
        if result is not None:
            result.begin()
        sync()
        # Also for units without keys: PoCL 3.1 misplaces what is guarded between two barriers.
        keys.load()
        with T.serial(start, end) as number:
            partition.compute(let(number * PARTITION), first, last, keys.scores, keys.scale, keys.numbers)
            if result is not None:
                result.fold(partition)
            else:
                partition.store(let((token * heads + head) * segments + number), segments, width)
        if result is not None:
            result.finish(keys.put, keys.sink)
