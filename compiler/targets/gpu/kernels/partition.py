"""The softmax of query rows over one partition of keys: the arithmetic of attention, equal in all kernels.

A score is a chain over the key's elements. Weights are relative to the row's maximum in the partition. Their sum is 8
chains over keys, added in order; a sum of values is one chain over keys. Chains ascend, and a row's have only keys that
it sees. So bits of a row do not depend on rows computed with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.attention_split import PARTITION, partial_floats
from llmc.compiler.targets.gpu.kernels.exponential import exp_negative
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, some, sync
from llmc.compiler.targets.gpu.kernels.runs import Run
from llmc.compiler.targets.gpu.kernels.softmax import LEAST, Sums
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when

CHAINS = 8
_PITCH = PARTITION + CHAINS  # of a row's scores, so that items of neighbouring rows use different banks
_KEYS_OF_ITEM = PARTITION // ITEMS


class Keys(ABC):
    """What an op's attention attends to. A row is a head of a token of the run, token by token."""

    scaled: bool
    """Whether values have scales."""
    shapes: bool = False
    """Whether scores are more than scaled products."""
    sink: Callable[[Expr], Expr] | None = None
    """Of a row, a score without values."""

    @abstractmethod
    def seen(self, token: Expr) -> tuple[Expr, Expr]:
        """The first and the last key that a token sees."""

    @abstractmethod
    def begin(self, run: Run, head: Expr) -> None:
        """Starts a unit. head: the first of its heads."""

    def write_own(self, start: Expr, end: Expr) -> None:  # noqa: B027, as most kernels write none
        """Writes what the unit's token itself adds to the cache, if this kernel does that. start, end: partitions that
        the group computes."""

    @abstractmethod
    def load(self) -> None:
        """Stages the queries in shared memory."""

    @abstractmethod
    def products(self, positions: Sequence[Expr]) -> list[list[Expr]]:
        """Of each key, for each row, the scaled product."""

    def score(self, row: Expr, position: Expr, product: Expr) -> Expr:
        """The score of a key, given the scaled product."""
        return product

    @abstractmethod
    def scale(self, position: Expr) -> Expr:
        """The scale of a key's values."""

    @abstractmethod
    def values(self, position: Expr, count: int) -> Callable[[Expr], list[Expr]]:
        """An element of the values before scaling, of `count` neighbouring keys; `count` divides their positions."""

    @abstractmethod
    def put(self, row: int, element: Expr, value: Expr) -> None:
        """Writes a result."""


def rows_of(run: Run, heads: int, body: Callable[[int], None]) -> None:
    """Calls body(number of rows that are computed): rows of a single token are few."""
    if run.alone is None:
        body(heads)
        return
    with T.If(run.alone == 1):
        with T.Then():
            body(heads)
        with T.Else():
            body(heads * run.most)


