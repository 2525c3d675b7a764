"""Heads as rope_kv_write makes them of qkv: normed and rotated, by the same operations whoever shares the head's work.

A sum of squares is 64 chains, of every 64th element each, which meet in one tree that joins neighbours first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.attention_split import PARTITION
from llmc.compiler.targets.gpu.kernels.fma import fma
from llmc.compiler.targets.gpu.kernels.fold import Fold, add
from llmc.compiler.targets.gpu.kernels.groups import unrolled
from llmc.compiler.targets.gpu.kernels.rows import root_factor
from llmc.compiler.targets.gpu.kernels.strips import Strip
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.gpu.tensor_cores import WARP
from llmc.compiler.targets.reference.kernels.attention import Attention, RopeWrite
from llmc.compiler.targets.reference.kernels.frame import Array, Cell, Expr, Frame, let, when

Number = Callable[[Expr, Expr], Expr]
"""The number of an element, by its place among the item's elements and its index."""


class Elements(Protocol):
    """The elements of a head that an item has. places: their number."""

    @property
    def places(self) -> int: ...

    def each(self) -> AbstractContextManager[tuple[Expr, Expr]]:
        """Loops over elements: (place among the item's elements, element of the head)."""


class Sharing(Protocol):
    """Items that share a head."""

    @property
    def elements(self) -> Elements: ...

    def squares(self, number: Number) -> Expr:
        """The sum of squares of a head's numbers. All these items call it."""


class OfGroup:
    """A group of 64 items: each has a chain."""

    def __init__(self, k: Frame, width: int, *, sums: bool) -> None:
        """sums: whether `squares` is called."""
        self.elements = Strip(k, width)
        self._fold = Fold(k, add) if sums else None

    def squares(self, number: Number) -> Expr:
        assert self._fold is not None
        found = Cell(T.float32(0.0))
        with self.elements.each() as (place, i):
            one = let(number(place, i), "float32")
            found.set(fma(one, one, found.get()))
        return self._fold(found.get())


