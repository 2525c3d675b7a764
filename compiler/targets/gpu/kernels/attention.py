"""paged_attention: a group computes a head of a token, over partitions of 64 keys counted from position 0.

Each item computes one score of a partition. Weights and weighted values are summed over ascending keys, and partitions
are folded in order. So the bits depend only on the token's position, not on the graph.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync
from llmc.compiler.targets.gpu.kernels.linear import fma
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.attention import Attention
from llmc.compiler.targets.reference.kernels.frame import (
    BLOCK_TABLE_STRIDE,
    NUM_TOKENS,
    Cell,
    Expr,
    Frame,
    let,
    when,
)
from llmc.compiler.targets.reference.kernels.functions import exp

_LEAST = -3.0e38  # below every score that is a number
OfKey = Callable[[Expr], Expr]


class OnlineSoftmax:
    """Σ weight · value over partitions of keys in order; call `begin` before each sum. width: of values, of which each
    item holds every 64th."""

    def __init__(self, k: Frame, width: int) -> None:
        self._k, self._width = k, width
        self._scores, self._weights = Shared(ITEMS), Shared(ITEMS)
        self._factors = Shared(ITEMS)
        self._most, self._sum = Cell(T.float32(0.0)), Cell(T.float32(0.0))
        self._totals = [Cell(T.float32(0.0)) for _ in range(-(-width // ITEMS))]

    def begin(self) -> None:
        self._most.set(T.float32(_LEAST))
        for cell in (self._sum, *self._totals):
            cell.set(T.float32(0.0))

    def _rescale(self, most: Expr) -> None:
        """Rescales sums to weights relative to another maximum score."""
        change = exp(self._most.get() - most)
        self._most.set(most)
        for cell in (self._sum, *self._totals):
            cell.set(cell.get() * change)

    def add(self, first: Expr, last: Expr, score: OfKey, scale: OfKey, numbers: Callable[[Expr], OfKey]) -> None:
        """Adds keys `first` … `last`. score: of a key. scale: of its values. numbers: the elements of a key's
        values."""
        item = calling(self._k).item
        with T.serial(let(T.truncdiv(first, ITEMS)), let(T.truncdiv(last, ITEMS) + 1)) as partition:
            start = let(partition * ITEMS)
            own = let(start + item)
            seen = let(T.Cast("int32", T.And(own >= first, own <= last)))
            low, end = let(T.max(first - start, 0)), let(T.min(last - start, ITEMS - 1) + 1)
            sync()
            with when(seen == 1):
                self._scores[item] = score(own)
            sync()
            most = Cell(self._most.get())
            with T.serial(low, end) as j:
                most.set(T.max(most.get(), self._scores[j]))
            self._rescale(let(most.get(), "float32"))
            with when(seen == 1):
                weight = let(exp(self._scores[item] - self._most.get()), "float32")
                self._weights[item] = weight
                self._factors[item] = weight * scale(own)
            sync()
            with T.serial(low, end) as j:
                self._sum.set(self._sum.get() + self._weights[j])
                of_key = numbers(let(start + j))
                factor = let(self._factors[j], "float32")
                for turn, total in enumerate(self._totals):
                    element = let(turn * ITEMS + item)
                    with when(element < self._width):
                        total.set(fma(factor, of_key(element), total.get()))

    def join(self, score: Expr) -> None:
        """Merges a score that has no values."""
        self._rescale(let(T.max(self._most.get(), score), "float32"))
        self._sum.set(self._sum.get() + exp(score - self._most.get()))

    def results(self, write: Callable[[Expr, Expr], None]) -> None:
        """Writes the results: write(element index, value)."""
        item = calling(self._k).item
        for turn, total in enumerate(self._totals):
            element = let(turn * ITEMS + item)
            with when(element < self._width):
                write(element, total.get() / self._sum.get())


def paged_attention(spec: KernelSpec) -> tirx.PrimFunc:
    a = Attention(spec)
    head_dim = a.head_dim
    with Frame(spec.symbol(), a.buffers()) as k:
        stride = k.scalar(BLOCK_TABLE_STRIDE)
        query, softmax = Shared(head_dim), OnlineSoftmax(k, head_dim)
        with calling(k).share_groups(let(k.scalar(NUM_TOKENS) * a.heads)) as unit:
            a.begin(k, unit, stride)
            softmax.begin()
            sync()
            with spread(k, head_dim) as i:
                query[i] = k.raw("q", unit * head_dim + i)

            def dot(key: Expr) -> Expr:
                total = Cell(T.float32(0.0))
                with T.serial(head_dim) as i:
                    total.set(fma(query[i], a.keys.number(k, key + i), total.get()))
                return total.get()

            def numbers(position: Expr) -> OfKey:
                value = a.values.row(*a.place_of(position))
                return lambda element: a.values.number(k, value + element)

            softmax.add(
                a.first,
                a.last,
                lambda position: a.score(position, dot),
                lambda position: a.values.scale(k, *a.place_of(position)),
                numbers,
            )
            if a.sinks:
                softmax.join(let(k.raw("sinks", a.head), "float32"))
            softmax.results(a.write)
    return k.function()