class Partition:
    """The partition computed last. heads: rows of each token. width: of the values."""

    def __init__(self, k: Frame, run: Run, keys: Keys, heads: int, width: int) -> None:
        self._k, self._run, self._keys, self._heads = k, run, keys, heads
        self.rows = heads * run.most
        self._weights = Shared(self.rows * _PITCH)
        self._tops, self._totals = Shared(self.rows * CHAINS), Shared(self.rows * CHAINS)
        self._scales = Shared(PARTITION) if keys.scaled else None
        self.sums = Sums(k, self.rows, width)

    def compute(self, start: Expr) -> None:
        """start: the partition's first key. Afterwards item r may ask for `most` and `total` of row r."""
        run, self._start = self._run, start
        self._low = let(T.max(run.lowest - start, 0))
        self._end = let(T.min(run.highest - start, PARTITION - 1) + 1)
        sync()
        self._find_products()
        sync()
        self._find_scores()
        sync()
        self._find_weights()
        sync()
        self._find_sums()

    def _find_products(self) -> None:
        """Each item those of its own keys, for all rows."""
        item, run, keys = calling(self._k).item, self._run, self._keys
        own = [let(item + ITEMS * i) for i in range(_KEYS_OF_ITEM)]
        seen = [T.And(j >= self._low, j < self._end) for j in own]
        with when(T.Or(*seen)):
            # A key that no row sees may have no block: another one stands for it.
            positions = [let(T.max(T.min(self._start + j, run.highest), run.lowest)) for j in own]
            for j, position, products in zip(own, positions, keys.products(positions), strict=True):
                for row, product in enumerate(products):
                    self._weights[row * _PITCH + j] = product
                if self._scales is not None:
                    self._scales[j] = keys.scale(position)

    def _chains(self, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """Calls body(row, chain, its number) for the chains of all rows that there are."""
        with some(self._k, let(self._run.count * (self._heads * CHAINS))) as chain:
            body(let(T.truncdiv(chain, CHAINS)), let(T.truncmod(chain, CHAINS)), chain)

    def _keys_of(self, row: Expr, chain: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """Calls body(key, its place in `_weights`) for the keys of a chain that a row sees."""
        token = let(T.truncdiv(row, self._heads))
        with T.serial(let(T.truncdiv(self._low, CHAINS)), let(T.truncdiv(self._end + (CHAINS - 1), CHAINS))) as turn:
            j = let(turn * CHAINS + chain)
            position = let(self._start + j)
            with when(self._run.sees(token, position, position)):
                body(j, let(row * _PITCH + j))

    def _find_scores(self) -> None:
        def find(row: Expr, chain: Expr, number: Expr) -> None:
            most = Cell(T.float32(LEAST))

            def add(j: Expr, at: Expr) -> None:
                score = let(self._weights[at], "float32")
                if self._keys.shapes:
                    score = let(self._keys.score(row, let(self._start + j), score), "float32")
                    self._weights[at] = score
                most.set(T.max(most.get(), score))

            self._keys_of(row, chain, add)
            self._tops[number] = most.get()

        self._chains(find)

    def _find_weights(self) -> None:
        def find(row: Expr, chain: Expr, number: Expr) -> None:
            most, total = self.most(row), Cell(T.float32(0.0))

            def add(j: Expr, at: Expr) -> None:
                weight = exp_negative(let(self._weights[at] - most, "float32"))
                total.set(total.get() + weight)
                self._weights[at] = weight if self._scales is None else weight * self._scales[j]

            self._keys_of(row, chain, add)
            self._totals[number] = total.get()

        self._chains(find)

    def most(self, row: Expr) -> Expr:
        """The maximum of a row; LEAST if it sees no key."""
        found = Cell(T.float32(LEAST))
        with T.serial(CHAINS) as chain:
            found.set(T.max(found.get(), self._tops[row * CHAINS + chain]))
        return let(found.get(), "float32")

    def total(self, row: Expr) -> Expr:
        """The sum of a row's weights."""
        found = Cell(T.float32(0.0))
        with T.serial(CHAINS) as chain:
            found.set(found.get() + self._totals[row * CHAINS + chain])
        return let(found.get(), "float32")

    def _find_sums(self) -> None:
        run, step = self._run, 8 if self.rows <= 8 else 4
        self.sums.clear()
        with T.serial(let(T.truncdiv(self._low, step)), let(T.truncdiv(self._end + (step - 1), step))) as turn:
            first = let(turn * step)
            position = let(self._start + first)
            all_seen = T.And(position >= run.common_first, position + (step - 1) <= run.common_last)
            with T.If(all_seen):
                with T.Then():
                    rows_of(run, self._heads, lambda rows: self._add_all(first, position, step, rows))
                with T.Else(), T.serial(step) as i:
                    self._add_seen(let(first + i), let(position + i))

    def _add_all(self, first: Expr, position: Expr, step: int, rows: int) -> None:
        """Adds the values of keys that all rows see."""
        of_keys = self._keys.values(position, step)
        values = self.sums.of_elements(lambda element: [let(value, "float32") for value in of_keys(element)])
        for row in range(rows):
            weights = [let(self._weights[first + (row * _PITCH + i)], "float32") for i in range(step)]
            for cell, numbers in zip(self.sums.cells(row), values, strict=True):
                for weight, number in zip(weights, numbers, strict=True):
                    cell.set(fma(weight, number, cell.get()))

    def _add_seen(self, j: Expr, position: Expr) -> None:
        """Adds the values of a key to rows that see it."""
        with when(T.And(position >= self._run.lowest, position <= self._run.highest)):
            of_key = self._keys.values(position, 1)
            values = self.sums.of_elements(lambda element: let(of_key(element)[0], "float32"))
            for token in range(self._run.most):
                with when(self._run.sees(T.int32(token), position, position)):
                    for row in range(token * self._heads, (token + 1) * self._heads):
                        weight = let(self._weights[j + row * _PITCH], "float32")
                        for cell, number in zip(self.sums.cells(row), values, strict=True):
                            cell.set(fma(weight, number, cell.get()))

    def each_token(self, body: Callable[[int], None]) -> None:
        """Calls body(token) for each of the run that sees a key of the partition."""
        for token in range(self._run.most):
            if self._run.most == 1:
                body(token)
                continue
            with when(self._run.sees(T.int32(token), self._start, self._start + (PARTITION - 1))):
                body(token)

    def store(self, first: Expr, of_token: int, segments: int, width: int) -> None:
        """Writes the results to `partials`. first: the record of the first row. of_token: records of a token."""
        k, item, heads, count = self._k, calling(self._k).item, self._heads, self._run.count
        floats = partial_floats(width)

        def at(row: Expr) -> Expr:
            return let((first + T.truncdiv(row, heads) * of_token + T.truncmod(row, heads) * segments) * floats)

        with when(item < count * heads):
            start = at(item)
            k.put_raw("partials", self.most(item), start + width)
            k.put_raw("partials", self.total(item), start + (width + 1))
        for token in range(self._run.most):
            with when(token < count):
                for row in range(token * heads, (token + 1) * heads):
                    self._store_sums(row, at(T.int32(row)))

    def _store_sums(self, row: int, start: Expr) -> None:
        self.sums.each(row, lambda element, cell: self._k.put_raw("partials", cell.get(), start + element))