class OfWarp:
    """A warp, whose lanes have two neighbouring chains each: sums need no barrier."""

    def __init__(self, lane: Expr, width: int) -> None:
        """lane: the item's number within its warp."""
        self._lane, self._width = lane, width
        self.elements, self.places = self, -(-width // ITEMS) * 2

    @contextmanager
    def each_pair(self) -> Iterator[tuple[Expr, Expr]]:
        """Loops over pairs of neighbours: (number among the item's, first element). The width is even."""
        with unrolled(self.places // 2) as pair:
            element = let(pair * ITEMS + self._lane * 2)
            with when(element < self._width) if self._width % ITEMS else nullcontext():
                yield pair, element

    @contextmanager
    def each(self) -> Iterator[tuple[Expr, Expr]]:
        with self.each_pair() as (pair, first), unrolled(2) as chain:
            yield pair * 2 + chain, let(first + chain)

    def squares(self, number: Number) -> Expr:
        chains = Array(2)
        with unrolled(2) as chain:
            chains[chain] = T.float32(0.0)
        with self.each() as (place, i):
            one, chain = let(number(place, i), "float32"), T.truncmod(place, 2)
            chains[chain] = fma(one, one, chains[chain])
        total, lanes = Cell(chains[0] + chains[1]), 1
        while lanes < WARP:
            other = T.call_pure_extern("float32", "llmc_of_lane", total.get(), T.int32(lanes))
            total.set(total.get() + let(other, "float32"))
            lanes *= 2
        return let(total.get(), "float32")


def rotated(k: Frame, angle: Expr, half: int, i: Expr, own: Expr, other: Expr) -> Expr:
    """Element i of a rotated vector. other: the element of the other half with which it is rotated."""
    turn = let(T.Select(i < half, i, i - half))
    cos, sin = k.raw("cos_sin", angle + turn), k.raw("cos_sin", angle + half + turn)
    return T.Select(i < half, own * cos - other * sin, own * cos + other * sin)


def partner_of(half: int, i: Expr) -> Expr:
    """The index of the element with which element i is rotated."""
    return let(T.Select(i < half, i + half, i - half))


class Turning:
    """Norms and rotates heads as a spec says."""

    def __init__(self, k: Frame, rope: RopeWrite, sharing: Sharing) -> None:
        self._k, self._rope, self._sharing = k, rope, sharing

    def head(self, source: Expr, angle: Expr, norm: Callable[[Expr], Expr], turns: Expr | None = None) -> Array:
        """This item's elements of a head. Every item that shares the head calls it.

        source: index of its first element in qkv. angle: of the token's first one in cos_sin. norm: the weight of an
        element. turns: whether the head is turned at all, 1 or 0; None: it is.
        """
        k, rope, elements = self._k, self._rope, self._sharing.elements
        norm_first, factor = rope.qk_norm and not rope.norm_rotated, Cell(T.float32(1.0))
        given, found = self.plain(source), Array(elements.places)

        def find_factor(numbers: Array) -> None:
            squares = self._sharing.squares(lambda place, _: numbers[place])
            factor.set(root_factor(squares, rope.head_dim, rope.norm_eps))

        def value(number: Expr, i: Expr) -> Expr:
            return let(number * factor.get() * norm(i), "float32") if norm_first else number

        def if_turned() -> AbstractContextManager[None]:
            return nullcontext() if turns is None else when(turns == 1)

        if norm_first:
            find_factor(given)
        with elements.each() as (place, i):
            found[place] = given[place]
            with if_turned():
                found[place] = value(given[place], i)
                if rope.rotary:
                    with when(i < rope.rotary) if rope.rotary < rope.head_dim else nullcontext():
                        partner = partner_of(rope.half, i)
                        other = value(let(k.raw("qkv", source + partner), "float32"), partner)
                        found[place] = rotated(k, angle, rope.half, i, let(found[place], "float32"), other)
        if rope.norm_rotated:
            find_factor(found)
            with elements.each() as (place, i), if_turned():
                found[place] = found[place] * factor.get() * (norm(i) if rope.qk_norm else T.float32(1.0))
        return found

    def plain(self, source: Expr) -> Array:
        """This item's elements of a head as they are."""
        given = Array(self._sharing.elements.places)
        with self._sharing.elements.each() as (place, i):
            given[place] = self._k.raw("qkv", source + i)
        return given


class OwnHeads:
    """The heads of a unit's token in rotated_attention, and where its key and value belong."""

    def __init__(self, k: Frame, rope: RopeWrite, sharing: Sharing) -> None:
        self._k, self._rope, self._turning = k, rope, Turning(k, rope, sharing)
        self.writes, self.head_dim = rope.kv_heads > 0, rope.head_dim

    def begin(self, token: Expr) -> None:
        rope = self._rope
        self._token, self._first = token, let(token * rope.all_heads)
        self._position = let(self._k.raw("positions", token))
        self._angle = let(self._position * rope.rotary)

    def is_among(self, start: Expr, end: Expr) -> Expr:
        """Whether the token's own key is in one of these partitions."""
        own = let(T.truncdiv(self._position, PARTITION))
        return T.And(start <= own, own < end)

    def _source(self, head: Expr) -> Expr:
        return let((self._first + head) * self._rope.head_dim)

    def _turned(self, head: Expr, norm: str) -> Array:
        def weight(i: Expr) -> Expr:
            return let(self._k.raw(norm, i), "float32")

        return self._turning.head(self._source(head), self._angle, weight)

    def query(self, head: Expr) -> Array:
        """This item's elements, as of all heads."""
        return self._turned(head, "q_norm")

    def key(self, kv_head: Expr) -> Array:
        return self._turned(let(kv_head + self._rope.heads), "k_norm")

    def value(self, kv_head: Expr) -> Array:
        return self._turning.plain(self._source(let(kv_head + (self._rope.heads + self._rope.kv_heads))))

    def place(self, kv_head: Expr) -> tuple[Expr, Expr, Expr]:
        """(KV block, head, position in the block) of the token."""
        slot = let(self._k.raw("slot_mapping", self._token))
        return let(T.truncdiv(slot, self._rope.block)), kv_head, let(T.truncmod(slot, self._rope.block))

    def scales(self, kv_head: Expr) -> tuple[Expr | None, Expr | None]:
        """The checkpoint's scales of the key and of the value, if stated."""
        if not self._rope.stated_scales:
            return None, None
        key, value = (let(self._k.raw("kv_scales", kv_head + i), "float32") for i in (0, self._rope.kv_heads))
        return key, value


def rotated_buffers(spec: KernelSpec, a: Attention) -> dict[str, str]:
    """Of rotated_attention: those of both ops, without the queries that pass between them."""
    rope = {name: dtype for name, dtype in RopeWrite(spec).buffers.items() if name != "out"}
    return {**rope, **{name: dtype for name, dtype in a.buffers().items() if name != "q"}}
